"""An optimizer's gradients as batches, whose layouts are kept from step to step.

A batch is what one pass reads and writes: local tensors of one device and dtype. In a steady step torch's guard
finds, eight tensors a call in a long list, that each has the form (type, dtype, device, shape, strides) it had when it
was inspected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import compress, starmap
from operator import attrgetter, call, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from scaler_triton.core import gradients
from scaler_triton.core.dispatch import Backend, Task, choose
from scaler_triton.core.gradients import check_gradient, coalesce_fp16, local_tensor
from scaler_triton.core.torch_ops import is_plain

if TYPE_CHECKING:
    from scaler_triton.core.prepared import PreparedCheck
    from scaler_triton.core.ranks import Ranks
    from scaler_triton.kernels.table import GradTable

Matcher = Callable[..., bool]  # returns whether tensors have the form of those it was made from

_spec_of, _shard_of = attrgetter(gradients.SPEC), attrgetter(gradients.SHARD)
_grad_of = attrgetter("grad")
# At each `.grad` torch looks for a subclass's override: a third of the time it takes for DTensor, which has none.
_NO_OVERRIDE = getattr(torch._C, "_disabled_torch_function_impl", None)
_unasked: Callable[[], Any] = getattr(torch._C, "DisableTorchFunctionSubclass", nullcontext)


class LayoutKey(NamedTuple):
    """What all tensors of a batch share."""

    device: torch.device
    dtype: torch.dtype
    dense: bool  # plain, and the elements fill one span of memory without gaps or overlap, in any order
    plain: bool  # not a tensor subclass


class Layout:
    """The part of a batch that is kept between steps: a slot for each tensor, and what its passes use.

    `skip_count` returns the number of skipped updates, int32, one element, on the device, by which kernels tell one
    overflow from another; None: they do not.
    """

    def __init__(self, key: LayoutKey, skip_count: Callable[[], Tensor] | None = None) -> None:
        self.key, self.device, self.skip_count = key, key.device, skip_count
        # For each slot: its number of elements, and its parameter's index in the optimizer.
        self.numels: list[int] = []
        self.positions: list[int] = []
        self.backend: Backend | None = None  # None: not chosen yet
        self.tables: dict[str, GradTable] = {}  # for kernels, by pass
        self.notes: dict[str, Any] = {}  # what rooms keep with it


class Batch(NamedTuple):
    """At least one gradient for one pass."""

    layout: Layout
    tensors: Sequence[Tensor | None]  # the gradient of each slot, None where it is missing
    present: Sequence[Tensor]  # those that are not missing; `tensors` itself if none is known to be
    is_partial: bool = False  # whether these are Partial gradients times their numbers of terms: only to be checked


_new_batch: Callable[[tuple[Any, ...]], Batch] = partial(tuple.__new__, Batch)  # half as expensive as `Batch(...)`


class GradPlan:
    """The parameters of one optimizer, and the layouts of their gradients.

    A missing gradient leaves its slot empty; only a new shape, stride, dtype or device changes the layouts. The plan
    knows its parameters by their ids only: a reference would keep replaced ones alive, with their gradients, and torch
    swaps no parameter that has a weak one. A new parameter at a freed one's address passes for it; what a pass depends
    on is compared for each gradient all the same.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        requested: str,
        task: Task = "unscaling",
        home: torch.device | None = None,
        skip_count: Callable[[], Tensor] | None = None,
    ) -> None:
        """Make the plan.

        Args:
            parameters: of the optimizer.
            requested: the backend, and for which `task` of `dispatch.choose`.
            home: the scale's device, on which `skip_count` (as of a `Layout`) is.
        """
        for parameter in parameters:
            if not isinstance(parameter, Tensor):
                raise AssertionError(f"expected param to be torch.Tensor, got {type(parameter).__name__}")
        self.ids = list(map(id, parameters))
        self.requested, self.task, self.home, self._skip_count = requested, task, home, skip_count
        self.is_distributed = any(map(gradients.is_distributed, parameters))
        # What other modules compute from the parameters, each with what it was computed from.
        self.peers: tuple[Any, Ranks | None] | None = None  # the ranks that must agree
        self.notes: dict[str, Any] = {}  # what rooms keep with it
        self.is_new = True  # whether a check is still to tell the observers what gradients it has met
        # Devices where kernels have served sparse or Partial gradients, whose layouts are made anew in each step.
        self.irregular: set[torch.device] = set()
        self.dtensors = [index for index, each in enumerate(parameters) if gradients.is_dtensor(each)]
        self.sample = self.dtensors[0] if self.dtensors else 0  # the first DTensor, else the first parameter
        sample = parameters[self.sample] if parameters else None
        self.place = getattr(sample, "device", None), getattr(sample, gradients.SPEC, None)
        overrides = not all(is_plain(each) or each.__torch_function__ is _NO_OVERRIDE for each in parameters)
        self._reading: Callable[[], Any] = nullcontext if overrides else _unasked
        self._reduced_specs: list[Any] = [None] * len(parameters)  # of gradients that are not Partial
        self.grad_shards: dict[int, int] = {}  # the number of a gradient's shards where its parameter has another
        # Of all gradients of a step in which none was missing; and for each gradient, shared by those of one form.
        self.match_all: Matcher | None = None
        self.prepared: PreparedCheck | None = None  # the last check of these gradients, if it was an ordinary one
        self._matchers: list[Matcher] = [unknown] * len(parameters)
        self._matchers_by_form: dict[Any, Matcher] = {}
        self._build_layouts([_expected_form(parameter) for parameter in parameters], parameters)

    def collect(
        self, parameters: Sequence[Tensor], *, allow_fp16: bool = True, summed: bool = False
    ) -> Sequence[Batch]:
        """Return this step's gradients of the plan's parameters as batches, accepted by `gradients.check_gradient`.

        Uncoalesced sparse fp16 gradients are replaced by coalesced ones, as torch does. A Partial one is multiplied by
        its number of terms: if that is finite, so is the sum, which needs a collective that a rank without such a
        gradient would not join. With `summed` every unreduced gradient is replaced by its sum, by that collective.
        """
        if self.dtensors:
            with self._reading():
                grads: Sequence[Tensor | None] = tuple(map(_grad_of, parameters))
            local = self._known_shards(grads)
        else:
            local = grads = tuple(map(_grad_of, parameters))  # a slice of all is itself, no copy
        if self.match_all is not None and local and (allow_fp16 or not self._has_fp16) and self.match_all(*local):
            steady = []
            for layout, row in self._rows:
                tensors = row(local)
                steady.append(_new_batch((layout, tensors, tensors, False)))
            return steady
        return self._collect_others(parameters, grads, local, allow_fp16, summed)

    def _collect_others(
        self,
        parameters: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        local: Sequence[Tensor | None],
        allow_fp16: bool,
        summed: bool,
    ) -> Sequence[Batch]:
        """Do what `collect` does where gradients are missing, or not all have forms that were inspected."""
        is_present = [grad is not None for grad in local]
        all_match = bool(local) and (allow_fp16 or not self._has_fp16)
        all_match = all_match and all(map(call, compress(self._matchers, is_present), compress(local, is_present)))
        others: list[Batch] = []
        if not all_match:
            if summed:
                gradients.reduce_(parameters)
                grads = tuple(map(_grad_of, parameters))
            local, others = self._inspect([*grads], parameters, allow_fp16)
            is_present = [grad is not None for grad in local]
        batches = []
        for layout, row in self._rows:
            tensors = row(local)
            present = list(compress(tensors, row(is_present)))
            if present:
                batches.append(Batch(layout, tensors, tensors if len(present) == len(tensors) else present))
                # None: all of it was missing at the choice, or that raised.
                all_match = all_match and layout.backend is not None
        if not all_match:
            batches += others
            choose_backends(batches, self.requested, self.task)
            self.irregular |= {batch.layout.device for batch in others if batch.layout.backend == "triton"}
        # One that is there already has refused them, as torch's guard does if a gradient comes twice: so would another.
        if local and all(is_present) and self.match_all is None:
            self.match_all = list_matcher(local, self._matchers)
        return batches

    def _known_shards(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the local shards if every gradient has the DTensorSpec seen before and none is Partial, else ()."""
        try:
            same = list(map(_spec_of, grads)) == self._reduced_specs  # equal objects are found without a look into them
            return tuple(map(_shard_of, grads)) if same else ()
        except AttributeError:  # a gradient is missing or no DTensor, or this torch has no such attribute
            pass
        shards: list[Tensor | None] = []
        for grad, seen in zip(grads, self._reduced_specs, strict=True):
            spec = getattr(grad, gradients.SPEC, None)
            if spec is not seen and spec != seen and grad is not None:
                return ()
            shards.append(grad if spec is None else getattr(grad, gradients.SHARD, grad))
        return shards

    def _inspect(
        self, grads: list[Tensor | None], parameters: Sequence[Tensor], allow_fp16: bool
    ) -> tuple[list[Tensor | None], list[Batch]]:
        """Look at each gradient, and give those of a new form slots.

        Returns: `grads` with shards for DTensors, and without sparse gradients; the batches of sparse and Partial ones.
        """
        self.match_all = self.prepared = None  # its forms may come again, when the layouts are those of others
        partials = self._localise(grads, parameters)
        new = {
            index: grad
            for index, (grad, matches) in enumerate(zip(grads, self._matchers, strict=True))
            if grad is not None and not matches(grad)
        }
        if not allow_fp16 and any(grad is not None and grad.dtype is torch.float16 for grad in grads):
            raise ValueError("Attempting to unscale FP16 gradients.")  # before other errors, as torch does
        changed: dict[int, Tensor] = {}
        for index, grad in new.items():
            form = self._forms[index]
            if grad.requires_grad:
                grads[index] = grad = grad.detach()
                self.is_new = True
            if form is None or grad.layout is not torch.strided or _form(grad) != form:
                changed[index] = grads[index] = local_tensor(grad)
        for index, grad in changed.items():  # all before any is replaced
            check_gradient(grad, f"the gradient of parameter {index}")
        sparse: dict[int, Tensor] = {}
        forms = list(self._forms)
        for index, grad in changed.items():
            if grad.layout is torch.strided:
                forms[index] = _form(grad)
                continue
            grads[index] = None
            if grad.dtype is torch.float16:
                # The sum of scaled fp16 duplicates may overflow: check the sum.
                parameters[index].grad = grad = coalesce_fp16(grad)
            sparse[index] = grad._values()
        if len(changed) > len(sparse):
            self._build_layouts(forms, parameters)
        for index in new.keys() - sparse.keys():
            key, local = self._forms[index], grads[index]
            matches = self._matchers_by_form.get(key)
            if matches is None or not matches(local):
                matches = self._matchers_by_form[key] = form_matcher(local)
            self._matchers[index] = matches
        others = group(sparse)
        others += [batch._replace(is_partial=True) for batch in group(partials)]
        return grads, others

    def _localise(self, grads: list[Tensor | None], parameters: Sequence[Tensor]) -> dict[int, Tensor]:
        """Replace DTensors by their local shards; return the tensors to be checked for Partial ones, by parameter."""
        partials = {}
        for index in self.dtensors:
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
            usual = gradients.num_shards(parameters[index])
            # A plain gradient of a DTensor parameter is a local shard, split as the parameter is.
            shards = gradients.num_shards(grad) if gradients.is_dtensor(grad) else usual
            if shards != self.grad_shards.get(index, usual):
                self.grad_shards[index] = shards
        return partials

    def selectors(self, batches: Sequence[Batch]) -> list[Callable[[Sequence[Any]], Sequence[Any]]] | None:
        """Return for each layout a function that selects its gradients, None if some are missing or in no layout."""
        is_whole = len(batches) == len(self._rows) and all(each.present is each.tensors for each in batches)
        return [row for _, row in self._rows] if is_whole and self.match_all is not None else None

    def is_for(self, parameters: Sequence[Tensor], home: torch.device) -> bool:
        """Return whether the plan was made for these parameters, where they and the scale are now.

        `model.to` moves or swaps all parameters in place: then the sample is elsewhere.
        """
        if list(map(id, parameters)) != self.ids or home != self.home:
            return False
        sample = parameters[self.sample] if parameters else None
        return (
            getattr(sample, "device", None) == self.place[0] and getattr(sample, gradients.SPEC, None) == self.place[1]
        )

    def _build_layouts(self, forms: list[_Form | None], parameters: Sequence[Tensor]) -> None:
        """Build a layout for each LayoutKey, with a slot for each form; change nothing if this raises."""
        self.is_new = True
        devices = dict.fromkeys(parameter.device for parameter in parameters)
        slots = [(index, form.key, form.shape.numel()) for index, form in enumerate(forms) if form is not None]
        self.layouts: list[Layout] = _layouts_of(slots)
        for layout in self.layouts:
            if layout.device == self.home:  # kernels cannot read another GPU's memory
                layout.skip_count = self._skip_count
        self.devices = [device for device in devices if device.type != "meta"]  # each needs a flag, which can be read
        self._forms = forms
        self._rows = [(layout, _row(layout.positions)) for layout in self.layouts]
        self._has_fp16 = any(layout.key.dtype is torch.float16 for layout in self.layouts)


class _Form(NamedTuple):
    """All that a pass depends on: a gradient of a form that was checked need not be checked again."""

    kind: type[Tensor]
    shape: torch.Size
    stride: tuple[int, ...]
    key: LayoutKey


def _form(tensor: Tensor) -> _Form:
    return _Form(type(tensor), tensor.shape, tensor.stride(), layout_key(tensor))


def _expected_form(parameter: Tensor) -> _Form | None:
    """Return the form of the gradient that a parameter has or is likely to get; None if it will have none."""
    if parameter.grad is None and (not parameter.requires_grad or torch.nn.parameter.is_lazy(parameter)):
        return None  # frozen or lazy: a launch spends programs on an empty slot, too
    local = local_tensor(parameter.detach() if parameter.grad is None else parameter.grad)
    try:
        check_gradient(local, "")
    except (ValueError, RuntimeError):  # NotImplementedError is a RuntimeError
        return None
    return _form(local) if local.layout is torch.strided else None


def layout_key(tensor: Tensor) -> LayoutKey:
    """Return the key of the batch that `tensor` belongs to."""
    plain = is_plain(tensor)
    return LayoutKey(tensor.device, tensor.dtype, plain and gradients.is_dense(tensor), plain)


def _layouts_of(slots: Iterable[tuple[int, LayoutKey, int]]) -> list[Layout]:
    """Return a layout for each key, with slots for these positions, keys and numbers of elements."""
    layouts: dict[LayoutKey, Layout] = {}
    for position, key, numel in slots:
        if key not in layouts:
            layouts[key] = Layout(key)
        layouts[key].positions.append(position)
        layouts[key].numels.append(numel)
    return list(layouts.values())


def group(tensors: Mapping[int, Tensor]) -> list[Batch]:
    """Return local, checked tensors, by position, as batches, one for each layout key, in order of appearance."""
    batches = []
    for layout in _layouts_of((index, layout_key(tensor), tensor.numel()) for index, tensor in tensors.items()):
        members = [tensors[index] for index in layout.positions]
        batches.append(Batch(layout, members, members))
    return batches


def choose_backends(batches: Sequence[Batch], requested: str, task: Task = "unscaling") -> None:
    """Choose the backends of all layouts: a kernel must fail before a write."""
    for batch in batches:
        layout, key = batch.layout, batch.layout.key
        if layout.backend is None:  # tensor subclasses implement torch's ops themselves, kernels take one span each
            layout.backend = choose(key.device, key.dtype, requested, task=task) if key.dense else "torch"


def _row(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that selects some of the gradients."""
    first, last = positions[0], positions[-1]
    if last - first + 1 == len(positions):  # a slice is quicker; for one position, itemgetter would return no sequence
        return itemgetter(slice(first, last + 1))
    return itemgetter(*positions)


def form_matcher(*tensors: Any) -> Matcher:
    """Return a check of the type, dtype, device, sizes and strides of tensors; `unknown` where torch has none.

    torch's private guards take 40 to 100 ns a tensor, public attributes 500. A match is reliable, but a mismatch may be
    wrong: then each tensor is inspected.
    """
    try:
        make: Any = torch._C._dynamo.guards.TensorGuards
        check: Matcher = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check if check(*tensors) is True else unknown
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return unknown


def list_matcher(tensors: Sequence[Any], matchers: Sequence[Matcher]) -> Matcher:
    """Return a check of many tensors as by `form_matcher`; `matchers` are those of each, the same for equal forms.

    Of a long list it checks eight a call. Eights of the same forms share a guard, whose memory stays in the caches.
    """
    if len(tensors) <= 64:
        return form_matcher(*tensors)
    shared: dict[Any, Matcher] = {}
    eights, before_rest = [], len(tensors) // 8 * 8 - 8
    for first in range(0, before_rest, 8):
        forms = tuple(matchers[first : first + 8])
        if forms not in shared:
            shared[forms] = form_matcher(*tensors[first : first + 8])
        eights.append(shared[forms])
    match_rest = form_matcher(*tensors[before_rest:])

    def match(*others: Any) -> bool:
        each = iter(others)
        # `zip` ends with the eights, so the rest is still to come from `each`.
        return all(starmap(call, zip(eights, *[each] * 8, strict=False))) and match_rest(*each)

    return match


def unknown(*tensors: Any) -> bool:
    """Stand for the matcher of a form that is not known."""
    return False
