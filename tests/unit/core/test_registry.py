"""The registry of steps: whose they are, through wrappers, until they are freed; what other code writes there."""

import copy
import math
import pickle
import weakref
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import Slotted, Wrapper, grads, sgd, started, values
from step_cases import CPU, OLDER, PHASES, SCALE, begin, bring_to, optimizer_of, phase_of, renew, scale
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from scaler_triton import GradScaler, StepGuard
from scaler_triton.core.registry import unwrap
from scaler_triton.core.step import Phase


class Copies(Wrapper):
    """One with a list of groups of its own, as a container's, of which each is a copy."""

    @property
    def param_groups(self) -> Any:
        return [dict(group) for group in self.optimizer.param_groups]


def states(scaler: Any) -> Any:
    return scaler._per_optimizer_states


def a_scaler() -> Any:
    return started(GradScaler, "cpu", init_scale=SCALE)


def state_of(stage: OptState, flag: float) -> dict[str, Any]:
    """Return a state of torch's."""
    return {"stage": stage, "found_inf_per_device": {CPU: torch.tensor(flag)}}


@pytest.mark.parametrize("wraps", [Wrapper, Slotted, Copies, lambda inner: Wrapper(Slotted(Wrapper(inner)))])
def test_15_a_wrapper_has_the_step_of_the_optimizer_within(wraps: Any) -> None:
    scaler, inner = a_scaler(), optimizer_of()
    outer = wraps(inner)
    scaler.unscale_(outer)
    with pytest.raises(RuntimeError, match="has already been called"):
        scaler.unscale_(inner)
    scaler.step(inner)
    assert scaler.was_skipped(outer) is scaler.was_skipped(wraps(inner)) is False
    assert states(scaler)[id(outer)] is states(scaler)[id(inner)]
    assert values(inner) == [-1.0]


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_a_wrapper_that_has_got_another_optimizer_steps_that(kind: str) -> None:
    scaler, wrapper, other = a_scaler(), Wrapper(optimizer_of(kind)), optimizer_of(kind)
    scaler.step(wrapper)
    scaler.update()
    wrapper.optimizer = other
    assert scaler.was_skipped(wrapper) is False  # its last step, until the next one
    scaler.step(wrapper)
    assert values(other) == [-1.0]
    assert not hasattr(other, "found_inf")


def circle(groups: Any) -> Any:
    first, second, third = (SimpleNamespace(param_groups=groups) for _ in range(3))
    first.optimizer, second.optimizer, third.optimizer = second, third, first
    return first


@pytest.mark.parametrize(
    "make",
    [
        lambda inner: inner,
        lambda inner: SimpleNamespace(optimizer=optimizer_of(), param_groups=inner.param_groups),  # around another's
        lambda inner: circle(inner.param_groups),
        lambda inner: type("Raises", (), {"optimizer": property(lambda self: 1 / 0)})(),
    ],
)
def test_what_is_no_wrapper_is_an_optimizer_of_its_own(make: Any) -> None:
    outer = make(optimizer_of())
    assert unwrap(outer) is outer


def test_a_wrapper_that_refers_to_itself_is_one() -> None:
    inner = optimizer_of()
    outer = SimpleNamespace(param_groups=inner.param_groups)
    outer.me, outer.base = outer, inner
    assert unwrap(outer) is inner


def test_a_state_at_the_wrappers_id_is_that_of_the_step_and_one_put_there_resets_it() -> None:
    scaler, wrapper = a_scaler(), Wrapper(optimizer_of())
    seen = states(scaler)[id(wrapper)]  # before the first call
    scaler.unscale_(wrapper)
    assert seen["stage"] is OptState.UNSCALED
    assert seen is states(scaler)[id(wrapper.optimizer)]
    states(scaler)[id(wrapper)] = _refresh_per_optimizer_state()
    scaler.unscale_(wrapper)
    assert grads(wrapper) == [0.5]


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_parameters_and_step_are_freed_with_their_optimizer(kind: str) -> None:
    scaler, kept, freed = a_scaler(), optimizer_of(kind), optimizer_of(kind, math.inf)
    for optimizer in (kept, freed):
        scaler.step(Wrapper(optimizer))
    scaler.update()
    assert scaler.overflow_report().bad
    parameter = weakref.ref(freed.param_groups[0]["params"][0])
    del optimizer, freed  # no cycle keeps them
    assert parameter() is None
    assert [*scaler._ours.steps] == [id(kept)]


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_a_state_of_torchs_put_into_the_registry_is_followed(flag: float) -> None:
    scaler, optimizer = a_scaler(), optimizer_of()
    states(scaler)[id(optimizer)] = state_of(OptState.UNSCALED, flag)
    scaler.step(optimizer)
    assert values(optimizer) == [0.0 if flag else -4.0]
    scaler.update()
    assert scaler.get_scale() == (SCALE / 2 if flag else SCALE)


