"""`overflow_report`: which gradients made a step be skipped, on this rank or on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from scaler_triton import collectives
from scaler_triton.naming import names_by_id
from scaler_triton.overflow_report import WORDS, BadGradient, OverflowReport, from_bytes, to_bytes
from scaler_triton.placement import local_tensor
from scaler_triton.states import StatesMixin
from scaler_triton.stats import LAST_SKIP, SKIPPED
from scaler_triton.text import error_line


class OverflowMixin(StatesMixin):
    """`overflow_report`."""

    def overflow_report(
        self, model: nn.Module | Iterable[tuple[str, Tensor]] | None = None, gather: bool = False
    ) -> OverflowReport:
        """Return which gradients made the last skipped step be skipped; it survives `zero_grad()` and good steps.

        Steps without overflow launch nothing for it. Waits for the device.

        Args:
            model: names the parameters: a module, or what its `named_parameters()` gives, any tensors; only names are
                read. None: they are numbered.
            gather: report on all ranks, by an all-gather that each of them must join (two for more than a hundred bad
                gradients on a rank), instead of on this one.

        Returns: a report whose `str` is a table.

        Raises: TypeError naming `model` for what is neither, such as parameters without names: with `gather` on this
            rank only, the others' reports tell of it. With `gather`, ValueError naming `process_group` if pickling lost
            it or this rank is not in it.
        """
        group = collectives.gathering_group(self.process_group) if gather else None
        try:
            own = self._own_report(model)
        except Exception as error:
            if group is not None:  # the other ranks wait in the all-gather
                rank = collectives.own_rank(self.process_group)
                told = OverflowReport(None, (), False, (f"rank {rank} raised {error_line(error)}",))
                _gathered(told, group, self._flag_home())
            raise
        asked_all = gather or not collectives.several_ranks()
        return replace(own if group is None else _gathered(own, group, self._flag_home()), gathered=asked_all)

    def _flag_home(self) -> torch.device:
        """Return the device on which the ranks reduce their flags."""
        scale = self._get_scale_async()
        if scale is not None:
            return scale.device
        return torch.device(self._device if self._enabled else "cpu")

    def _own_report(self, model: nn.Module | Iterable[tuple[str, Tensor]] | None) -> OverflowReport:
        counters = self._counters.read()
        checked = [state for state in self._per_optimizer_states.values() if state["found_inf_per_device"]]
        pending = any(self._flag(state).item() for state in checked)
        update = None if pending else counters[LAST_SKIP] or None
        generation = counters[SKIPPED] if pending else counters[SKIPPED] - 1
        bad = tuple(self._marked(generation, names_by_id(model)))
        plans = self._records.plans() if pending or update else ()
        untold = sorted({text for plan in plans for text in plan.marks.untold()})
        return OverflowReport(update, bad, False, tuple(untold), pending)

    def _marked(self, generation: int, names: dict[int, str]) -> Iterator[BadGradient]:
        rank = collectives.own_rank(self.process_group)
        for number, plan in enumerate(self._records.plans()):
            for index, kinds in sorted(plan.marks.of(generation).items()):
                parameter = plan.parameters[index]
                name = names.get(id(parameter), f"optimizer {number}, parameter {index}")
                yield BadGradient(name, WORDS[kinds], local_tensor(parameter).numel(), rank)


def _gathered(own: OverflowReport, group: Any, home: torch.device) -> OverflowReport:
    """Return the report with the findings of every rank of `group`, which serves `home`; all must call this."""
    gathered = [from_bytes(data) for data in collectives.gather_bytes(to_bytes(own.bad, own.untold), group, home)]
    bad = tuple(each for found, _ in gathered for each in found)
    return replace(own, bad=bad, untold=tuple(sorted({text for _, untold in gathered for text in untold})))
