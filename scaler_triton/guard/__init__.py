"""`StepGuard`, which skips bad steps in any dtype, and its rule of spikes."""
