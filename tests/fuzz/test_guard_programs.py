"""Random programs on one process with a StepGuard, beside a model of it: equal to the bit after every call."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import strategies as draw
import torch
from fuzz_profile import Chunk, cases, settings_for
from grads import agreed, lacks_momentum, multiply, parameters_of, together
from hypothesis import assume, seed
from hypothesis import strategies as st
from hypothesis.errors import UnsatisfiedAssumption
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from programs import COPIES
from spike_rule import judged
from torch import Tensor
from worlds import GradientSpec, OptimizerSpec, World, assert_equal

from scaler_triton import StepGuard

pytestmark = pytest.mark.slow

FORMS = st.sampled_from(["dense", "dense", "accumulate", "keep", "none", "transposed", "gaps"])
GRADIENTS = st.builds(
    GradientSpec,
    FORMS,
    st.integers(0, 20),
    st.sampled_from([1.0, 1.0, 1.0, 1e2, 1e-3]),  # what follows 1.0 often is a spike, or the 1.0 after it
    st.sampled_from(draw.PLANTS),
)
ALREADY = "unscale_() has already been called on this optimizer since the last update()."
EMPTY = "No inf checks were recorded"


@dataclass
class Step:
    """What the model knows of an optimizer."""

    window: list[float] | None = None  # None: not judged yet
    phase: str = "ready"  # then "unscaled" by a check, "carried" over an update if it was clipped, and "stepped"
    checked: bool = False  # whether there was a gradient
    bad: bool = False  # whether it will be skipped
    raised: bool = False  # whether `step` was called and raised
    clipped: bool = False
    skipped: bool | None = None  # the last step

    def is_over(self) -> bool:
        return self.phase == "stepped" or self.raised

    def reset(self) -> None:
        self.phase, self.checked, self.bad, self.raised, self.clipped = "ready", False, False, False, False

    def updated(self) -> None:
        """End an update, over which a step lasts that was clipped and is still to be taken."""
        if self.phase == "carried" or (self.phase == "unscaled" and self.clipped and self.checked):
            self.phase, self.checked, self.raised, self.clipped = "carried", False, False, False
        else:
            self.reset()


@dataclass
class Model:
    """A guard by its docstring, in plain torch and NumPy."""

    sigma: float | None
    length: int
    steps: dict[int, Step] = field(default_factory=dict)  # by the optimizer's id, in the order of their first steps
    loaded: list[list[float]] = field(default_factory=list)  # windows whose optimizers are still to come
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("updates", "skipped", "spikes"), 0))

    def windows(self) -> list[list[float]]:
        known = [step.window for step in self.steps.values() if step.window is not None]
        return [*(window[-self.length :] for window in known), *self.loaded]

    def copied(self, length: int) -> "Model":
        return Model(self.sigma, length, loaded=self.windows(), counters=dict(self.counters))

    def unscale_(self, optimizer: Any) -> None:
        (step,) = self._open([optimizer])
        self._check([optimizer], [step])

    def clip(self, optimizers: Sequence[Any], max_norm: float, order: float, measured: Tensor) -> None:
        steps = self._open(optimizers)
        if order == 2.0:
            self._check(optimizers, steps)
        else:
            for optimizer, step in zip(optimizers, steps, strict=True):
                self._check([optimizer], [step])
        chosen = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
        norm = agreed(torch.linalg.vector_norm(together(chosen), order), [measured], True)
        bad = any(step.bad for step in steps)
        for step in steps:
            step.bad, step.clipped = bad, True
        multiply(chosen, torch.ones(()) if bad else (max_norm / (norm + 1e-6)).clamp(max=1.0))

    def step(self, optimizer: Any) -> None:
        (step,) = self._open([optimizer], checks=False)
        step.raised = True
        if step.phase == "ready":
            self._check([optimizer], [step])
        step.checked |= step.phase == "carried"
        fused = hasattr(optimizer, "_step_supports_amp_scaling")
        if not step.checked and not fused:
            raise AssertionError(EMPTY)
        if fused and not (step.bad and lacks_momentum(optimizer)):
            optimizer.found_inf = torch.tensor(float(step.bad))
            optimizer.step()
            del optimizer.found_inf
        elif not fused and not step.bad:
            optimizer.step()
        step.phase, step.raised, step.skipped = "stepped", False, step.bad

    def update(self) -> None:
        flags = [step.bad for step in self.steps.values() if step.checked]
        if not flags:
            raise AssertionError(EMPTY)
        self.counters["updates"] += 1
        self.counters["skipped"] += any(flags)
        for step in self.steps.values():
            step.updated()

    def _open(self, optimizers: Sequence[Any], checks: bool = True) -> list[Step]:
        """Return their steps; if one of them is over, the update was left out."""
        steps = [self.steps.setdefault(id(each), Step()) for each in optimizers]
        over = [step for step in steps if step.is_over()]
        for step in over:
            step.clipped = False
        if any(step.checked for step in over):
            self.update()
        for step in over:
            step.reset()
        if checks and any(step.phase == "unscaled" for step in steps):
            raise RuntimeError(ALREADY)
        return steps

    def _check(self, optimizers: Sequence[Any], steps: Sequence[Step]) -> None:
        """Check gradients, and judge their norm by the first one's window."""
        held = [[p for p in parameters_of(each) if p.grad is not None] for each in optimizers]
        bad = any(not parameter.grad.isfinite().all() for members in held for parameter in members)
        first = steps[0]
        if self.sigma is not None:
            if first.window is None:
                first.window = self.loaded.pop(0) if self.loaded else []
            if any(held):
                bad |= self._is_spike([p for members in held for p in members], first.window)
        for step, members in zip(steps, held, strict=True):
            step.phase, step.checked, step.bad, step.skipped = "unscaled", bool(members), bad, None

    def _is_spike(self, parameters: Sequence[Tensor], window: list[float]) -> bool:
        norm = together(parameters).norm().item()
        skips, limit = judged([*window, norm], self.sigma, self.length)[-1]
        assume(not 0.0 < abs(norm - limit) <= 1e-5 * limit)  # else the last digits decide; NaN without a limit
        if not norm < math.inf:
            return True
        window.append(norm)
        self.counters["spikes"] += int(skips)
        return bool(skips)