def test_a_stage_that_other_code_has_written_is_followed_when_a_loss_is_scaled() -> None:
    scaler, optimizer, other = a_scaler(), optimizer_of(), optimizer_of()
    scaler._found_inf_per_device(optimizer)
    states(scaler)[id(optimizer)].update(state_of(OptState.UNSCALED, 0.0))
    scale(scaler)  # the gradients may be of another loss
    scaler.unscale_(other)
    scaler._found_inf_per_device(optimizer)
    scaler.update()
    scaler.step(optimizer)
    assert values(optimizer) == [-1.0]


def test_a_stage_that_other_code_writes_into_a_state_it_has_kept_is_carried() -> None:
    scaler, optimizer = begin("", "CHECKED", None)
    kept = states(scaler)[id(optimizer)]
    scale(scaler)
    kept["stage"] = OptState.UNSCALED
    scaler._ours.steps.open(optimizer)
    scaler.update()
    scaler.step(optimizer)
    assert values(optimizer) == [-4.0]


def test_what_new_states_of_an_assigned_mapping_hold_besides_is_of_one_update() -> None:
    scaler, optimizers = a_scaler(), [optimizer_of() for _ in range(2)]
    scaler._per_optimizer_states = defaultdict(lambda: {**_refresh_per_optimizer_state(), "calls": 0})
    for optimizer, has_more in zip(optimizers, (True, False), strict=True):
        scaler.step(optimizer)
        assert ("calls" in states(scaler)[id(optimizer)]) is has_more
        scaler.update()


def test_another_scalers_states_are_copied() -> None:
    scaler, other, optimizer = a_scaler(), a_scaler(), optimizer_of()
    scaler.unscale_(optimizer)
    other._per_optimizer_states = states(scaler)
    other.step(optimizer)
    assert values(optimizer) == [-1.0]
    assert phase_of(scaler, optimizer) == "UNSCALED"


def test_a_state_that_was_moved_to_another_optimizer_is_that_ones() -> None:
    """As frameworks do that replace an optimizer in the middle of a step."""
    scaler, old, new = a_scaler(), optimizer_of(gradient=math.inf), optimizer_of()
    scaler.unscale_(old)
    states(scaler)[id(new)] = states(scaler).pop(id(old))
    scaler.step(new)
    assert values(new) == [0.0]


@pytest.mark.parametrize("phase", PHASES)
def test_a_new_dict_in_place_of_all_states_makes_every_step_ready_and_keeps_its_plan(phase: str) -> None:
    scaler, optimizer = begin("", phase, None)
    plan = scaler._ours.steps.open(optimizer).plan
    scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
    step = scaler._ours.steps.open(optimizer)
    assert (step.phase, step.plan) == (Phase.READY, plan)
    renew(optimizer)
    scaler.step(optimizer)
    assert step.phase is Phase.STEPPED


def test_11_the_state_of_a_freed_optimizer_is_not_that_of_one_at_its_id() -> None:
    scaler, freed, heir = a_scaler(), optimizer_of(), optimizer_of()
    scaler.unscale_(freed)
    state = states(scaler).pop(id(freed))
    del freed
    states(scaler)[id(heir)] = state
    with pytest.raises(ValueError, match="was not stepped yet"):
        scaler.was_skipped(heir)
    scaler.step(heir)
    assert values(heir) == [-1.0]


def test_states_that_were_put_aside_and_put_back_go_on() -> None:
    scaler, optimizer = begin("", "UNSCALED", None)
    carried, other = optimizer_of(), optimizer_of(gradient=math.inf)
    bring_to("CARRIED", scaler, carried)  # and the first one with it
    aside, scaler._per_optimizer_states = states(scaler), {}
    scaler.step(other)
    scaler._per_optimizer_states = aside
    scaler.step(optimizer)
    scale(scaler)
    assert scaler._ours.steps.open(carried).phase is Phase.READY
    scaler.update(SCALE)
    assert (values(optimizer), scaler.stats().skipped) == ([-1.0], 0)  # the other's flag is where it was


def test_states_that_are_assigned_by_id_are_those_of_their_optimizers() -> None:
    scaler, bad, good = a_scaler(), optimizer_of(), optimizer_of()
    scaler.unscale_(bad)
    scaler._per_optimizer_states = {id(bad): state_of(OptState.UNSCALED, 1.0)}
    for optimizer in (bad, good):
        scaler.step(optimizer)
    assert (values(bad), values(good)) == ([0.0], [-1.0])


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copy_of_a_state_is_one_of_torchs_and_once_carried_it_looks_fresh(copies: Any) -> None:
    scaler, optimizer = begin("", "UNSCALED", None)
    copied = copies(states(scaler)[id(optimizer)])
    assert type(copied) is dict
    assert copied == {"stage": OptState.UNSCALED, "found_inf_per_device": {CPU: torch.zeros(())}}
    scaler.update()
    assert states(scaler)[id(optimizer)] == states(scaler)["unknown"] == _refresh_per_optimizer_state()


