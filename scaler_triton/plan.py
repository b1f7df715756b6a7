"""GradPlan: an optimizer's parameters, and their gradients as batches that keep their shape from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from scaler_triton import placement
from scaler_triton.batch import Batch, Layout, LayoutKey, group, is_dense, is_plain
from scaler_triton.gradients import check_gradient, coalesce_fp16, is_acceptable, is_yet_a_sum, sparse_values, sum_of
from scaler_triton.known_forms import KnownForms
from scaler_triton.overflow_marks import OverflowMarks

if TYPE_CHECKING:
    from scaler_triton.agreement import Agreement
    from scaler_triton.verdict import Verdict

_spec_of, _shard_of = attrgetter(placement.SPEC), attrgetter(placement.SHARD)
_look = attrgetter("__class__", "layout", "dtype", "device", "shape")


class _Form(NamedTuple):
    """All that a launch relies on: a gradient of a form that was checked need not be checked again."""

    look: tuple[Any, ...]
    stride: tuple[int, ...]


class Gradients(NamedTuple):
    """One step's gradients.

    Args:
        batches: what this rank holds of them.
        bounds: read-only batches that are finite only if the sums of unreduced (Partial) gradients are: summing them
            here would take a collective that a rank without such a gradient does not join.
    """

    batches: list[Batch]
    bounds: list[Batch]


class GradPlan:
    """What one optimizer's gradients look like.

    A gradient that is absent leaves its slot empty; only a new shape, stride, dtype or device plans anew. The
    plan keeps parameters and layouts, no gradient by itself; parameters that are replaced, until the next step.

    Args:
        parameters: the optimizer's, in order; DTensors enter as their local shards.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.is_placed = any(map(placement.is_placed, self.parameters))
        self.rebuilds = 0
        self.marks = OverflowMarks(len(self.parameters))
        # What others work out once and keep here; the last four with what they worked it out from.
        self.verdict: Verdict | None = None  # the optimizer's flag
        self.agreement: tuple[Any, Any, Agreement | None] | None = None  # the ranks that must agree
        self.joint: tuple[Any, Any, Agreement | None] | None = None  # those that must agree on several plans at once
        self.copies: tuple[Any, Any, list[int]] | None = None  # how many ranks hold each parameter
        self.recounted: tuple[Any, Any, list[int]] | None = None  # how many hold each gradient
        self._known = KnownForms(len(self.parameters))
        self._dtensors = [i for i, parameter in enumerate(self.parameters) if placement.is_dtensor(parameter)]
        self._whole_specs: list[Any] = [None] * len(self.parameters)  # of DTensors that are not Partial
        self.cut: dict[int, int] = {}  # whose gradient is not cut as the parameter is, and into how many pieces
        self.layouts: Sequence[Layout] = ()  # what the gradients' batches have in common from step to step
        self._place([self._expected_form(parameter) for parameter in self.parameters])

    def take_marks(self, other: GradPlan) -> None:
        """Keep what another plan knows of parameters that are in this one, too."""
        here = {id(parameter): position for position, parameter in enumerate(self.parameters)}
        places = {there: here[id(p)] for there, p in enumerate(other.parameters) if id(p) in here}
        self.marks.take(other.marks, places)

    def matches(self, parameters: Sequence[Tensor]) -> bool:
        """Tell whether `parameters` are the ones this plan was made for, the first of them where it was."""
        return (
            len(parameters) == len(self.parameters)
            and all(map(is_, self.parameters, parameters))
            and (not parameters or parameters[0].device == self._first_device)
        )

    def collect(self, *, allow_fp16: bool = True, summed: bool = False) -> Gradients:
        """Return this step's gradients as batches; every one is checked, none is written. No op on them is recorded.

        Uncoalesced sparse fp16 gradients are replaced by coalesced ones, as torch does.

        Args:
            allow_fp16: whether fp16 gradients are.
            summed: replace what is yet to be summed by its sum: other uncoalesced gradients too, and Partial ones,
                which takes a collective each.

        Raises: what `gradients.check_gradient` raises, naming the parameter's position.
        """
        gradients: list[Tensor | None] = [parameter.grad for parameter in self.parameters]
        shards = self._whole_shards(gradients) if self._dtensors else gradients
        if self._known.all_there(shards):
            if self._fp16 and not allow_fp16:
                self._refuse_fp16(shards)
            batches = [Batch(layout, row(shards), True) for layout, row in zip(self.layouts, self._rows, strict=True)]
            return Gradients(batches, [])
        if summed:
            self._sum_up(gradients)
        return self._collect_each(gradients, allow_fp16)

    @torch.no_grad()
    def _sum_up(self, gradients: list[Tensor | None]) -> None:
        for index, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            if gradient is not None and is_yet_a_sum(gradient):
                gradients[index] = parameter.grad = sum_of(gradient)

    def _whole_shards(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the shards of gradients that are all there and none of them Partial, as before; else none."""
        try:
            same = all(map(is_, map(_spec_of, gradients), self._whole_specs))
            return list(map(_shard_of, gradients)) if same else []
        except AttributeError:  # one is missing, or plain, or this torch has no such attribute
            return []

    def _collect_each(self, gradients: list[Tensor | None], allow_fp16: bool) -> Gradients:
        bounds = self._localise(gradients)
        if self._fp16 and not allow_fp16:
            self._refuse_fp16(gradients)
        loose: dict[int, Tensor] = {}
        if not self._known.hold(gradients):
            gradients = [_unrecorded(gradient) for gradient in gradients]
            loose = self._admit(gradients, allow_fp16)
            if not loose:
                self._known.learn(gradients)
        rows = [Batch(layout, row(gradients)) for layout, row in zip(self.layouts, self._rows, strict=True)]
        batches = [batch for batch in rows if any(tensor is not None for tensor in batch.tensors)]
        return Gradients(batches + group(loose.values(), loose), group(bounds.values(), bounds))

    def _localise(self, gradients: list[Tensor | None]) -> dict[int, Tensor]:
        """Put shards in the place of DTensors; return what bounds the sums of those that are Partial, by position."""
        bounds = {}
        for index in self._dtensors:
            gradient = gradients[index]
            if gradient is not None:
                gradients[index] = local = placement.local_tensor(gradient)
                spec = getattr(gradient, placement.SPEC, None)
                if spec is not None and spec is self._whole_specs[index]:
                    continue  # gradients of one parameter mostly share one: it need not be read again
                if placement.is_dtensor(gradient) and (terms := placement.partial_terms(gradient)) > 1:
                    bounds[index] = local.detach() * terms
                else:
                    self._whole_specs[index] = spec
                    self._note_cut(index, gradient)
        return bounds

    def _note_cut(self, index: int, gradient: Tensor) -> None:
        parameter, before = self.parameters[index], self.cut.get(index)
        # A plain gradient of a DTensor parameter is its shard, and cut as that is.
        pieces = placement.cut_into(gradient if placement.is_dtensor(gradient) else parameter)
        if pieces != (placement.cut_into(parameter) if before is None else before):
            self.cut = {**self.cut, index: pieces}  # another object: whoever knows the old one sees it

    def _refuse_fp16(self, gradients: list[Tensor | None]) -> None:
        for index in self._fp16:  # those of a new form are checked when they are admitted
            gradient = gradients[index]
            if gradient is not None and gradient.dtype is torch.float16:
                raise ValueError("Attempting to unscale FP16 gradients.")

    def _admit(self, gradients: list[Tensor | None], allow_fp16: bool) -> dict[int, Tensor]:
        """Check gradients of a new form and make room for them; take out and return sparse ones, which have no slot."""
        strange = [
            (index, placement.local_tensor(gradient))
            for index, (gradient, form) in enumerate(zip(gradients, self._forms, strict=True))
            if gradient is not None
            and (form is None or _look(gradient) != form.look or gradient.stride() != form.stride)
        ]
        if not allow_fp16 and any(gradient.dtype is torch.float16 for _, gradient in strange):
            raise ValueError("Attempting to unscale FP16 gradients.")  # before other errors, as torch does
        for index, gradient in strange:  # all of them, before the first is touched
            check_gradient(gradient, f"the gradient of parameter {index}")
        loose: dict[int, Tensor] = {}
        forms = list(self._forms)
        for index, gradient in strange:
            if gradient.layout is torch.strided:
                gradients[index] = gradient
                forms[index] = _form(gradient)
            else:
                gradients[index] = None
                loose[index] = self._values(index, gradient)
        if len(strange) > len(loose):
            self._place(forms)
            self.rebuilds += 1
        return loose

    def _values(self, index: int, gradient: Tensor) -> Tensor:
        if gradient.dtype is torch.float16:
            # Scaled fp16 duplicates may overflow when they are summed: check the sum.
            gradient = coalesce_fp16(gradient)
            self.parameters[index].grad = gradient
        return sparse_values(gradient)

    def _expected_form(self, parameter: Tensor) -> _Form | None:
        """Return the form of the gradient that a parameter has or is likely to get; None if none is to be expected."""
        if parameter.grad is None and (not parameter.requires_grad or torch.nn.parameter.is_lazy(parameter)):
            return None  # frozen, or of no shape yet: a slot would cost a launch's chunks for nothing
        local = placement.local_tensor(parameter.detach() if parameter.grad is None else parameter.grad)
        return _form(local) if is_acceptable(local) and local.layout is torch.strided else None

    def _place(self, forms: list[_Form | None]) -> None:
        """Give every form a slot, one layout for each device, dtype and kind of memory; all of it or nothing."""
        every = dict.fromkeys(parameter.device for parameter in self.parameters)
        devices = [device for device in every if device.type != "meta"]  # nobody could read a flag there
        keys = [None if form is None else _layout_key(form) for form in forms]
        layouts = [Layout(key) for key in dict.fromkeys(keys) if key is not None]
        members = [[i for i, key in enumerate(keys) if key == layout.key] for layout in layouts]
        for layout, indices in zip(layouts, members, strict=True):
            layout.positions = indices
            layout.numels = [form.look[-1].numel() for i in indices if (form := forms[i]) is not None]
        fp16 = [i for i, key in enumerate(keys) if key is not None and key.dtype is torch.float16]
        rows = [_row(indices, len(forms)) for indices in members]
        self.marks.follow(layouts)
        self._known.forget()  # what passed for the layouts before need not fit these
        self._first_device = next(iter(every), None)
        self.devices, self._forms, self.layouts, self._rows, self._fp16 = devices, forms, layouts, rows, fp16


def _unrecorded(gradient: Tensor | None) -> Tensor | None:
    """Return the gradient such that no graph records what is done to it, as that of `create_graph=True` would."""
    return gradient.detach() if gradient is not None and gradient.requires_grad else gradient


def _form(tensor: Tensor) -> _Form:
    return _Form(_look(tensor), tensor.stride())


def _row(indices: Sequence[int], size: int) -> Callable[[list[Tensor | None]], Sequence[Tensor | None]]:
    """Return what picks a layout's gradients out of all `size` of them."""
    if len(indices) == size:
        return lambda gradients: gradients
    if len(indices) == 1:
        return lambda gradients: [gradients[indices[0]]]
    return itemgetter(*indices)


def _layout_key(form: _Form) -> LayoutKey:
    kind, _, dtype, device, shape = form.look
    plain = is_plain(kind)
    return LayoutKey(device, dtype, plain and is_dense(shape, form.stride), plain)
