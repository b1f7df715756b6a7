"""Random programs on one process with a StepGuard, beside a model of it: equal to the bit after every call."""

from collections.abc import Sequence
from typing import Any

import pytest
import strategies as draw
import torch
from fuzz_profile import Chunk, cases, settings_for
from grads import together
from helpers import params_of
from hypothesis import assume, seed
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from specification import Specification, is_ready
from spike_rule import entering, limit_after
from torch import Tensor
from torch.amp.grad_scaler import OptState
from worlds import COPIES, ClipSpec, GradientSpec, OptimizerSpec, TwoWorlds, World, assert_equal

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


class GuardSpecification(Specification):
    """A guard by its docstring: a scaler whose scale stays 1, and which skips spikes.

    Each step ends with its own update, and leaves others' checks; a check begins anew. `update()` does nothing.
    """

    allows_fp16 = True

    def __init__(self, sigma: float | None, length: int, loaded: Sequence[Any] = (), counters: Any = None) -> None:
        super().__init__(device="cpu", init_scale=1.0, limits={"min_scale": 1.0, "max_scale": 1.0})
        self._lazy_init_scale_growth_tracker("cpu")
        self._counters |= counters or {}
        self.sigma, self.length = sigma, length
        self.known: dict[int, list[float]] = {}  # windows by ids of optimizers, in the order of their first steps
        self.loaded = list(loaded)  # windows whose optimizers are still to come
        self.judged: dict[int, tuple[list[float], bool]] = {}  # windows before a judgement, and it
        self.is_joint = False  # whether one norm is that of several optimizers

    def windows(self) -> list[list[float]]:
        return [*(window[-self.length :] for window in self.known.values()), *self.loaded]

    def copied(self, length: int) -> "GuardSpecification":
        return GuardSpecification(self.sigma, length, self.windows(), self._counters)

    def update(self, new_scale: Any = None) -> None:
        pass

    def unscale_(self, optimizer: Any) -> None:
        self._begin_anew([optimizer])
        super().unscale_(optimizer)
        if not self.is_joint:
            self._judge([optimizer])

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Any, allow_fp16: bool = True) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16=True)

    def clip_grad_norm_(self, optimizers: Sequence[Any], *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("parameters") is None:
            self._begin_anew(optimizers)
        return super().clip_grad_norm_(optimizers, *args, **kwargs)

    def _unscale_at_once(self, optimizers: Sequence[Any], chosen: Sequence[Tensor]) -> tuple[Tensor, bool]:
        self.is_joint = True
        found = super()._unscale_at_once(optimizers, chosen)
        self.is_joint = False
        self._judge(optimizers)
        return found

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ready(self._per_optimizer_states[id(optimizer)]):
            self.unscale_(optimizer)
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            self._end(optimizer)

    def _end(self, optimizer: Any) -> None:
        """Update by this step alone, if it was taken, skipped or spent."""
        everything = self._per_optimizer_states
        state = everything.pop(id(optimizer))
        if state["found_inf_per_device"] and (state["stage"] is OptState.STEPPED or state.get("failed")):
            self._per_optimizer_states = type(everything)(everything.default_factory, {id(optimizer): state})
            super().update()
            self._carried.clear()
        self._per_optimizer_states = everything
        self.judged.pop(id(optimizer), None)

    def _begin_anew(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            state = self._per_optimizer_states[id(optimizer)]
            if state.get("failed"):
                self._end(optimizer)
            self._per_optimizer_states.pop(id(optimizer), None)

    def _judge(self, optimizers: Sequence[Any]) -> None:
        """Judge the norm of optimizers by the window of the first; each of them gets one, in their order."""
        if self.sigma is None:
            return
        for optimizer in optimizers:
            if id(optimizer) not in self.known:
                self.known[id(optimizer)] = self.loaded.pop(0) if self.loaded else []
        window = self.known[id(optimizers[0])]
        if id(optimizers[0]) in self.judged:  # another judgement of the same step replaces the last one
            window[:], was_spike = self.judged[id(optimizers[0])]
            self._counters["spikes"] -= was_spike
        held = [each for optimizer in optimizers for each in params_of(optimizer) if each.grad is not None]
        norm = together(held).norm().item()
        limit = limit_after(window, self.sigma, self.length)
        skips = norm > limit
        assume(not 0.0 < abs(norm - limit) <= 1e-5 * limit)  # else the last digits decide; NaN without a limit
        if held:
            self.judged[id(optimizers[0])] = [*window], bool(norm < torch.inf and skips)
        if held and norm < torch.inf:
            window.append(entering(norm, limit))
            self._counters["spikes"] += int(skips)
            for optimizer in optimizers if skips else ():
                for flag in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                    flag.fill_(1.0)


class GuardPrograms(TwoWorlds):
    backend = "torch"

    @initialize(
        specs=st.lists(draw.optimizer_specs(), min_size=1, max_size=3),
        sigma=st.sampled_from([3.0, 1.0, 0.5, None]),
        window=st.sampled_from([2, 3, 8]),
    )
    def start(self, specs: list[OptimizerSpec], sigma: float | None, window: int) -> None:
        guard = StepGuard("cpu", spike_sigma=sigma, window=window, backend=self.backend)
        self.ours = World(guard, [spec.build(torch.bfloat16) for spec in specs])
        self.theirs = World(GuardSpecification(sigma, window), [spec.build(torch.bfloat16) for spec in specs])

    def compare(self) -> None:
        guard, model = self.ours.scaler, self.theirs.scaler
        state = guard.state_dict()
        assert (state["scale"], guard.get_scale()) == (1.0, 1.0)
        assert state["scaler_triton"]["windows"] == [pytest.approx(window, rel=1e-6) for window in model.windows()]
        assert vars(guard.stats()) == vars(model.stats())
        for ours, theirs in zip(self.ours.optimizers, self.theirs.optimizers, strict=True):
            if id(theirs) in model._skips:
                assert guard.was_skipped(ours) is model.was_skipped(theirs)
            for mine, other in zip(params_of(ours), params_of(theirs), strict=True):
                assert_equal(mine, other, "parameter")
                assert_equal(mine.grad, other.grad, "gradient")
                assert_equal(dict(ours.state.get(mine, {})), dict(theirs.state.get(other, {})), "state")

    @rule(index=draw.indices, gradients=st.lists(GRADIENTS, min_size=1, max_size=4))
    def backward(self, index: int, gradients: list[GradientSpec]) -> None:
        self.give(index, gradients)

    @rule(index=draw.indices)
    def unscale(self, index: int) -> None:
        self.at(index, lambda world, optimizer: world.scaler.unscale_(optimizer))

    @rule(index=draw.indices)
    def step(self, index: int) -> None:
        self.at(index, lambda world, optimizer: world.scaler.step(optimizer))

    @rule(
        indices=st.lists(draw.indices, min_size=1, max_size=3).map(tuple),
        max_norm=st.sampled_from([1.0, 1e-3, 1e3]),
        order=st.sampled_from([2.0, 2.0, draw.INF]),
    )
    def clip(self, indices: tuple[int, ...], max_norm: float, order: float) -> None:
        self.clip_by(ClipSpec(indices, max_norm, order))

    @rule()
    def update(self) -> None:
        self.both(lambda world: world.scaler.update())

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
        states = model._per_optimizer_states
        if not model._carried and all(is_ready(each) or each["stage"] is OptState.STEPPED for each in states.values()):
            self.ours.scaler = COPIES[how](self.ours.scaler)
            self.theirs.scaler = model.copied(model.length)
            self.compare()


@pytest.mark.parametrize(("backend", "chunk"), cases([("torch", 60, 0.5), ("triton", 5, 0.01)]))
def test_guard_programs(backend: str, chunk: Chunk) -> None:
    machine = seed(chunk.seed)(type("Programs", (GuardPrograms,), {"backend": backend}))
    run_state_machine_as_test(machine, settings=settings_for(chunk.programs, 20))
