"""What a bench is told, and what it gives back to be run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import torch

from perf.measure import QUICK, Effort
from perf.rows import Row


class Turn(IntEnum):
    """When a section's turn comes on a GPU machine, where time may run out."""

    DECIDES = 0
    CAPTURES = 1  # may spoil the GPU for the process
    EXPLAINS = 2  # the host's part of what was measured before
    ON_CPU = 3  # needs no GPU


class Section(NamedTuple):
    """A part of a bench that may fail on its own."""

    name: str
    run: Callable[[], Iterator[Row]]
    turn: Turn = Turn.DECIDES


@dataclass
class Context:
    """How a run is to be done.

    Args:
        quick: a few rounds of the smallest sizes, to see that everything works: not for numbers.
        gpu: whether a GPU is there.
        left_out: what was not measured, and why, in words for the reader.
    """

    quick: bool = False
    gpu: bool = field(default_factory=torch.cuda.is_available)
    left_out: list[str] = field(default_factory=list)

    def leave_out(self, what: str, why: str) -> None:
        """Note something that is not measured."""
        self.left_out.append(f"{what}: {why}")

    def effort(self, seconds: float, least: int) -> Effort:
        """Return the effort asked for, or next to none in a quick run."""
        return QUICK if self.quick else Effort(seconds, least)
