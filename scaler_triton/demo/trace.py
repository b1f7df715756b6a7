"""What one process went through: the only thing that leaves a rank, and all that is judged."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch.optim import Optimizer


@dataclass
class Trace:
    """One process, step by step.

    Args:
        enabled: whether its scaler scaled at all.
        losses: the loss of this process at each step.
        scales: the scale at each step, and one more: after the last update.
        skipped: whether the optimizer left out the step.
        step_counts: the optimizer's own step counters at the end, without repeats.
        start: all parameters before the first step, gathered.
        end: all parameters after the last, gathered.
        why: what the scaler says of the last skip, if it is one that can tell.
    """

    enabled: bool
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    step_counts: tuple[int, ...] = ()
    start: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    end: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    why: str = ""


class StepCounter:
    """How many steps an optimizer really took.

    A fused optimizer is called on skipped steps too and tells only in its state; SGD has no such state, but is
    only called when a step is taken.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._calls = 0
        optimizer.register_step_post_hook(self._count_call)

    def counts(self) -> tuple[int, ...]:
        """Return the step counters of all parameters, without repeats, sorted."""
        in_state = {int(state["step"]) for state in self._optimizer.state.values() if "step" in state}
        return tuple(sorted(in_state)) or (self._calls,)

    def _count_call(self, *_: object) -> None:
        self._calls += 1
