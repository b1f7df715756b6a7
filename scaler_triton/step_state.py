"""StepState: torch's per-optimizer state of a step, with the fields that this package adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Required, TypedDict

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.amp.grad_scaler import OptState
    from torch.utils.weak import TensorWeakRef

    from scaler_triton.left_unscaled import Snapshot
    from scaler_triton.verdict import Verdict


class StepState(TypedDict, total=False):
    """A dict as in torch, whose two fields frameworks and subclasses read and write, with fields of ours."""

    stage: Required[OptState]
    found_inf_per_device: Required[dict[torch.device, Tensor]]  # fp32, shape (); empty until gradients were checked
    # Whose state it is:
    owner: Callable[[], Any]  # returns the optimizer, None once it is gone
    wrappers: dict[int, Callable[[], Any]]  # by id: likewise the wrappers around it that were passed
    # Its flag:
    verdict: Verdict  # the source of these flags, unless others have replaced them
    earlier: list[Verdict]  # of earlier checks in this step: keeps their flags from being reused
    skips: bool  # the flag as the host read it
    read_on: int  # handle of the stream on which a fused step reads it
    # Its gradients:
    first_gradient: TensorWeakRef | None  # when they were unscaled; None: there was none
    before_loss: Snapshot | None  # of the same one, when a loss was scaled after that; None: there was none
    captured: bool  # whether they were unscaled in a capture
    recalled_flag: Tensor | None  # fp32, shape (): of gradients that an update left unscaled, see Records.recall
    deferred: Tensor  # fp32, shape (): the `grad_scale` that `clip_grad_norm_(defer=True)` left to the step
    # Within one call, and after one that raised:
    step_began: bool
    left_behind: bool  # another loss was scaled before that step returned
    asked_by_step: bool  # within an optimizer's step that asks for the flag itself, perhaps for each group
    written: bool  # while gradients are checked or unscaled: whether one of them has been written
    must_skip: bool  # the step or clipping raised: unknown which gradients it has divided