@pytest.mark.parametrize("how", ["step", "_check_inf_per_device"])
@pytest.mark.parametrize("gradient", [8.0, math.inf])
def test_the_flag_of_an_optimizer_that_is_freed_before_update_counts(gradient: float, how: str) -> None:
    scaler = a_scaler()
    optimizer = optimizer_of(gradient=gradient)
    parameter = weakref.ref(optimizer.param_groups[0]["params"][0])
    getattr(scaler, how)(optimizer)
    del optimizer
    assert parameter() is None
    scaler.update()
    assert scaler.get_scale() == (SCALE if gradient == 8.0 else SCALE / 2)
    assert not scaler._ours.steps
    scaler.unscale_(sgd([None]))  # no flag, but torch refuses this, too
    with pytest.raises(AssertionError, match="may only be pickled at the beginning"):
        pickle.dumps(scaler)


def test_what_is_kept_with_a_checked_step_goes_with_its_optimizer() -> None:
    guard, optimizer = StepGuard("cpu", spike_sigma=3.0), optimizer_of()
    guard.unscale_(optimizer)
    assert len(guard._ours.guard.windows()) == 1
    del optimizer
    assert guard._ours.guard.windows() == []


def test_the_last_optimizers_without_weak_references_are_kept() -> None:
    class Bare:
        __slots__ = ("param_groups",)

        def step(self) -> None:
            pass

    scaler = a_scaler()
    for count in range(1, 16):
        bare, gradient = Bare(), (math.inf, 1.0)[count % 2]
        bare.param_groups = optimizer_of(gradient=gradient).param_groups
        scaler.step(bare)
        scaler.update()
        assert scaler.was_skipped(bare) is (gradient == math.inf)
        assert len(scaler._ours.steps) == min(count, 9)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("among", ["all", "these", "others"])
def test_steps_that_await_their_optimizer_are_known_and_reset_by_parameters(phase: str, among: str) -> None:
    scaler, optimizer = begin("", phase, None)
    steps, parameters = scaler._ours.steps, optimizer.param_groups[0]["params"]
    optimizer.add_param_group({"params": [torch.ones(1)]})
    assert steps.awaiting() == ([optimizer] if phase in ("UNSCALED", "CARRIED", "FAILED") else [])
    steps.reset({"all": None, "these": parameters, "others": [torch.ones(1)]}[among])
    assert phase_of(scaler, optimizer) == (phase if among == "others" else "READY")


@OLDER
def test_the_outcome_of_a_step_that_asked_for_no_flag_is_that_it_was_not_skipped() -> None:
    scaler, optimizer = a_scaler(), optimizer_of("older")
    optimizer.step = lambda *, grad_scaler: None
    scaler.step(optimizer)
    assert not scaler._ours.steps.outcome(optimizer)
    assert scaler.was_skipped(optimizer) is False


def test_an_optimizer_may_be_freed_while_an_update_looks_at_all() -> None:
    scaler, kept = started(GradScaler, "cpu", init_scale=SCALE), optimizer_of()
    freed = [optimizer_of()]
    scaler._ours.steps.open(freed[0])

    class Frees(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: str) -> Any:
            freed.clear()
            return super().__getitem__(key)

    scaler._per_optimizer_states[0] = Frees(stage=OptState.READY, found_inf_per_device={})
    scaler.step(kept)
    scaler.update()
    assert (values(kept), freed) == ([-1.0], [])


FLAGS = "found_inf_per_device"
WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda state: state[FLAGS][CPU].fill_(1.0),
    "summed over ranks": lambda state: state[FLAGS].update({CPU: state[FLAGS].pop(CPU) + 2.0}),
    "replaced": lambda state: state.update({FLAGS: {CPU: torch.tensor([math.nan])}}),
    "of another device": lambda state: state[FLAGS].update(other=torch.tensor(1.0)),
}


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("write", WRITES)
def test_the_flag_is_what_stands_in_the_state_whoever_wrote_it(kind: str, write: str) -> None:
    scaler, optimizer = a_scaler(), optimizer_of(kind)
    scaler.unscale_(optimizer)
    WRITES[write](states(scaler)[id(optimizer)])
    scaler.step(optimizer)
    assert values(optimizer) == [0.0]
    scaler.update()
    assert scaler.get_scale() == SCALE / 2
