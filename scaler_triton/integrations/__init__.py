"""Frameworks that build the scaler, clip, ask whether a step was skipped, or saved a state: one file each."""
