"""A program for four ranks as plain data, and what its parts mean for each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rank_places import PLAIN, Parameter

# In torch 2.11 it does not.
ADAGRAD_TAKES_FLAG = hasattr(torch.optim.Adagrad([torch.zeros(1)], fused=True), "_step_supports_amp_scaling")


@dataclass(frozen=True)
class Optimizer:
    """An optimizer over some parameters, a param group each."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def has_dtensors(self) -> bool:
        """Whether a parameter lives on a mesh."""
        return any(parameter.place not in PLAIN for parameter in self.parameters)

    @property
    def moves(self) -> bool:
        """Whether gradients may be placed otherwise than their parameters."""
        return any(parameter.moves for parameter in self.parameters)

    @property
    def takes_flag(self) -> bool:
        """Whether its step reads the flag itself."""
        return self.name.endswith("-fused") and (self.name != "adagrad-fused" or ADAGRAD_TAKES_FLAG)


@dataclass(frozen=True)
class Spot:
    """One gradient of one rank at one step."""

    step: int
    rank: int
    optimizer: int
    parameter: int


@dataclass(frozen=True)
class Clip:
    """A call of `clip_grad_norm_` on all ranks.

    Args:
        optimizers: their positions.
        fraction: `max_norm` is this part of the norm that the program expects.
        subset: which of their parameters, by position; None: `parameters=` is not given.
        refuses: whether a norm that is not finite is an error.
    """

    optimizers: tuple[int, ...]
    fraction: float
    order: float = 2.0
    subset: frozenset[int] | None = None
    defer: bool = False
    refuses: bool = False

    def members(self, program: Program) -> list[tuple[int, int]]:
        """Return which parameters are clipped, as (optimizer, position)."""
        everything = [(o, p) for o in self.optimizers for p in range(len(program.optimizers[o].parameters))]
        return [each for i, each in enumerate(everything) if self.subset is None or i in self.subset]


@dataclass(frozen=True)
class Setting:
    """A call of one of the scaler's setters on all ranks, as a step begins."""

    step: int
    name: str
    value: Any


@dataclass(frozen=True)
class Split:
    """As a step begins, one rank's scale becomes another; the program ends with this step."""

    step: int
    rank: int
    factor: float


@dataclass(frozen=True)
class Program:
    """What four ranks do.

    Args:
        kind: "sharded", "grad" or "world", as `cases.new_scaler` takes them.
        steps: how many updates.
        explicit: (rank, optimizer) pairs that call `unscale_` themselves.
        missing: gradients that are None.
        planted: gradients that hold a non-finite value, and which.
        clips: what is clipped in each step, before anything is stepped.
        keeps: whether gradients that are placed alike stay the same tensors, written anew step for step.
        hysteresis: the scaler's at first.
        check_unscaled: the scaler's; its scale is too large for it to find anything.
        settings: what is set on the way; a later one counts.
        consecutive: the scaler's `consecutive_hysteresis` at first.
        max_skips: the scaler's `max_consecutive_skips` at first.
        given_up: (step, optimizer) pairs: before this step comes a batch whose step fails on all ranks, without update.
        split: what makes the ranks disagree, if anything does.
    """

    kind: str
    optimizers: tuple[Optimizer, ...]
    steps: int
    explicit: frozenset[tuple[int, int]] = frozenset()
    missing: frozenset[Spot] = frozenset()
    planted: tuple[tuple[Spot, float], ...] = ()
    clips: tuple[Clip | None, ...] = ()
    keeps: bool = False
    hysteresis: int = 1
    check_unscaled: bool = False
    settings: tuple[Setting, ...] = ()
    consecutive: bool = False
    max_skips: int | None = None
    given_up: frozenset[tuple[int, int]] = frozenset()
    split: Split | None = None

    @property
    def limits(self) -> dict[str, Any]:
        """The scaler's limits at first, by the names of its arguments."""
        return {
            "hysteresis": self.hysteresis,
            "consecutive_hysteresis": self.consecutive,
            "max_consecutive_skips": self.max_skips,
        }

    @property
    def finished(self) -> int:
        """How many steps come to their end."""
        return self.steps if self.split is None else self.split.step

    def settings_of(self, step: int) -> dict[str, Any]:
        """What is set in a step."""
        return {each.name: each.value for each in self.settings if each.step == step}

    def clip_of(self, step: int, optimizer: int | None = None) -> Clip | None:
        """What is clipped in a step; with an optimizer: what this one is clipped by."""
        clip = self.clips[step] if step < len(self.clips) else None
        return clip if clip is None or optimizer is None or optimizer in clip.optimizers else None

    def gives_up(self, step: int, optimizer: int) -> bool:
        """Whether a batch fails before; not where `unscale_` or a clip follows, which refuse what follows one."""
        unscales = any(index == optimizer for _, index in self.explicit)
        return (step, optimizer) in self.given_up and not unscales and self.clip_of(step, optimizer) is None

    def clips_at_once(self, clip: Clip) -> bool:
        """Whether one reduction carries norm, flags and scales."""
        return clip.order == 2.0 and clip.subset is None and not self.check_unscaled

    def clip_agrees(self, clip: Clip) -> bool:
        """Whether ranks reduce the norm."""
        return any(self.agrees(index) for index in clip.optimizers)

    def parameter_of(self, spot: Spot) -> Parameter:
        """Return whose gradient it is."""
        return self.optimizers[spot.optimizer].parameters[spot.parameter]

    def bad(self, step: int) -> list[Spot]:
        """Return the gradients that hold something non-finite: what is planted needs an element."""
        return [
            spot
            for spot, _ in self.planted
            if spot.step == step
            and spot not in self.missing
            and self.parameter_of(spot).held(step)[spot.rank].numel() > 0
        ]

    def clip_is_clean(self, step: int, clip: Clip) -> bool:
        """Whether nothing that the clip measures is planted."""
        members = clip.members(self)
        return not any((spot.optimizer, spot.parameter) in members for spot in self.bad(step))

    def agrees(self, optimizer: int) -> bool:
        """Whether this optimizer's ranks reduce their flag."""
        return self.kind != "grad" or self.optimizers[optimizer].has_dtensors

    def overflows(self, step: int, optimizer: int) -> bool:
        """Whether any rank holds a non-finite value, of this optimizer or of one that it is clipped with."""
        clip = self.clip_of(step, optimizer)
        together = (optimizer,) if clip is None else clip.optimizers
        return any(spot.optimizer in together for spot in self.bad(step))
