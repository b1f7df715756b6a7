"""What a scaler has beyond torch's attributes: the core's parts, put together with the rooms around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scaler_triton.clipping.norm import Norm
from scaler_triton.core.check import Checks
from scaler_triton.core.look import Look
from scaler_triton.core.memory import HostCopy
from scaler_triton.core.registry import Steps
from scaler_triton.core.step import OptimizerStep
from scaler_triton.core.update import Counters, Updates
from scaler_triton.measuring.headroom import HeadroomRule
from scaler_triton.report.marks import Marking
from scaler_triton.report.overflow import Models, OverflowReport, overflow_report
from scaler_triton.report.streak import Streaks
from scaler_triton.watch.watch import Watch

LookAt = Callable[[HostCopy, Any], bool]  # reads what has arrived of a copy; returns whether it is of now


class Parts:
    """A scaler's parts; if `sharded`, all ranks agree and fp16 gradients are unscaled."""

    scales = True  # False: the scale is 1, and nothing is divided

    def __init__(self, sharded: bool = False) -> None:
        self.counters = Counters()
        self.checks = Checks(self.counters, sharded=sharded)
        self.steps: Steps = self.checks.steps
        self.updates = Updates(self.counters, self.checks)
        self.headroom: HeadroomRule | None = None  # None: torch's rule
        self.scale_copy = HostCopy()  # for `metrics`
        self.models = Models()
        self.streaks = Streaks(self.updates, self.checks.warned, self._report, scales=self.scales)
        watch = Watch(self.checks, divides=self.scales)
        self.checks.observers += [Marking(self.counters), watch, self.streaks]

    def _report(self, home: torch.device) -> OverflowReport:
        """Return this rank's report, which does not name parameters unless it knows their model."""
        return overflow_report(self.steps, self.counters, self.models, None, None, home, gather=False)

    def looks_with_norm(self, step: OptimizerStep, scale: Tensor, model: nn.Module | None) -> Sequence[Look]:
        """Return the looks of a clip, which divides later; the last one gives the norm."""
        return [*self.checks.dividing[:-1], Norm(scale.device, model)]

    def described(self, scale: Any, init_scale: float, look: LookAt) -> tuple[list[str], bool]:
        """Return what `repr` says of the scale (None: there is none yet), and whether it is of now."""
        number: Any = init_scale
        is_new = scale is None or look(self.scale_copy, scale)
        if scale is not None and self.scale_copy.latest is not None:
            number = self.scale_copy.latest
        while isinstance(number, list):  # what was in a tensor of one element
            (number,) = number
        return [f"scale {repr(float(number)).removesuffix('.0')}"], is_new  # with all its digits

    def newest(self, scale: Any, init_scale: float) -> dict[str, float]:
        """Return numbers of this kind of scaler for a logger, as far as they are on the host."""
        newest = None if scale is None else self.scale_copy.newest(scale)
        number = init_scale if newest is None else newest[0] if isinstance(newest, list) else newest
        return {"scale": number}

    def logged_names(self, counted: list[str], known: dict[str, Any]) -> list[str]:
        """Return which of the known numbers a logger gets, in order; `counted` are those of all scalers."""
        return ["scale", *counted, "growths", "backoffs"]
