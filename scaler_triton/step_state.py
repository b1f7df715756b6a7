"""What a scaler knows of one optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Required, TypedDict

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.amp.grad_scaler import OptState
    from torch.utils.weak import TensorWeakRef

    from scaler_triton.plan import GradPlan
    from scaler_triton.verdict import Verdict


class StepState(TypedDict, total=False):
    """A dict, as torch has it: its two fields, which frameworks and subclasses read and write, and ours beside them."""

    stage: Required[OptState]
    found_inf_per_device: Required[dict[torch.device, Tensor]]  # fp32, shape (); empty until somebody checked
    owner: Callable[[], Any]  # returns the optimizer, None once it is gone
    wrappers: dict[int, Callable[[], Any]]  # likewise what was passed, if those were wrappers around it, by their ids
    verdict: Verdict  # whose flags they are, if nobody wrote others since
    earlier: list[Verdict]  # of checks before: their flags stay what they were found to be
    skips: bool  # what the host read of them
    deferred: Tensor  # fp32, shape (): the `grad_scale` that `clip_grad_norm_(defer=True)` left to the step
    must_skip: bool  # the step or clipping raised, and nobody can tell which gradients it divided
    first_gradient: TensorWeakRef | None  # as it was when they were unscaled; None: there was none
    unscaled_flag: Tensor | None  # fp32, shape (): of gradients that were unscaled before an update, else None
    asked_by_step: bool  # an optimizer's step asks for the flag, once a group: all get the same
    # While gradients are examined:
    plan: GradPlan
    written: bool  # whether one of them has been written
