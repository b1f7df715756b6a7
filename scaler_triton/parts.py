"""What a scaler has beyond torch's attributes: the core's parts, put together with the rooms around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scaler_triton.clipping.norm import Norm
from scaler_triton.core import failures
from scaler_triton.core.check import Checks
from scaler_triton.core.look import Look
from scaler_triton.core.memory import HostCopy
from scaler_triton.core.ranks import Ranks
from scaler_triton.core.registry import Steps
from scaler_triton.core.step import OptimizerStep, parameters_of
from scaler_triton.core.update import Counters, Updates
from scaler_triton.measuring.headroom import HeadroomRule
from scaler_triton.report.marks import Marking
from scaler_triton.report.overflow import Models
from scaler_triton.watch.watch import Watch

if TYPE_CHECKING:
    from scaler_triton.grad_scaler import GradScaler

LookAt = Callable[[HostCopy, Any], bool]  # reads what has arrived of a copy; returns whether it is of now


class Parts:
    """A scaler's parts; if `sharded`, all ranks agree and fp16 gradients are unscaled."""

    scales = True  # False: the scale is 1, and nothing is divided

    def __init__(self, sharded: bool = False) -> None:
        self.counters = Counters()
        self.checks = Checks(self.counters, sharded=sharded)
        self.steps: Steps = self.checks.steps
        self.checks.observers += [Marking(self.counters), Watch(self.checks, divides=self.scales)]
        self.updates = Updates(self.counters, self.checks)
        self.headroom: HeadroomRule | None = None  # None: torch's rule
        self.scale_copy = HostCopy()  # for `metrics`
        self.models = Models()
        self.warned_of: int | None = None  # the update before the streak of skips that was warned of

    def looks_with_norm(self, step: OptimizerStep, scale: Tensor, model: nn.Module | None) -> Sequence[Look]:
        """Return the looks of a clip, which divides later; the last one gives the norm."""
        return [*self.checks.dividing[:-1], Norm(scale.device, model)]

    def begin_check(self, scaler: GradScaler, steps: Sequence[OptimizerStep]) -> None:
        """Do what comes before a check of these optimizers together."""

    def described(self, scaler: GradScaler, look: LookAt) -> tuple[list[str], bool]:
        """Return what `repr` says of the scale, and whether it is of now."""
        scale, number = scaler._get_scale_async(), scaler._init_scale
        is_new = scale is None or look(self.scale_copy, scale)
        if scale is not None and self.scale_copy.latest is not None:
            number = self.scale_copy.latest
        while isinstance(number, list):  # what was in a tensor of one element
            (number,) = number
        return [f"scale {repr(float(number)).removesuffix('.0')}"], is_new  # with all its digits

    def newest(self, scaler: GradScaler) -> dict[str, float]:
        """Return numbers of this kind of scaler for a logger, as far as they are on the host."""
        scale: Any = scaler._get_scale_async()
        newest = None if scale is None else self.scale_copy.newest(scale)
        number = scaler._init_scale if newest is None else newest[0] if isinstance(newest, list) else newest
        return {"scale": number}

    def logged_names(self, counted: list[str], known: dict[str, Any]) -> list[str]:
        """Return which of the known numbers a logger gets, in order; `counted` are those of all scalers."""
        return ["scale", *counted, "growths", "backoffs"]

    def require_scale(
        self, scaler: GradScaler, name: str, optimizers: Sequence[Any], tell_others: Callable[[], None] | None = None
    ) -> None:
        """Raise torch's error for a method that was called before `scale`; the other ranks are told."""
        try:
            self.make_scale(scaler, name, optimizers)
        except Exception:
            (tell_others or (lambda: self.fail_early(scaler, optimizers[0])))()
            raise

    def make_scale(self, scaler: GradScaler, name: str, optimizers: Sequence[Any]) -> None:
        """Raise torch's error."""
        scaler._check_scale_growth_tracker(name)

    def fail_early(self, scaler: GradScaler, optimizer: Any) -> None:
        """Tell the other ranks of an error that came before the check."""
        with suppress(Exception):  # the first error is more important
            peers = self.ranks_that_wait(scaler, [optimizer])
            if peers is not None:
                step = self.checks.steps.open(optimizer)
                failures.fail(self.checks, step, optimizer, scaler._scale.device, scaler.process_group, peers)

    def ranks_that_wait(self, scaler: GradScaler, optimizers: Sequence[Any]) -> Ranks | None:
        """Return the ranks that wait for this one in the reduction of these optimizers, None if there are none.

        Where there is no scale yet it is made: the others have one, and what comes later must be the same.
        """
        peers = None
        with suppress(Exception):  # such as an illegal process_group, which fails on every rank
            peers = self.checks.find_peers(parameters_of(*optimizers), scaler.process_group)
            if peers is not None:
                if scaler._scale is None or scaler._growth_tracker is None:
                    scaler._lazy_init_scale_growth_tracker(home_of(scaler, optimizers))
                for optimizer in optimizers:
                    self.checks.looks_for(self.checks.steps.open(optimizer), scaler._scale, divide=True)
        return peers


def home_of(scaler: GradScaler, optimizers: Sequence[Any]) -> torch.device:
    """Return where the scale of these optimizers belongs."""
    devices = [each.device for each in parameters_of(*optimizers) if isinstance(each, Tensor)]
    return next((each for each in devices if each.type == scaler._device), torch.device(scaler._device))
