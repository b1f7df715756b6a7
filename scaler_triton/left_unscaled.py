"""LeftUnscaled: of an optimizer that `update` left unscaled but not stepped; a later step must not unscale it again."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from scaler_triton.cuda_graphs import is_captured
from scaler_triton.mirror import version_counter
from scaler_triton.optimizers import parameters_of
from scaler_triton.placement import local_tensor


class Snapshot(NamedTuple):
    """A gradient, or a DTensor's shard, and its version counters, by which later writes show."""

    gradient: TensorWeakRef
    versions: tuple[int | None, int | None]

    def is_of(self, gradient: Tensor | None) -> bool:
        """Tell whether `gradient` is the same tensor, not written since."""
        return gradient is not None and self.gradient() is _held(gradient) and self.versions == _versions(gradient)


class LeftUnscaled(NamedTuple):
    """What tells later whether the gradients that `update` left are still unscaled.

    The user may have skipped that step or postponed it: the same tensors, not written since, are still unscaled; new or
    written ones are scaled.
    """

    found_inf: Tensor  # a copy of the agreed flag, fp32, shape ()
    captured: bool  # whether that update was recorded into a graph
    snapshots: list[Snapshot | None]


def leave_unscaled(optimizer: Any, found_inf: Tensor) -> LeftUnscaled | None:
    """Return what to keep of an optimizer's gradients, none of which is kept alive.

    Returns: None if there are none: this step could not be told from the next.
    """
    snapshots = snapshots_of(optimizer)
    return LeftUnscaled(found_inf, is_captured(found_inf), snapshots) if any(snapshots) else None


def first_gradient(optimizer: Any) -> TensorWeakRef | None:
    """Return a reference to an optimizer's first gradient, None if it has none.

    It stands for all of them: `zero_grad()` drops them all. A snapshot of each would cost time in every step.
    """
    gradient = _first(optimizer)
    return None if gradient is None else TensorWeakRef(_held(gradient))


def _first(optimizer: Any) -> Tensor | None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := getattr(parameter, "grad", None)) is not None:  # the plan refuses non-tensors
                return gradient  # type: ignore[no-any-return]
    return None


def first_snapshot(optimizer: Any) -> Snapshot | None:
    """Return a snapshot of an optimizer's first gradient, None if it has none."""
    return _snapshot(_first(optimizer))


def is_first(optimizer: Any, snapshot: Snapshot | None) -> bool:
    """Tell whether an optimizer's first gradient is the same as in `first_snapshot`, not written since."""
    return snapshot is not None and snapshot.is_of(_first(optimizer))


def has_first_gradient(optimizer: Any, first: TensorWeakRef | None) -> bool:
    """Tell whether an optimizer still has the gradients that it had when `first_gradient` was called."""
    now = first_gradient(optimizer)
    return first is not None and now is not None and first() is now()


def snapshots_of(optimizer: Any) -> list[Snapshot | None]:
    """Return snapshots of an optimizer's gradients, None for a missing one. No gradient is kept alive."""
    return [_snapshot(parameter.grad) for parameter in parameters_of(optimizer)]


def unchanged_since(snapshots: list[Snapshot | None], optimizer: Any) -> bool:
    """Tell whether an optimizer has the same gradients as when `snapshots_of` was called, not written since."""
    gradients = [parameter.grad for parameter in parameters_of(optimizer)]
    return len(gradients) == len(snapshots) and all(
        gradient is None if snapshot is None else snapshot.is_of(gradient)
        for gradient, snapshot in zip(gradients, snapshots, strict=True)
    )


def _snapshot(gradient: Tensor | None) -> Snapshot | None:
    return None if gradient is None else Snapshot(TensorWeakRef(_held(gradient)), _versions(gradient))


def _held(gradient: Tensor) -> Tensor:
    """Return what is referred to: of a DTensor its shard, of another tensor around tensors the first of these.

    torch refuses to swap a tensor that has a weak reference, as `model.cpu()` swaps such ones and their gradients.
    """
    while hasattr(gradient, "__tensor_flatten__"):
        names, _ = gradient.__tensor_flatten__()
        gradient = getattr(gradient, names[0])
    return gradient


def _versions(gradient: Tensor) -> tuple[int | None, int | None]:
    """Return the version counters of a gradient and, of a DTensor, of its shard, which may be written directly."""
    return version_counter(gradient), version_counter(local_tensor(gradient))
