"""Why was a step skipped? Kernels and the CPU's path leave marks on overflow; here they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaler_triton import collectives
from scaler_triton.batch import Batch, local_tensor
from scaler_triton.flags import FlagsMixin
from scaler_triton.naming import named_parameters
from scaler_triton.overflow_report import INF, NAN, BadGradient, OverflowReport, from_bytes, kinds_of, to_bytes
from scaler_triton.plan import GradPlan
from scaler_triton.stats import LAST_SKIP, SKIPPED

# What FSDP1, activation checkpointing and torch.compile put into the names of what they wrap.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_KIND_BITS, _KINDS = 2, NAN | INF
_NO_NAMES = "model must be a module or what its named_parameters() gives"


class OverflowMixin(FlagsMixin):
    """Marks which gradients overflowed, each with the number of skips before, and tells of the last ones."""

    def overflow_report(
        self, model: nn.Module | Iterable[tuple[str, Tensor]] | None = None, *, gather: bool = False
    ) -> OverflowReport:
        """Return which gradients made the last skipped step be skipped; it survives `zero_grad()` and good steps.

        Steps without overflow pay nothing for it. Waits for the device.

        Args:
            model: names the parameters: a module, or what its `named_parameters()` gives; None: they are numbered.
            gather: ask all ranks, in an all-gather that each of them must join (a second one for more than a hundred
                bad gradients on a rank), instead of this one alone.

        Returns: a report whose `str` is a table.

        Raises: TypeError naming `model` for what is neither, such as parameters without names; with `gather`,
            ValueError naming `process_group` if pickling lost it or this rank is not in it.
        """
        group = self._group_to_ask() if gather else None
        counters = self._counters.read()
        checked = [state for state in self._per_optimizer_states.values() if state["found_inf_per_device"]]
        pending = any(self._flag(state).item() for state in checked)
        epoch = counters[SKIPPED] if pending else counters[SKIPPED] - 1
        bad = list(self._marked(epoch, dict(_names(model))))
        untold = sorted({text for plan in self._plans.plans() for text in _untold(plan)})
        if group is not None:
            told = [from_bytes(data) for data in collectives.gather_bytes(to_bytes(bad, untold), group)]
            bad, untold = [each for found, _ in told for each in found], sorted({text for _, ts in told for text in ts})
        update = None if pending else counters[LAST_SKIP] or None
        return OverflowReport(update, tuple(bad), gather, tuple(untold))

    def _group_to_ask(self) -> Any:
        """Return the ranks that gather, None for a process that is alone."""
        alone = self.process_group is None and collectives.default_group() is None
        return None if alone else collectives.checked_group(self.process_group)

    def _marked(self, epoch: int, names: dict[int, str]) -> Iterator[BadGradient]:
        rank = dist.get_rank() if collectives.default_group() is not None else 0
        for number, plan in enumerate(self._plans.plans()):
            for index, bits in sorted(_seen_in(plan, _epoch_of(plan, epoch)).items()):
                parameter = plan.parameters[index]
                name = names.get(id(parameter), f"optimizer {number}, parameter {index}")
                yield BadGradient(name, kinds_of(bits), local_tensor(parameter).numel(), rank)

    def _epoch(self) -> int | Tensor:
        """Return the number of skips so far, a copy where they are counted; no host wait."""
        counters = self._counters.where_they_are()
        return counters[SKIPPED] if isinstance(counters, list) else counters[SKIPPED].clone()

    def _mark_on_host(self, plan: GradPlan, batch: Batch) -> None:
        """Mark what is not finite in a batch on the CPU, where torch's op told that something is."""
        epoch = self._counters.read()[SKIPPED]
        if plan.marks[0] != epoch:
            plan.marks = (epoch, {})
        for slot, tensor in zip(batch.layout.slots, batch.tensors, strict=True):
            if tensor is not None and (bits := NAN * bool(tensor.isnan().any()) | INF * bool(tensor.isinf().any())):
                plan.marks[1][slot] = plan.marks[1].get(slot, 0) | bits

    def _count_epochs_on(self, plan: GradPlan, device: torch.device) -> None:
        """Have kernels mark gradients with the number of skips before, which is counted on `device`."""
        counters = self._counters.on(device)
        if plan.epoch is None or plan.epoch[0] is not counters:
            low_words = counters.view(torch.int32)[::2]
            plan.set_epoch(counters, low_words[SKIPPED : SKIPPED + 1])


def _epoch_of(plan: GradPlan, epoch: int) -> int:
    """Return in which epoch a plan's gradients were looked at, if a step in this one was judged by what was seen."""
    if plan.again is None or int(plan.again[1]) != epoch:
        return epoch
    return int(plan.again[0])


def _seen_in(plan: GradPlan, epoch: int) -> dict[int, int]:
    """Return what was seen in an epoch, by the parameter's position, waiting for the device."""
    marks = dict(plan.marks[1]) if plan.marks[0] == epoch else {}
    for slots, seen in plan.marked():
        for slot, bits in zip(slots, seen.tolist(), strict=True):
            if bits & _KINDS and bits >> _KIND_BITS == epoch:
                marks[slot] = marks.get(slot, 0) | bits & _KINDS
    return marks


def _untold(plan: GradPlan) -> Iterator[str]:
    for layout in plan.layouts:
        key = layout.key
        if "torch" in layout.backends.values() and (key.device.type != "cpu" or not key.plain):
            yield f"gradients on {key.device} that torch's own op serves"
    for device in plan.unseen:
        if plan.epoch is not None and plan.epoch[1].device == device:
            yield f"sparse and Partial gradients on {device}"
        else:
            yield f"gradients on {device}, where the scale is not"


def _names(model: nn.Module | Iterable[tuple[str, Tensor]] | None) -> Iterator[tuple[int, str]]:
    named = named_parameters(model) if isinstance(model, nn.Module) else () if model is None else model
    if not isinstance(named, Iterable):
        raise TypeError(f"{_NO_NAMES}, got {type(named).__name__}")
    for pair in named:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise TypeError(f"{_NO_NAMES}, got {type(pair).__name__} for a name and a tensor")
        name, parameter = pair
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        yield id(parameter), name
