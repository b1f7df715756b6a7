"""An optimizer's gradients as batches, whose layouts are kept from step to step.

A batch is what one pass reads and writes: local tensors of one device and dtype. In a steady step one call of torch's
guard finds that every gradient has the form (type, dtype, device, shape, strides) it had when it was inspected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_, is_not, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from scaler_triton import gradients
from scaler_triton.dispatch import Backend, choose
from scaler_triton.gradients import check_gradient, coalesce_fp16, is_unreduced, local_tensor, reduced, sparse_values
from scaler_triton.torch_ops import InverseScale

if TYPE_CHECKING:
    from scaler_triton.kernels.table import GradTable
    from scaler_triton.ranks import Ranks
    from scaler_triton.report import Marks

_spec_of, _shard_of = attrgetter(gradients.SPEC), attrgetter(gradients.SHARD)
_grad_of = attrgetter("grad")
_signature = attrgetter("__class__", "layout", "dtype", "device", "shape")

# How often a guard is replaced. A guard may fail at every step for reasons that do not matter here, and making one
# costs more than comparing the forms.
_PATIENCE = 16


class LayoutKey(NamedTuple):
    """What all tensors of a batch share."""

    device: torch.device
    dtype: torch.dtype
    dense: bool  # the elements fill one span of memory without gaps or overlap, in any order
    plain: bool  # not a tensor subclass


class Layout:
    """The part of a batch that is kept between steps: a slot for each tensor, and what its passes use."""

    __slots__ = ("backend", "clips", "generation", "key", "numels", "positions", "tables", "weights")

    def __init__(self, key: LayoutKey, numels: list[int], positions: list[int]) -> None:
        # For each slot: its number of elements, and its parameter's index in the optimizer.
        self.key, self.numels, self.positions = key, numels, positions
        self.backend: Backend | None = None  # None: not chosen yet
        self.clips: Backend | None = None  # the same, for norms and clipping
        self.tables: dict[str, GradTable] = {}  # for kernels, by pass
        self.generation: Tensor | None = None  # the skip count that kernels mark with, on the device; None: no marks
        self.weights: tuple[Any, list[float] | None] | None = None  # replica counts, and each slot's weight in a norm


class Batch(NamedTuple):
    """At least one gradient for one pass: `tensors[i]` fills slot i of `layout`, None where one is missing."""

    layout: Layout
    tensors: Sequence[Tensor | None]
    complete: bool = False  # whether no gradient is known to be missing
    is_partial: bool = False  # whether these are Partial gradients times their numbers of terms: only to be checked

    @property
    def present(self) -> Sequence[Tensor]:
        """The gradients without the missing ones, in slot order."""
        if self.complete:
            return self.tensors  # type: ignore[return-value]
        return [tensor for tensor in self.tensors if tensor is not None]


Row = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]


class GradPlan:
    """The parameters of one optimizer, and the layouts of their gradients.

    A missing gradient leaves its slot empty; only a new shape, stride, dtype or device changes the layouts. The plan
    keeps parameters and layouts alive, but no gradient; it keeps replaced parameters until the next step.
    """

    marks: Marks  # of overflows; set by the registry that makes the plan
    devices: list[torch.device]  # the parameters' devices, which need a flag
    layouts: Sequence[Layout]
    _guard: Callable[..., bool] | None  # of all gradients that are not missing
    _missing: Row | None  # selects the gradients that were missing; None: none was
    _present: Any  # selects the others
    _last_missing: list[int] | None
    _each: list[Callable[..., bool] | None]  # guards of single gradients
    _patience: int
    _whole: Layout | None  # the layout whose slots are all gradients in their order, if there is one

    def __init__(self, parameters: Sequence[Tensor], requested: str) -> None:
        for parameter in parameters:
            if not isinstance(parameter, Tensor):
                raise AssertionError(f"expected param to be torch.Tensor, got {type(parameter).__name__}")
        self.parameters = list(parameters)
        self.requested = requested
        self.is_distributed = any(map(gradients.is_distributed, self.parameters))
        self.rebuilds = 0  # how often gradients of a new form have changed the layouts
        # What other modules compute from the parameters, each with what it was computed from.
        self.ranks: tuple[Any, Ranks | None] | None = None  # the ranks that must agree
        self.joint_ranks: tuple[Any, Ranks | None] | None = None  # the same, for optimizers that are clipped together
        self.replicas: tuple[Any, list[int]] | None = None  # how many ranks hold each parameter's shard
        self.inverse = InverseScale()
        self.written = False  # whether the last pass began to write the gradients
        self._dtensors = [i for i, parameter in enumerate(self.parameters) if gradients.is_dtensor(parameter)]
        self._specs = self._specs_of(self.parameters)
        self._reduced_specs: list[Any] = [None] * len(self.parameters)  # of gradients that are not Partial
        self.grad_shards: dict[int, int] = {}  # the number of a gradient's shards where its parameter has another
        self._build_layouts([_expected_form(parameter) for parameter in self.parameters])

    def matches(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether `parameters` are this plan's, with the same placements, the first on the same device."""
        return (
            len(parameters) == len(self.parameters)
            and all(map(is_, self.parameters, parameters))
            and (not parameters or parameters[0].device == self._first_device)
            and (not self._dtensors or self._specs_of(parameters) == self._specs)
        )

    def collect(self, *, allow_fp16: bool = True, summed: bool = False) -> list[Batch]:
        """Return this step's gradients as batches, detached and accepted by `gradients.check_gradient`.

        Uncoalesced sparse fp16 gradients are replaced by coalesced ones, as torch does. A Partial one is multiplied by
        its number of terms: if that is finite, so is the sum, which needs a collective that a rank without such a
        gradient would not join. With `summed` every unreduced gradient is replaced by its sum, even so.
        """
        grads: list[Tensor | None] = list(map(_grad_of, self.parameters))
        local = self._known_shards(grads) if self._dtensors else grads
        guard, missing = self._guard, self._missing
        if guard is None or not local:
            is_as_before = False
        elif missing is None:
            is_as_before = guard(*local)
        else:
            is_as_before = not any(map(is_not, missing(local), repeat(None))) and guard(*self._present(local))
        if is_as_before:
            if self._fp16 and not allow_fp16:
                self._refuse_fp16(local)
            if missing is None and self._whole is not None:
                return [Batch(self._whole, local, True)]
            pairs = zip(self.layouts, self._rows, strict=True)
            rows = [Batch(layout, local if row is None else row(local), missing is None) for layout, row in pairs]
            return (
                rows if missing is None else [batch for batch in rows if any(map(is_not, batch.tensors, repeat(None)))]
            )
        if summed:
            with torch.no_grad():
                for index, (parameter, grad) in enumerate(zip(self.parameters, grads, strict=True)):
                    if grad is not None and is_unreduced(grad):
                        grads[index] = parameter.grad = reduced(grad)
        return self._inspect(grads, allow_fp16)

    def _known_shards(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the local shards if every gradient has the DTensorSpec seen before and none is Partial, else []."""
        try:
            same = list(map(_spec_of, grads)) == self._reduced_specs  # equal objects are found without a look into them
            return list(map(_shard_of, grads)) if same else []
        except AttributeError:  # a gradient is missing or no DTensor, or this torch has no such attribute
            return []

    def _inspect(self, grads: list[Tensor | None], allow_fp16: bool) -> list[Batch]:
        """Do the work of `collect` when something has changed: look at each gradient."""
        partials = self._localise(grads)
        if self._fp16 and not allow_fp16:
            self._refuse_fp16(grads)
        sparse: dict[int, Tensor] = {}
        pairs = zip(grads, self._each, strict=True)
        if not all(grad is None or (guard is not None and guard(grad)) for grad, guard in pairs):
            grads = [grad.detach() if grad is not None and grad.requires_grad else grad for grad in grads]
            sparse = self._add_forms(grads, allow_fp16)
        if not sparse:
            self._learn(grads)
        rows = zip(self.layouts, self._rows, strict=True)
        every = [Batch(layout, grads if row is None else row(grads)) for layout, row in rows]
        batches = [batch for batch in every if any(tensor is not None for tensor in batch.tensors)]
        batches += group(sparse.values(), sparse)
        batches += [batch._replace(is_partial=True) for batch in group(partials.values(), partials)]
        choose_backends(batches, self.requested)
        return batches

    def _localise(self, grads: list[Tensor | None]) -> dict[int, Tensor]:
        """Replace DTensors by their local shards; return the tensors to be checked for Partial ones, by parameter."""
        partials = {}
        for index in self._dtensors:
            grad = grads[index]
            if grad is None:
                continue
            grads[index] = local = local_tensor(grad)
            spec = getattr(grad, gradients.SPEC, None)
            if spec is not None and spec is self._reduced_specs[index]:
                continue  # DTensor caches specs: mostly the same object in every step
            if gradients.is_dtensor(grad) and (terms := gradients.partial_terms(grad)) > 1:
                partials[index] = local.detach() * terms
                continue
            self._reduced_specs[index] = spec
            parameter, before = self.parameters[index], self.grad_shards.get(index)
            # A plain gradient of a DTensor parameter is a local shard, split as the parameter is.
            shards = gradients.num_shards(grad if gradients.is_dtensor(grad) else parameter)
            if shards != (gradients.num_shards(parameter) if before is None else before):
                self.grad_shards[index] = shards
        return partials

    def _refuse_fp16(self, grads: Sequence[Tensor | None]) -> None:
        if any((grad := grads[index]) is not None and grad.dtype is torch.float16 for index in self._fp16):
            raise ValueError("Attempting to unscale FP16 gradients.")

    def _add_forms(self, grads: list[Tensor | None], allow_fp16: bool) -> dict[int, Tensor]:
        """Check gradients of a new form and give them slots; remove and return the values of sparse ones."""
        changed = [
            (index, local_tensor(grad))
            for index, (grad, form) in enumerate(zip(grads, self._forms, strict=True))
            if grad is not None and (form is None or _signature(grad) != form.signature or grad.stride() != form.stride)
        ]
        if not allow_fp16 and any(grad.dtype is torch.float16 for _, grad in changed):
            raise ValueError("Attempting to unscale FP16 gradients.")  # before other errors, as torch does
        for index, grad in changed:  # all before any is replaced
            check_gradient(grad, f"the gradient of parameter {index}")
        sparse: dict[int, Tensor] = {}
        forms = list(self._forms)
        for index, grad in changed:
            if grad.layout is torch.strided:
                grads[index] = grad
                forms[index] = _form(grad)
                continue
            grads[index] = None
            if grad.dtype is torch.float16:
                # The sum of scaled fp16 duplicates may overflow: check the sum.
                self.parameters[index].grad = grad = coalesce_fp16(grad)
            sparse[index] = sparse_values(grad)
        if len(changed) > len(sparse):
            self._build_layouts(forms)
            self.rebuilds += 1
        return sparse

    def _learn(self, grads: Sequence[Tensor | None]) -> None:
        """Make a guard for all gradients if the same ones are missing again; else, as with experts, one for each."""
        here = [index for index, grad in enumerate(grads) if grad is not None]
        missing = [index for index, grad in enumerate(grads) if grad is None]
        again, self._last_missing = missing in ([], self._last_missing), missing
        if self._patience == 0 or not here:
            return
        if again:
            self._patience -= 1
            self._guard = form_guard([grads[index] for index in here])
            self._present = _row(here, len(grads)) if missing else None
            self._missing = _row(missing, len(grads)) if missing else None
        else:
            for index in here:
                self._each[index] = self._each[index] or form_guard([grads[index]])

    def _specs_of(self, parameters: Sequence[Tensor]) -> list[Any]:
        """Return each DTensor's DTensorSpec, None if this torch has no such attribute."""
        dtensors = parameters if len(self._dtensors) == len(parameters) else [parameters[i] for i in self._dtensors]
        return list(map(getattr, dtensors, repeat(gradients.SPEC), repeat(None)))

    def _build_layouts(self, forms: list[_Form | None]) -> None:
        """Build a layout for each LayoutKey, with a slot for each form; change nothing if this raises."""
        every = dict.fromkeys(parameter.device for parameter in self.parameters)
        devices = [device for device in every if device.type != "meta"]  # where no flag can be read
        members: dict[LayoutKey, list[int]] = {}
        for index, form in enumerate(forms):
            if form is not None:
                members.setdefault(form.key, []).append(index)
        layouts = [
            Layout(key, [form.numel for i in places if (form := forms[i]) is not None], places)
            for key, places in members.items()
        ]
        self._rows = [None if len(places) == len(forms) else _row(places, len(forms)) for places in members.values()]
        self._fp16 = [i for key, places in members.items() if key.dtype is torch.float16 for i in places]
        self._first_device = next(iter(every), None)
        self.devices, self._forms, self.layouts = devices, forms, layouts
        # The guards belonged to the former layouts.
        self._guard = self._missing = self._present = self._last_missing = None
        self._each, self._patience = [None] * len(forms), _PATIENCE
        self._whole = layouts[0] if len(layouts) == 1 and len(layouts[0].positions) == len(forms) else None


class _Form(NamedTuple):
    """All that a pass depends on: a gradient of a form that was checked need not be checked again."""

    signature: tuple[Any, ...]
    stride: tuple[int, ...]
    key: LayoutKey
    numel: int


def _form(tensor: Tensor) -> _Form:
    return _Form(_signature(tensor), tensor.stride(), layout_key(tensor), tensor.numel())


def _expected_form(parameter: Tensor) -> _Form | None:
    """Return the form of the gradient that a parameter has or is likely to get; None if it will have none."""
    if parameter.grad is None and (not parameter.requires_grad or torch.nn.parameter.is_lazy(parameter)):
        return None  # frozen or lazy: a launch spends programs on an empty slot, too
    local = local_tensor(parameter.detach() if parameter.grad is None else parameter.grad)
    return _form(local) if gradients.is_acceptable(local) and local.layout is torch.strided else None


def layout_key(tensor: Tensor) -> LayoutKey:
    """Return the key of the batch that `tensor` belongs to."""
    plain = gradients.is_plain(type(tensor))
    return LayoutKey(tensor.device, tensor.dtype, plain and gradients.is_dense(tensor), plain)


def group(tensors: Iterable[Tensor], positions: Iterable[int]) -> list[Batch]:
    """Return local, checked `tensors` as batches, one for each layout key, in order of appearance."""
    groups: dict[LayoutKey, tuple[list[int], list[Tensor]]] = {}
    for index, tensor in zip(positions, tensors, strict=False):
        places, members = groups.setdefault(layout_key(tensor), ([], []))
        places.append(index)
        members.append(tensor)
    return [Batch(Layout(key, [t.numel() for t in ts], places), ts, True) for key, (places, ts) in groups.items()]


def choose_backends(batches: Sequence[Batch], requested: str, *, clips: bool = False) -> None:
    """Choose the backends of all layouts, with `clips` those of clipping, too: a kernel must fail before a write."""
    for batch in batches:
        layout, key = batch.layout, batch.layout.key
        if layout.backend is None:  # tensor subclasses implement torch's ops themselves
            layout.backend = choose(key.device, key.dtype, requested) if key.plain else "torch"
        if clips and layout.clips is None:
            layout.clips = choose(key.device, key.dtype, requested, clips=True) if key.plain else "torch"


def _row(indices: Sequence[int], size: int) -> Row:
    """Return a function that selects some of `size` gradients."""
    if len(indices) == size:
        return lambda grads: grads
    if len(indices) == 1:
        return lambda grads: [grads[indices[0]]]
    return itemgetter(*indices)


def form_guard(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """Return a check of the type, dtype, device, sizes and strides of tensors; None where torch has none.

    torch's private guards take 40 ns a tensor, public attributes 500. A match is reliable, but a mismatch may be wrong:
    the plan then looks at each gradient itself.
    """
    try:
        make: Any = torch._C._dynamo.guards.TensorGuards
        check: Callable[..., bool] = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check if check(*tensors) is True else None
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return None
