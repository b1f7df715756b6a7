"""GradPlan: an optimizer's parameters, and their gradients as batches that keep their shape from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaler_triton import batch as batching
from scaler_triton.batch import Batch, Layout, LayoutKey
from scaler_triton.optimizers import parameters_of, unwrap, weak


class _Slot(NamedTuple):
    """Where a parameter's gradient goes, and what that gradient must look like."""

    signature: tuple[Any, ...]
    layout: int
    position: int


def _signature(local: Tensor) -> tuple[Any, ...]:
    return (type(local), local.device, local.dtype, local.shape, local.stride())


class GradPlan:
    """What one optimizer's gradients look like.

    A gradient that is absent leaves its slot empty; only a new shape, stride, dtype or device plans anew. The
    plan keeps parameters and layouts, never a gradient.

    Args:
        parameters: the optimizer's, in order; DTensors enter as their local shards.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.devices = list(dict.fromkeys(parameter.device for parameter in self.parameters))
        self.rebuilds = -1  # counts re-plans
        self.agreement: Any = None  # whoever works out which ranks must agree keeps the answer here
        self._layouts: list[Layout] = []
        self._slots: dict[int, _Slot] = {}
        self._place()

    def matches(self, parameters: Sequence[Tensor]) -> bool:
        """Tell whether `parameters` are the ones this plan was made for."""
        return len(parameters) == len(self.parameters) and all(
            mine is theirs for mine, theirs in zip(self.parameters, parameters, strict=True)
        )

    def collect(self, *, allow_fp16: bool = True) -> list[Batch]:
        """Return this step's gradients as batches; every one is checked, none is written.

        Uncoalesced sparse fp16 gradients are replaced by coalesced ones, as torch does.

        Raises: what `batch.check_gradient` raises, naming the parameter's position.
        """
        dense, loose = self._gather(allow_fp16)
        if any(self._misfits(index, local) for index, local in dense):
            self._place(dict(dense))
        filled: list[list[Tensor | None]] = [[None] * len(layout.numels) for layout in self._layouts]
        for index, local in dense:
            slot = self._slots[index]
            filled[slot.layout][slot.position] = local
        batches = [Batch(layout, row) for layout, row in zip(self._layouts, filled, strict=True)]
        return [b for b in batches if any(t is not None for t in b.tensors)] + batching.group(loose)

    def _gather(self, allow_fp16: bool) -> tuple[list[tuple[int, Tensor]], list[Tensor]]:
        """Split the gradients into strided ones, which have slots, and sparse values, which change size."""
        dense: list[tuple[int, Tensor]] = []
        loose: list[Tensor] = []
        for index, gradient in self._gradients(allow_fp16):
            if gradient.layout is torch.strided:
                dense.append((index, gradient))
            else:
                loose.append(self._values(index, gradient))
        return dense, loose

    def _gradients(self, allow_fp16: bool) -> Iterator[tuple[int, Tensor]]:
        found = []  # a list, so that all are checked before the caller touches the first
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                local = batching.local_tensor(parameter.grad)
                batching.check_gradient(local, f"the gradient of parameter {index}", allow_fp16=allow_fp16)
                found.append((index, local))
        return iter(found)

    def _values(self, index: int, gradient: Tensor) -> Tensor:
        if gradient.dtype is torch.float16:
            # Scaled fp16 duplicates may overflow when they are summed: check the sum.
            gradient = batching.coalesce_fp16(gradient)
            self.parameters[index].grad = gradient
        return batching.sparse_values(gradient)

    def _misfits(self, index: int, local: Tensor) -> bool:
        slot = self._slots.get(index)
        return slot is None or slot.signature != _signature(local)

    def _place(self, gradients: dict[int, Tensor] | None = None) -> None:
        """Give every gradient a slot: those there are, those known from before, those to be expected."""
        known = {index: slot.signature for index, slot in self._slots.items()}
        known.update((index, _signature(local)) for index, local in (gradients or {}).items())
        positions: dict[LayoutKey, int] = {}
        self._layouts, self._slots = [], {}
        for index, parameter in enumerate(self.parameters):
            if index not in known and not parameter.requires_grad:
                continue  # frozen: a slot would cost a launch's chunks for nothing
            signature = known.get(index) or _signature(batching.local_tensor(parameter.detach()))
            self._add_slot(index, signature, positions)
        self.rebuilds += 1

    def _add_slot(self, index: int, signature: tuple[Any, ...], positions: dict[LayoutKey, int]) -> None:
        kind, device, dtype, shape, stride = signature
        model = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        plain = kind in (Tensor, torch.nn.Parameter)
        key = LayoutKey(device, dtype, plain and batching.is_dense(model), plain)
        if key not in positions:
            positions[key] = len(self._layouts)
            self._layouts.append(Layout(key))
        layout = self._layouts[positions[key]]
        self._slots[index] = _Slot(signature, positions[key], len(layout.numels))
        layout.numels.append(shape.numel())


class PlanCache:
    """The plans of a scaler's optimizers; each lives as long as its optimizer and the parameters it was made for."""

    def __init__(self) -> None:
        self._plans: dict[int, tuple[Callable[[], Any], GradPlan]] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, optimizer: Any) -> GradPlan:
        """Return the optimizer's plan, made anew when its parameters changed.

        Raises: AssertionError with torch's text if a parameter is not a tensor.
        """
        inner = unwrap(optimizer)
        parameters = parameters_of(inner)
        owner, plan = self._plans.get(id(inner), (None, None))
        if owner is None or plan is None or owner() is not inner or not plan.matches(parameters):
            plan = GradPlan(parameters)
            self._plans[id(inner)] = (weak(inner, self._forgetter(id(inner))), plan)
        return plan

    def _forgetter(self, key: int) -> Callable[[Any], None]:
        plans = self._plans  # not self: a dead optimizer must not keep a dead scaler

        def forget(reference: Any) -> None:
            if plans.get(key, (None,))[0] is reference:
                del plans[key]

        return forget