class GuardPrograms(RuleBasedStateMachine):
    backend = "torch"

    @initialize(
        specs=st.lists(draw.optimizer_specs(), min_size=1, max_size=3),
        sigma=st.sampled_from([3.0, 1.0, 0.5, None]),
        window=st.sampled_from([2, 3, 8]),
    )
    def start(self, specs: list[OptimizerSpec], sigma: float | None, window: int) -> None:
        guard = StepGuard("cpu", spike_sigma=sigma, window=window, backend=self.backend)
        self.ours = World(guard, [spec.build(torch.bfloat16) for spec in specs])
        self.theirs = World(Model(sigma, window), [spec.build(torch.bfloat16) for spec in specs])

    def both(self, ours: Callable[[], Any], theirs: Callable[[Any], None]) -> None:
        """Make a call in both worlds; the model's is given the result of ours."""
        outcomes: list[Any] = []
        for call in (ours, lambda: theirs(outcomes[0])):
            try:
                outcomes.append(call())
            except UnsatisfiedAssumption:
                raise
            except Exception as error:
                outcomes.append(error)
        errors = [error if isinstance(error, Exception) else None for error in outcomes]
        assert type(errors[0]) is type(errors[1]), errors
        assert str(errors[0]).startswith(str(errors[1])), errors
        self.compare()

    def compare(self) -> None:
        guard, model = self.ours.scaler, self.theirs.scaler
        state = guard.state_dict()
        assert (state["scale"], guard.get_scale()) == (1.0, 1.0)
        assert state["scaler_triton"]["windows"] == [pytest.approx(window, rel=1e-6) for window in model.windows()]
        assert {name: getattr(guard.stats(), name) for name in model.counters} == model.counters
        for ours, theirs in zip(self.ours.optimizers, self.theirs.optimizers, strict=True):
            step = model.steps.get(id(theirs))
            if step is not None and step.skipped is not None:
                assert guard.was_skipped(ours) is step.skipped
            for mine, other in zip(parameters_of(ours), parameters_of(theirs), strict=True):
                assert_equal(mine, other, "parameter")
                assert_equal(mine.grad, other.grad, "gradient")
                assert_equal(dict(ours.state.get(mine, {})), dict(theirs.state.get(other, {})), "state")

    def at(self, index: int, call: Callable[[Any, Any], Any]) -> None:
        here, there = (world.optimizers[index % len(world.optimizers)] for world in (self.ours, self.theirs))
        self.both(lambda: call(self.ours.scaler, here) and None, lambda _: call(self.theirs.scaler, there) and None)

    @rule(index=draw.indices, gradients=st.lists(GRADIENTS, min_size=1, max_size=4))
    def backward(self, index: int, gradients: list[GradientSpec]) -> None:
        def give(_: Any, optimizer: Any) -> None:
            for gradient, parameter in zip(itertools.cycle(gradients), parameters_of(optimizer), strict=False):
                gradient.give(parameter)

        self.at(index, give)

    @rule(index=draw.indices)
    def unscale(self, index: int) -> None:
        self.at(index, lambda guard, optimizer: guard.unscale_(optimizer))

    @rule(index=draw.indices)
    def step(self, index: int) -> None:
        self.at(index, lambda guard, optimizer: guard.step(optimizer))

    @rule(
        indices=st.lists(draw.indices, min_size=1, max_size=3),
        max_norm=st.sampled_from([1.0, 1e-3, 1e3]),
        order=st.sampled_from([2.0, 2.0, math.inf]),
    )
    def clip(self, indices: list[int], max_norm: float, order: float) -> None:
        taken = [*dict.fromkeys(index % len(self.ours.optimizers) for index in indices)]
        here, there = ([world.optimizers[index] for index in taken] for world in (self.ours, self.theirs))
        self.both(
            lambda: self.ours.scaler.clip_grad_norm_(here, max_norm, order),
            lambda measured: self.theirs.scaler.clip(there, max_norm, order, measured),
        )

    @rule()
    def update(self) -> None:
        self.both(lambda: self.ours.scaler.update(), lambda _: self.theirs.scaler.update())

    @rule(steps=st.lists(st.lists(GRADIENTS, min_size=1, max_size=4), min_size=1, max_size=4), updates=st.booleans())
    def train(self, steps: list[list[GradientSpec]], updates: bool) -> None:
        for gradients in steps:
            for index in range(len(self.ours.optimizers)):
                self.backward(index, gradients)
                self.step(index)
            if updates:
                self.update()

    train_on = train_further = train

    @rule(window=st.sampled_from([2, 5, 8]))
    def resume(self, window: int) -> None:
        """Go on from a checkpoint, with a window of another length."""
        guard = StepGuard("cpu", spike_sigma=self.theirs.scaler.sigma, window=window, backend=self.backend)
        guard.load_state_dict(self.ours.scaler.state_dict())
        self.ours.scaler, self.theirs.scaler = guard, self.theirs.scaler.copied(window)
        self.compare()

    @rule(how=st.sampled_from(list(COPIES)))
    def become_a_copy(self, how: str) -> None:
        model = self.theirs.scaler
        if all(step.phase == "ready" for step in model.steps.values()):
            self.ours.scaler = COPIES[how](self.ours.scaler)
            self.theirs.scaler = model.copied(model.length)
            self.compare()


@pytest.mark.parametrize(("backend", "chunk"), cases([("torch", 60, 0.5), ("triton", 5, 0.01)]))
def test_guard_programs(backend: str, chunk: Chunk) -> None:
    machine = seed(chunk.seed)(type("Programs", (GuardPrograms,), {"backend": backend}))
    run_state_machine_as_test(machine, settings=settings_for(chunk.programs, 20))
