"""The start of a step: the scale is created, and a loss multiplied by it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from scaler_triton.attributes import ScalerAttributes
from scaler_triton.cuda_graphs import is_captured, refuse_capture
from scaler_triton.left_unscaled import first_snapshot

Outputs = TypeVar("Outputs")  # a tensor, or an iterable of them


class ScalingMixin(ScalerAttributes):
    """`scale`, which creates the scale when it is first called."""

    def scale(self, outputs: Outputs) -> Outputs:
        """Return the outputs times the scale; themselves on a disabled scaler.

        Args:
            outputs: a loss, or an iterable of them, of any shape, dtype and device; read.

        Returns: the products, in torch's dtypes: `ShardedGradScaler` keeps that of each output.

        Raises: RuntimeError for a scaler's first call if a graph is being captured; torch's errors otherwise.
        """
        if self._enabled and (self._per_optimizer_states or self._device == "cuda"):  # else there is nothing to note
            self._note_scaling()
        scaled: Outputs = super().scale(outputs)  # type: ignore[call-overload]
        return scaled

    def _note_scaling(self) -> None:
        """Note that a loss is scaled: its backward may write new gradients into the same tensors, a graph's unseen."""
        if self._scale is not None and is_captured(self._scale):
            self._records.replayed = True
        for state in [*self._per_optimizer_states.values()]:
            if state.get("stage") is not OptState.UNSCALED or "owner" not in state:
                continue
            state["left_behind"] = state.get("step_began", False)
            if "before_loss" not in state:
                owner = state["owner"]()
                state["before_loss"] = None if owner is None else first_snapshot(owner)

    def _get_scale_async(self) -> Tensor | None:
        return getattr(self, "_scale", None)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        """Create scale and tracker on `dev` (a device or its name) unless they are there already."""
        device = torch.device(dev)
        if getattr(self, "_scale", None) is None:
            refuse_capture(device, "a scaler's first scale")  # a replay would set it anew
        # Within torch.func's transforms they would have no address; updates outside inference mode must write them.
        with torch.inference_mode(False), _outside_transforms():
            if getattr(self, "_scale", None) is None:  # a disabled scaler has no such attribute
                self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=device)
            if getattr(self, "_growth_tracker", None) is None:
                self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=device)


def _outside_transforms() -> AbstractContextManager[Any]:
    """Return a context outside torch.func's transforms, by a private function of torch; a null one without it."""
    module = sys.modules.get("torch._functorch.pyfunctorch")
    leave: Callable[[], Any] = getattr(module, "temporarily_clear_interpreter_stack", nullcontext)
    context: AbstractContextManager[Any] = leave()
    return context
