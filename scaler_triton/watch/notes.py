"""What torch's errors do not say: people find them without their cause."""

from __future__ import annotations

from typing import Any

from scaler_triton.core.step import parameters_of
from scaler_triton.text import count_of
from scaler_triton.watch.after_skips import Following

_IN_BACKWARD = (
    "[ST07] Hooks run on its parameters in backward. If they step there (gradient release, optimizer in backward), it "
    "is by gradients that are scaled and unchecked: turn that off, or train in bf16 without a scaler."
)
_FP16 = (
    "[ST08] The parameters are fp16. Keep them in fp32, where autocast computes in fp16 all the same, or allow it: "
    "GradScaler(allow_fp16_grads=True)."
)


def add_notes(error: BaseException, optimizer: Any) -> None:
    """Add to an error of torch's what the optimizer shows of its cause."""
    text = str(error)
    if text.startswith("Attempting to unscale FP16 gradients"):
        error.add_note(_FP16)
    elif text.startswith("No inf checks were recorded") and optimizer is not None:
        parameters = parameters_of(optimizer)
        count = sum(each.grad is not None for each in parameters)
        error.add_note(f"{count} of its {count_of(len(parameters), 'parameter')} have a gradient.")
        if any(map(_steps_in_backward, parameters)):
            error.add_note(_IN_BACKWARD)


def _steps_in_backward(parameter: Any) -> bool:
    """Return whether hooks run when a gradient is complete; the second is of torch's `_apply_optimizer_in_backward`."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    of_others = [hook for hook in hooks.values() if not isinstance(getattr(hook, "__self__", None), Following)]
    return bool(of_others or getattr(parameter, "_in_backward_optimizers", None))
