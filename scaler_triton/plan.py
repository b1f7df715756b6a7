"""GradPlan: an optimizer's parameters, and the layout of their gradients, which is cached from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from scaler_triton import placement
from scaler_triton.batch import Batch, Layout, LayoutKey, group, is_dense, is_plain
from scaler_triton.gradients import check_gradient, coalesce_fp16, is_acceptable, is_unreduced, reduced, sparse_values
from scaler_triton.known_forms import KnownForms
from scaler_triton.overflow_marks import OverflowMarks

if TYPE_CHECKING:
    from scaler_triton.agreement import Agreement
    from scaler_triton.verdict import Verdict

_spec_of, _shard_of = attrgetter(placement.SPEC), attrgetter(placement.SHARD)
_signature = attrgetter("__class__", "layout", "dtype", "device", "shape")


class _Form(NamedTuple):
    """All that a launch depends on: a gradient whose form was checked before need not be checked again."""

    signature: tuple[Any, ...]
    stride: tuple[int, ...]


class GradPlan:
    """The layout of one optimizer's gradients.

    A missing gradient leaves its slot empty; only a new shape, stride, dtype or device changes the layouts. The plan
    keeps parameters and layouts alive, but no gradient; replaced parameters until the next step.

    Args:
        parameters: the optimizer's, in order; of DTensors the local shards are used.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.is_distributed = any(map(placement.is_distributed, self.parameters))
        self.rebuilds = 0
        self.marks = OverflowMarks(len(self.parameters))
        # Caches of other modules; the last three begin with what they were computed from.
        self.verdict: Verdict | None = None  # the optimizer's flag
        self.agreement: tuple[Any, Agreement | None] | None = None  # the ranks that must agree
        self.joint: tuple[Any, Agreement | None] | None = None  # those that must agree on several plans together
        self.copies: tuple[Any, list[int]] | None = None  # how many ranks hold each parameter's shard
        self._known = KnownForms(len(self.parameters))
        self._dtensors = [i for i, parameter in enumerate(self.parameters) if placement.is_dtensor(parameter)]
        self._specs = self._specs_of(self.parameters)
        self._reduced_specs: list[Any] = [None] * len(self.parameters)  # of gradients that are not Partial
        self.grad_shards: dict[int, int] = {}  # number of a gradient's shards where it is not its parameter's
        self.layouts: Sequence[Layout] = ()
        self._build_layouts([self._expected_form(parameter) for parameter in self.parameters])

    def take_marks(self, other: GradPlan) -> None:
        """Copy another plan's marks of the parameters that both have."""
        here = {id(parameter): position for position, parameter in enumerate(self.parameters)}
        places = {there: here[id(p)] for there, p in enumerate(other.parameters) if id(p) in here}
        self.marks.copy_from(other.marks, places)

    def matches(self, parameters: Sequence[Tensor]) -> bool:
        """Tell whether `parameters` are the ones this plan was made for, the first still on the same device.

        And none was swapped in place for one with another placement; torch swaps no plain tensor with a DTensor.
        """
        return (
            len(parameters) == len(self.parameters)
            and all(map(is_, self.parameters, parameters))
            and (not parameters or parameters[0].device == self._first_device)
            and (not self._dtensors or self._specs_of(parameters) == self._specs)
        )

    def _specs_of(self, parameters: Sequence[Tensor]) -> list[Any]:
        """Return the DTensorSpecs; None if this torch has no such attribute."""
        dtensors = parameters if len(self._dtensors) == len(parameters) else [parameters[i] for i in self._dtensors]
        return list(map(getattr, dtensors, repeat(placement.SPEC), repeat(None)))

    def collect(self, *, allow_fp16: bool = True, summed: bool = False) -> list[Batch]:
        """Return this step's gradients as batches, detached; every one is checked, none is written.

        Uncoalesced sparse fp16 gradients are replaced by coalesced ones, as torch does. A Partial one is multiplied
        by its number of terms: if that is finite, so is the sum, which takes a collective that a rank without such a
        gradient would not join.

        Args:
            allow_fp16: False refuses fp16 gradients.
            summed: replace every unreduced gradient by its sum: all uncoalesced ones, and Partial ones, which takes a
                collective each.

        Raises: what `gradients.check_gradient` raises, naming the parameter's position.
        """
        gradients: list[Tensor | None] = [parameter.grad for parameter in self.parameters]
        shards = self._known_shards(gradients) if self._dtensors else gradients
        if self._known.match_all(shards):
            if self._fp16 and not allow_fp16:
                self._refuse_fp16(shards)
            return [Batch(layout, row(shards), True) for layout, row in zip(self.layouts, self._rows, strict=True)]
        if summed:
            self._sum_up(gradients)
        return self._collect_each(gradients, allow_fp16)

    @torch.no_grad()
    def _sum_up(self, gradients: list[Tensor | None]) -> None:
        for index, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            if gradient is not None and is_unreduced(gradient):
                gradients[index] = parameter.grad = reduced(gradient)

    def _known_shards(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the local shards if every gradient has the DTensorSpec that was seen before, not a Partial one."""
        try:
            same = list(map(_spec_of, gradients)) == self._reduced_specs  # of the same object without a look into it
            return list(map(_shard_of, gradients)) if same else []
        except AttributeError:  # a gradient is missing or no DTensor, or this torch has no such attribute
            return []

    def _collect_each(self, gradients: list[Tensor | None], allow_fp16: bool) -> list[Batch]:
        partials = self._localise(gradients)
        if self._fp16 and not allow_fp16:
            self._refuse_fp16(gradients)
        sparse: dict[int, Tensor] = {}
        if not self._known.match_present(gradients):
            gradients = [_detached(gradient) for gradient in gradients]
            sparse = self._add_forms(gradients, allow_fp16)
            if not sparse:
                self._known.learn(gradients)
        rows = [Batch(layout, row(gradients)) for layout, row in zip(self.layouts, self._rows, strict=True)]
        batches = [batch for batch in rows if any(tensor is not None for tensor in batch.tensors)]
        unreduced = [batch._replace(is_partial=True) for batch in group(partials.values(), partials)]
        return batches + group(sparse.values(), sparse) + unreduced

    def _localise(self, gradients: list[Tensor | None]) -> dict[int, Tensor]:
        """Replace DTensors by their local shards; return what is checked of Partial ones, by parameter."""
        partials = {}
        for index in self._dtensors:
            gradient = gradients[index]
            if gradient is not None:
                gradients[index] = local = placement.local_tensor(gradient)
                spec = getattr(gradient, placement.SPEC, None)
                if spec is not None and spec is self._reduced_specs[index]:
                    continue  # DTensor caches specs: mostly the same object in every step
                if placement.is_dtensor(gradient) and (terms := placement.partial_terms(gradient)) > 1:
                    partials[index] = local.detach() * terms
                else:
                    self._reduced_specs[index] = spec
                    self._note_shards(index, gradient)
        return partials

    def _note_shards(self, index: int, gradient: Tensor) -> None:
        parameter, before = self.parameters[index], self.grad_shards.get(index)
        # A plain gradient of a DTensor parameter is a local shard, split as the parameter is.
        shards = placement.num_shards(gradient if placement.is_dtensor(gradient) else parameter)
        if shards != (placement.num_shards(parameter) if before is None else before):
            self.grad_shards[index] = shards

    def _refuse_fp16(self, gradients: list[Tensor | None]) -> None:
        for index in self._fp16:  # those of a new form: see `_add_forms`
            gradient = gradients[index]
            if gradient is not None and gradient.dtype is torch.float16:
                raise ValueError("Attempting to unscale FP16 gradients.")

    def _add_forms(self, gradients: list[Tensor | None], allow_fp16: bool) -> dict[int, Tensor]:
        """Check gradients of a new form and give them slots; remove and return the values of sparse ones."""
        changed = self._changed(gradients)
        if not allow_fp16 and any(gradient.dtype is torch.float16 for _, gradient in changed):
            raise ValueError("Attempting to unscale FP16 gradients.")  # before other errors, as torch does
        for index, gradient in changed:  # all before any is replaced
            check_gradient(gradient, f"the gradient of parameter {index}")
        sparse: dict[int, Tensor] = {}
        forms = list(self._forms)
        for index, gradient in changed:
            if gradient.layout is torch.strided:
                gradients[index] = gradient
                forms[index] = _form(gradient)
            else:
                gradients[index] = None
                sparse[index] = self._values(index, gradient)
        if len(changed) > len(sparse):
            self._build_layouts(forms)
            self.rebuilds += 1
        return sparse

    def _changed(self, gradients: Sequence[Tensor | None]) -> list[tuple[int, Tensor]]:
        """Return the index and local tensor of each gradient that has another form than its slot."""
        return [
            (index, placement.local_tensor(gradient))
            for index, (gradient, form) in enumerate(zip(gradients, self._forms, strict=True))
            if gradient is not None
            and (form is None or _signature(gradient) != form.signature or gradient.stride() != form.stride)
        ]

    def _values(self, index: int, gradient: Tensor) -> Tensor:
        """Return the values of a sparse gradient; one in fp16 is replaced by its coalesced form first."""
        if gradient.dtype is torch.float16:
            # The sum of scaled fp16 duplicates may overflow: check the sum.
            gradient = coalesce_fp16(gradient)
            self.parameters[index].grad = gradient
        return sparse_values(gradient)

    def _expected_form(self, parameter: Tensor) -> _Form | None:
        """Return the form of the gradient that a parameter has or is likely to get; None if it will have none."""
        if parameter.grad is None and (not parameter.requires_grad or torch.nn.parameter.is_lazy(parameter)):
            return None  # frozen or lazy: an empty slot costs programs in every launch
        local = placement.local_tensor(parameter.detach() if parameter.grad is None else parameter.grad)
        return _form(local) if is_acceptable(local) and local.layout is torch.strided else None

    def _build_layouts(self, forms: list[_Form | None]) -> None:
        """Build a layout for each LayoutKey, with a slot for each form; if this raises, nothing has changed."""
        every = dict.fromkeys(parameter.device for parameter in self.parameters)
        devices = [device for device in every if device.type != "meta"]  # where no flag can be read
        keys = [None if form is None else _layout_key(form) for form in forms]
        layouts = [Layout(key) for key in dict.fromkeys(keys) if key is not None]
        members = [[i for i, key in enumerate(keys) if key == layout.key] for layout in layouts]
        for layout, indices in zip(layouts, members, strict=True):
            layout.positions = indices
            layout.numels = [form.signature[-1].numel() for i in indices if (form := forms[i]) is not None]
        fp16 = [i for i, key in enumerate(keys) if key is not None and key.dtype is torch.float16]
        rows = [_row(indices, len(forms)) for indices in members]
        self.marks.track(layouts)
        self._known.forget()  # they matched the layouts before
        self._first_device = next(iter(every), None)
        self.devices, self._forms, self.layouts, self._rows, self._fp16 = devices, forms, layouts, rows, fp16


def _detached(gradient: Tensor | None) -> Tensor | None:
    """Return the gradient detached from the graph of `create_graph=True`."""
    return gradient.detach() if gradient is not None and gradient.requires_grad else gradient


def _form(tensor: Tensor) -> _Form:
    return _Form(_signature(tensor), tensor.stride())


def _row(indices: Sequence[int], size: int) -> Callable[[list[Tensor | None]], Sequence[Tensor | None]]:
    """Return a function that selects a layout's gradients from all `size` of them."""
    if len(indices) == size:
        return lambda gradients: gradients
    if len(indices) == 1:
        return lambda gradients: [gradients[indices[0]]]
    return itemgetter(*indices)


def _layout_key(form: _Form) -> LayoutKey:
    kind, _, dtype, device, shape = form.signature
    plain = is_plain(kind)
    return LayoutKey(device, dtype, plain and is_dense(shape, form.stride), plain)
