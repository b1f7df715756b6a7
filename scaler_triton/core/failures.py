"""An error on one rank: it joins the reduction in which the others wait, then raises; all of them skip the step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from scaler_triton.core import gradients
from scaler_triton.core.dispatch import is_capturing
from scaler_triton.core.message import tell_failure
from scaler_triton.core.step import parameters_of

if TYPE_CHECKING:
    from scaler_triton.core.check import Checks
    from scaler_triton.core.flag import Flag
    from scaler_triton.core.ranks import Ranks
    from scaler_triton.core.step import OptimizerStep


def fail(
    checks: Checks,
    step: OptimizerStep,
    optimizer: Any,
    device: torch.device,
    group: Any,
    peers: Ranks | None = None,
    flag: Flag | None = None,
    *,
    tell: bool = True,
) -> None:
    """After an error in a check `tell` the other ranks, which wait for it; an interrupt is not told.

    This rank's step is spent if theirs is, or if gradients have been written.

    Args:
        checks, step, optimizer, group: as of the check.
        device: the scale's.
        peers: the ranks that wait, if they are known by now.
        flag: that of the check, if there is one by now.
    """
    waiting = (peers or ranks_that_wait(checks, [optimizer], group)) if tell else None
    try:
        if waiting is not None or (flag is not None and flag.written):
            spend(checks, step, device)
    finally:  # even if that raises: the others wait in the reduction
        if waiting is not None:
            if checks.sums_partial:  # the others do it first
                with suppress(Exception):
                    gradients.reduce_(parameters_of(optimizer))
            tell_failure(waiting, device, checks.n_sums)


def ranks_that_wait(checks: Checks, optimizers: Sequence[Any], group: Any) -> Ranks | None:
    """Return the ranks that wait for this one in the reduction of these optimizers, None if there are none."""
    with suppress(Exception):  # such as an illegal process_group, which fails on every rank
        return checks.find_peers(parameters_of(*optimizers), group)
    return None


def spend(checks: Checks, step: OptimizerStep, device: torch.device, *, agreed: bool = False) -> None:
    """Make a step FAILED, with the flag that the ranks `agreed` on if any; one that was only captured starts over."""
    if not (device.type == "cuda" and is_capturing()):
        checks.steps.unfinished = True
        step.fail(None if agreed else device)
    elif step.flag is not None and step.flag.is_captured:
        step.reset()
