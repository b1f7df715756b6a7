"""Two worlds, one with our scaler and one with the specification: each call is made in both, which must stay equal."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from beyond_torch import FullSpecification
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize
from single_strategies import intervals, limits, optimizer_specs, rarely, scales
from specification import Refused
from worlds import World, Wrapper, assert_equal, assert_same_worlds, first_line, outcome

from scaler_triton import GradScaler


class TwoWorlds(RuleBasedStateMachine):
    """What rules are made of."""

    ours_class: type = GradScaler
    theirs_class: type = FullSpecification
    backend = "torch"
    device = "cpu"  # tensors are made on the default device, which must be this one
    half = torch.bfloat16

    @initialize(
        specs=st.lists(optimizer_specs(), min_size=1, max_size=3),
        scale=scales,
        growth=st.sampled_from([2.0, 1.1, 4.0]),
        backoff=st.sampled_from([0.5, 0.3]),
        interval=intervals,
        enabled=rarely.map(lambda disabled: not disabled),
        started=rarely.map(lambda not_yet: not not_yet),
        check_unscaled=rarely,
        limits=st.none() | st.none() | limits,
    )
    def start(
        self,
        specs: list[Any],
        scale: float,
        growth: float,
        backoff: float,
        interval: int,
        enabled: bool,
        started: bool,
        check_unscaled: bool,
        limits: dict[str, Any] | None,
    ) -> None:
        options = {"device": self.device, "init_scale": scale, "growth_factor": growth, "backoff_factor": backoff}
        options |= {"growth_interval": interval, "enabled": enabled}
        options["check_unscaled"] = check_unscaled
        ours = self.ours_class(**options, backend=self.backend, **(limits or {}))
        theirs = self.theirs_class(**options, limits=limits)
        self.ours = World(ours, [spec.build(self.half) for spec in specs])
        self.theirs = World(theirs, [spec.build(self.half) for spec in specs], buried=[])
        theirs.tells_sparse = self.backend == "torch"
        if started:
            self.both(lambda world: world.scaler.scale(torch.ones(())))

    def both(self, call: Callable[[World], Any]) -> None:
        """Make a call in both worlds; results, errors and all that is left behind must be equal."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours, theirs = outcome(call, self.ours), outcome(call, self.theirs)
        self.compare(ours, theirs)
        assert_same_worlds(self.ours, self.theirs)

    def compare(self, ours: Any, theirs: Any) -> None:
        if isinstance(theirs, Refused):
            assert theirs.is_met_by(ours), (ours, theirs)
        elif isinstance(theirs, BaseException):
            note(f"raises {theirs!r}")
            assert type(ours) is type(theirs), (ours, theirs)
            assert first_line(ours) == first_line(theirs)
        else:
            assert_equal(ours, theirs, "result")

    def at(self, index: int, call: Callable[[World, Any], Any], wrapped: bool = False) -> None:
        """Make a call about one optimizer in both worlds."""

        def on_one(world: World) -> Any:
            optimizer = world.optimizers[index % len(world.optimizers)]
            return call(world, Wrapper(optimizer) if wrapped else optimizer)

        self.both(on_one)
