"""The phases of an optimizer's step, event by event."""

import gc
import math
import weakref
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import PLACES, Place, flags, grads, params_of, sgd, started, values
from step_cases import CPU, OLDER, PHASES, SCALE, Event, begin, call, optimizer_of, phase_of, renew, scale
from torch.amp.grad_scaler import OptState

from scaler_triton import GradScaler, ShardedGradScaler, StepGuard
from scaler_triton.core.check import Checks
from scaler_triton.core.ranks import Ranks
from scaler_triton.core.step import Phase
from scaler_triton.guard.spikes import Window

BY_HAND = pytest.mark.parametrize(("method", "given"), [("unscale_", ()), ("clip_grad_norm_", (100.0,))])

# The gradient is 8, the scale 4, the learning rate 0.5, the weight 0 or, after a step, -1. A cell is the phase after
# the event, and the gradient if it is neither 8, as it came (READY and CHECKED), nor 2, divided (the others). CHECKED
# is READY with a flag, SKIPPED is STEPPED with the weight where it was. "!": what the event makes fail is raised. One
# of ERRORS is raised by the scaler, and nothing has changed then.
TABLE = """
event                           | READY      | CHECKED    | UNSCALED   | CARRIED      | FAILED  | STEPPED
unscale_                        | UNSCALED   | UNSCALED   | again      | UNSCALED     | again   | after
clip                            | UNSCALED   | UNSCALED   | again      | UNSCALED     | again   | after
clip parameters= to 1           | UNSCALED 1 | UNSCALED 1 | UNSCALED 1 | UNSCALED 1   | FAILED  | after
plain step                      | STEPPED    | STEPPED    | STEPPED    | STEPPED      | SKIPPED | twice
fused step                      | STEPPED    | STEPPED    | STEPPED    | STEPPED      | SKIPPED | twice
older step                      | STEPPED    | STEPPED    | STEPPED    | STEPPED      | SKIPPED | twice
scale                           | READY      | CHECKED    | UNSCALED   | READY 2      | READY 2 | STEPPED
update                          | none       | READY      | CARRIED    | none         | CARRIED | READY 2
_check_inf_per_device           | CHECKED    | CHECKED    | UNSCALED   | CARRIED      | FAILED  | STEPPED
unscale_ fails                  | READY!     | CHECKED!   | again      | CARRIED!     | again   | after
unscale_ fails after writes     | FAILED!    | FAILED!    | again      | CARRIED!     | again   | after
unscale_ interrupted            | READY!     | CHECKED!   | again      | CARRIED!     | again   | after
... after writes                | FAILED!    | FAILED!    | again      | CARRIED!     | again   | after
clip fails                      | READY!     | CHECKED!   | again      | CARRIED!     | again   | after
clip fails after writes         | FAILED!    | FAILED!    | again      | FAILED!      | again   | after
_check_inf_per_device fails     | READY!     | CHECKED!   | UNSCALED!  | CARRIED      | FAILED  | STEPPED
plain step fails to check       | READY!     | CHECKED!   | STEPPED    | STEPPED      | SKIPPED | twice
fused step fails to check       | READY!     | CHECKED!   | STEPPED    | STEPPED      | SKIPPED | twice
plain step fails after writes   | FAILED!    | FAILED!    | STEPPED    | STEPPED      | SKIPPED | twice
ranks: unscale_ fails           | FAILED! 8  | FAILED! 8  | again      | FAILED!      | again   | after
ranks: unscale_ interrupted     | READY!     | CHECKED!   | again      | CARRIED!     | again   | after
ranks: clip fails               | FAILED! 8  | FAILED! 8  | again      | FAILED!      | again   | after
ranks: check fails              | CHECKED!   | CHECKED    | UNSCALED   | CARRIED      | FAILED  | STEPPED
ranks: reduction fails          | FAILED!    | FAILED!    | again      | FAILED!      | again   | after
ranks: it is interrupted        | FAILED!    | FAILED!    | again      | FAILED!      | again   | after
ranks: older step fails at once | FAILED! 8  | FAILED! 8  | FAILED!    | FAILED!      | SKIPPED | twice
plain optimizer.step fails      | FAILED!    | FAILED!    | FAILED!    | FAILED!      | SKIPPED | twice
plain optimizer.step stopped    | FAILED!    | FAILED!    | FAILED!    | FAILED!      | SKIPPED | twice
fused optimizer.step fails      | FAILED! 8  | FAILED! 8  | FAILED!    | FAILED!      | SKIPPED | twice
fused optimizer.step stopped    | FAILED! 8  | FAILED! 8  | FAILED!    | FAILED!      | SKIPPED | twice
older step fails at once        | FAILED! 8  | FAILED! 8  | FAILED!    | FAILED!      | SKIPPED | twice
older step fails having asked   | FAILED!    | FAILED!    | FAILED!    | FAILED!      | SKIPPED | twice
scale after a failed step       | READY 2    | READY 2    | READY 2    | READY 2      | SKIPPED | twice
fused scale after a failed step | READY      | READY      | READY 2    | READY 2      | SKIPPED | twice
others write READY              | READY      | CHECKED    | CHECKED 2  | CARRIED      | CHECKED 2 | CHECKED 2
others write UNSCALED           | UNSCALED 8 | UNSCALED 8 | UNSCALED   | UNSCALED     | FAILED  | UNSCALED
others write STEPPED            | STEPPED 8  | STEPPED 8  | STEPPED    | STEPPED      | STEPPED | STEPPED
"""
ERRORS = {
    "again": "unscale_() has already been called on this optimizer since the last update().",
    "after": "unscale_() is being called after step().",
    "twice": "step() has already been called since the last update().",
    "none": "No inf checks were recorded prior to update.",
}


def step_that_fails(error: type[BaseException] = MemoryError) -> Event:
    def event(scaler: Any, optimizer: Any) -> None:
        with mock.patch.object(optimizer, "step", side_effect=error):
            scaler.step(optimizer)

    return event


def older_step_that_fails(when: str) -> Event:
    def event(scaler: Any, optimizer: Any) -> None:
        with mock.patch.object(optimizer, "fails", when):
            scaler.step(optimizer)

    return event


def scale_after_a_failed_step(scaler: Any, optimizer: Any) -> None:
    with suppress(MemoryError):
        step_that_fails()(scaler, optimizer)
    scale(scaler)


def clip_chosen(scaler: Any, optimizer: Any) -> None:
    scaler.clip_grad_norm_(optimizer, 1.0, parameters=optimizer.param_groups[0]["params"])


def write(stage: OptState) -> Event:
    def event(scaler: Any, optimizer: Any) -> None:
        scaler._per_optimizer_states[id(optimizer)]["stage"] = stage
        scaler._found_inf_per_device(optimizer)  # looks at the state

    return event


# By their names without the kind of the optimizer, and without "ranks:".
EVENTS: dict[str, Event] = {
    "unscale_": call("unscale_"),
    "clip": call("clip_grad_norm_", 1e6),
    "clip parameters= to 1": clip_chosen,
    "step": call("step"),
    "scale": scale,
    "update": lambda scaler, _: scaler.update(),
    "_check_inf_per_device": call("_check_inf_per_device"),
    "unscale_ fails": call("unscale_", fails="take_looks"),
    "unscale_ fails after writes": call("unscale_", fails="unscale_", after=True),
    "unscale_ interrupted": call("unscale_", fails="take_looks", error=KeyboardInterrupt),
    "... after writes": call("unscale_", fails="unscale_", after=True, error=KeyboardInterrupt),
    "clip fails": call("clip_grad_norm_", 1e6, fails="norm_batch"),
    "clip fails after writes": call("clip_grad_norm_", 1e6, fails="clip_batch_", after=True),
    "_check_inf_per_device fails": call("_check_inf_per_device", fails="take_looks"),
    "step fails to check": call("step", fails="take_looks"),
    "step fails after writes": call("step", fails="unscale_", after=True),
    "check fails": call("_check_inf_per_device", fails="take_looks"),
    "reduction fails": call("unscale_", fails="reduce_"),
    "it is interrupted": call("unscale_", fails="reduce_", error=KeyboardInterrupt),
    "optimizer.step fails": step_that_fails(),
    "optimizer.step stopped": step_that_fails(KeyboardInterrupt),
    "step fails at once": older_step_that_fails("before"),
    "step fails having asked": older_step_that_fails("after"),
    "scale after a failed step": scale_after_a_failed_step,
    "others write READY": write(OptState.READY),
    "others write UNSCALED": write(OptState.UNSCALED),
    "others write STEPPED": write(OptState.STEPPED),
}


def named(event: str) -> str:
    """Return the name in EVENTS of an event in the table."""
    return " ".join(word for word in event.split() if word not in ("plain", "fused", "older", "ranks:"))


def happens(event: str, scaler: Any, optimizer: Any) -> str:
    """Return what the event raises, as the table has it."""
    try:
        EVENTS[named(event)](scaler, optimizer)
    except (MemoryError, KeyboardInterrupt):
        return "!"
    except (RuntimeError, AssertionError) as error:
        text = str(error)
        return next((key for key, each in ERRORS.items() if text.startswith(each)), text)
    return ""


ROWS = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]
assert ROWS[0][1:] == PHASES
CELLS = [(event, phase, cell) for event, *cells in ROWS[1:] for phase, cell in zip(PHASES, cells, strict=True)]


@OLDER
@pytest.mark.parametrize(("event", "phase", "cell"), CELLS)
def test_the_phase_is_that_of_the_table_and_the_next_batch_steps(
    event: str, phase: str, cell: str, request: Any
) -> None:
    scaler, optimizer = begin(event, phase, request)
    gradient = grads(optimizer)[0]
    raised = happens(event, scaler, optimizer)
    expected, *others = cell.replace("!", "").split()
    step = scaler._ours.steps.open(optimizer)
    if cell in ERRORS:
        assert (raised, phase_of(scaler, optimizer), grads(optimizer)) == (cell, phase, [gradient])
    else:
        assert raised == ("!" if "!" in cell else "")
        assert phase_of(scaler, optimizer) == expected.replace("SKIPPED", "STEPPED")
        assert grads(optimizer) == pytest.approx([float(*others or [8 if expected in ("READY", "CHECKED") else 2])])
    assert step["stage"] is step.phase.stage
    has_stepped = phase == "STEPPED" or (expected == "STEPPED" and "others" not in event)
    before = -1.0 if has_stepped else 0.0
    assert values(optimizer) == [before]
    scaler.update(SCALE)
    scale(scaler)
    renew(optimizer)
    scaler.step(optimizer)
    assert values(optimizer) == [before - 1.0]


@OLDER
@pytest.mark.parametrize(("event", "phase"), [cell[:2] for cell in CELLS if "!" in cell[2]])
def test_a_second_try_after_an_error_divides_once_or_skips(event: str, phase: str, request: Any) -> None:
    scaler, optimizer = begin(event, phase, request)
    happens(event, scaler, optimizer)
    failed = scaler._ours.steps.open(optimizer).phase is Phase.FAILED
    scaler.step(optimizer)
    assert values(optimizer) == [0.0 if failed else -1.0]
    assert scaler.was_skipped(optimizer) is failed


class Unscales(GradScaler):
    """As those of frameworks do."""

    def unscale_(self, optimizer: Any) -> None:
        super().unscale_(optimizer)


@pytest.mark.parametrize("cls", [GradScaler, Unscales])
def test_after_a_step_that_failed_the_next_loss_has_gradients_of_its_own(cls: type) -> None:
    scaler, optimizer = started(cls, "cpu", init_scale=SCALE), optimizer_of()
    with pytest.raises(MemoryError):
        step_that_fails()(scaler, optimizer)
    scale(scaler)
    renew(optimizer)
    scaler.step(optimizer)
    assert values(optimizer) == [-1.0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_that_is_scaled_while_the_optimizer_steps_ends_nothing(fused: bool) -> None:
    """As by SAM's closure. A later loss does end a step that has raised, with such a loss or without."""
    optimizer, scaler = sgd([torch.tensor([8.0])], fused=fused), started(GradScaler, "cpu", init_scale=SCALE)
    own, fails = optimizer.step, [False, True, False]

    def step(*args: Any) -> None:
        scaler.scale(torch.ones(()))
        if fails.pop(0):
            raise MemoryError
        own()

    optimizer.step = step  # type: ignore[method-assign, assignment]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (values(optimizer), scaler.stats().updates) == ([-1.0], 1)
    for _ in range(2):
        scaler.scale(torch.ones(()))
        optimizer.param_groups[0]["params"][0].grad.fill_(8.0)
        scaler.unscale_(optimizer)
        with suppress(MemoryError):
            scaler.step(optimizer)
    assert values(optimizer) == [-2.0]


@BY_HAND
def test_a_loop_may_drop_a_batch_whose_check_failed_after_writes(method: str, given: tuple[float, ...]) -> None:
    scaler, optimizer = started(GradScaler, "cpu", init_scale=SCALE), optimizer_of()
    with pytest.raises(MemoryError):
        call(method, *given, fails="clip_batch_" if given else "unscale_", after=True)(scaler, optimizer)
    scale(scaler)
    renew(optimizer)
    getattr(scaler, method)(optimizer, *given)
    scaler.step(optimizer)
    assert values(optimizer) == [-1.0]


@BY_HAND
@pytest.mark.parametrize("before", ["READY", "CARRIED"])
def test_gradients_of_a_loss_scaled_between_check_and_update_are_divided(method: str, given: Any, before: str) -> None:
    """As where a first pass is only looked at, and its step left out."""
    scaler, optimizer = begin("", before, None)
    getattr(scaler, method)(optimizer, *given)
    scale(scaler)
    renew(optimizer)
    scaler.update()
    scaler.step(optimizer)
    assert values(optimizer) == [-1.0]


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_an_update_by_the_optimizers_own_hook_ends_its_step(kind: str) -> None:
    scaler, optimizer = started(GradScaler, "cpu", init_scale=SCALE), optimizer_of(kind)
    optimizer.register_step_post_hook(lambda *_: scaler.update())
    for step in (1, 2):
        scale(scaler)
        renew(optimizer)
        scaler.step(optimizer)
        assert (values(optimizer), scaler.stats().updates) == ([-float(step)], step)


def test_gradients_that_were_unscaled_after_a_step_that_failed_stay_so_whatever_is_scaled() -> None:
    """The step has checked nothing, and what is scaled later may be the loss of another optimizer."""
    scaler, optimizer = started(GradScaler, "cpu", init_scale=SCALE), optimizer_of()
    with pytest.raises(MemoryError):
        call("step", fails="take_looks")(scaler, optimizer)
    scaler.unscale_(optimizer)
    scale(scaler)
    scaler.step(optimizer)
    assert values(optimizer) == [-1.0]


@OLDER
@pytest.mark.parametrize(
    "event", [row[0] for row in ROWS if "optimizer.step" in row[0] or row[0].startswith("older step f")]
)
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("phase", ["CHECKED", "UNSCALED"])
def test_an_optimizer_that_fails_leaves_the_scale_as_it_is(event: str, phase: str, carried: bool, request: Any) -> None:
    """On other ranks it may not have failed. What a fused one has divided nobody knows, after an update neither."""
    scaler, optimizer = begin(event, phase, request)
    happens(event, scaler, optimizer)
    failed = scaler._ours.steps.open(optimizer).phase is Phase.FAILED
    scaler.update()
    assert scaler.get_scale() == SCALE
    if carried:
        scaler.step(optimizer)
        assert values(optimizer) == [0.0 if failed else -1.0]


def test_a_look_of_unscaled_gradients_that_fails_to_judge_spends_the_step() -> None:
    """Its flag is gone, and `step` checks no more."""
    guard, optimizer = StepGuard("cpu", spike_sigma=3.0), optimizer_of()
    guard.unscale_(optimizer)
    with mock.patch.object(Window, "judge", side_effect=MemoryError), pytest.raises(MemoryError):
        guard._check_inf_per_device(optimizer)
    assert phase_of(guard, optimizer) == "FAILED"


# A stage that torch does not have


@pytest.mark.parametrize("method", ["unscale_", "_check_inf_per_device"])
def test_at_a_stage_of_other_codes_own_torchs_method_runs_which_asks_no_other_rank(
    method: str, reductions: Any
) -> None:
    scaler, optimizer = started(ShardedGradScaler, "cpu", init_scale=SCALE), optimizer_of()
    scaler._per_optimizer_states[id(optimizer)]["stage"] = "its own"
    getattr(scaler, method)(optimizer)
    assert (grads(optimizer), reductions) == ([2.0 if method == "unscale_" else 8.0], [])


def test_a_stage_of_other_codes_own_stays_where_the_optimizer_fails() -> None:
    scaler, optimizer = started(GradScaler, "cpu", init_scale=SCALE), optimizer_of()
    state = scaler._per_optimizer_states[id(optimizer)]
    state.update(stage="its own", found_inf_per_device={CPU: torch.zeros(())})
    with pytest.raises(MemoryError):
        step_that_fails()(scaler, optimizer)
    assert state["stage"] == "its own"


# Another rank


def another(status: list[float]) -> Any:
    """Return a reduction with a rank of that status."""

    def reduce_(self: Ranks, values: torch.Tensor, op: str) -> None:
        values.copy_(torch.maximum(values, torch.tensor(status)))

    return mock.patch.object(Ranks, "reduce_", reduce_)


FAILS, IS_APART = [1.0, 1.0, -math.inf, -math.inf], [0.0, 0.0, 2 * SCALE, -2 * SCALE]


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("method", ["unscale_", "clip_grad_norm_", "step"])
@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("other", [FAILS, IS_APART])
def test_gradients_of_a_loss_scaled_since_another_ranks_check_failed_are_checked_anew(
    method: str, newer: bool, other: list[float]
) -> None:
    """That rank is READY, and checks."""
    scaler, optimizer = started(ShardedGradScaler, "cpu", init_scale=SCALE), optimizer_of()
    with another(other):
        scaler.unscale_(optimizer)
    if newer:
        scale(scaler)
        renew(optimizer)
    anew = newer and other is FAILS
    told = "Another rank failed" if other is FAILS else "The ranks hold different scales"
    text = told if method == "step" else "has already been called"
    with nullcontext() if anew else pytest.raises(RuntimeError, match=text):
        getattr(scaler, method)(optimizer, *([1e6] if method == "clip_grad_norm_" else []))
    if method != "step":
        assert phase_of(scaler, optimizer) == "UNSCALED"
    elif anew:
        assert values(optimizer) == [-1.0]


@pytest.mark.usefixtures("two_ranks")
def test_a_check_that_was_only_captured_tells_nothing_of_another_rank() -> None:
    """Until a replay its memory holds what an earlier check left there."""
    scaler, optimizer = started(ShardedGradScaler, "cpu", init_scale=SCALE), optimizer_of()
    with another(FAILS):
        scaler.unscale_(optimizer)
    scaler._ours.steps.open(optimizer).flag.is_captured = True
    scale(scaler)
    renew(optimizer)
    with pytest.raises(RuntimeError, match="has already been called"):
        scaler.unscale_(optimizer)


@pytest.mark.usefixtures("two_ranks")
def test_of_a_step_that_failed_before_its_check_it_is_not_known_whether_the_last_one_was_skipped() -> None:
    scaler, optimizer = started(ShardedGradScaler, "cpu", init_scale=SCALE), optimizer_of()
    scaler.step(optimizer)
    scaler.update()
    with mock.patch.object(Checks, "plan", side_effect=MemoryError), pytest.raises(MemoryError):
        scaler.clip_grad_norm_(optimizer, 1.0)
    assert phase_of(scaler, optimizer) == "FAILED"
    with pytest.raises(ValueError, match="was not stepped yet, or was unscaled again"):
        scaler.was_skipped(optimizer)


# CARRIED


@pytest.mark.parametrize("checks", [0, 1, 2])
def test_a_failed_step_that_was_carried_is_skipped_even_if_a_check_finds_nothing(checks: int) -> None:
    scaler, optimizer = begin("", "FAILED", None)
    scaler.update()
    for _ in range(checks):
        scaler._check_inf_per_device(optimizer)
        scaler.update()
    scaler.step(optimizer)
    assert values(optimizer) == [0.0]


@OLDER
@pytest.mark.parametrize("kind", ["plain", "fused", "older"])
@pytest.mark.parametrize("updates", [False, True])
def test_a_carried_steps_flag_is_what_a_look_returns_and_what_others_set_counts(kind: str, updates: bool) -> None:
    scaler, optimizer = begin(kind, "CARRIED", None)
    flag = scaler._check_inf_per_device(optimizer)[CPU]
    assert flag.item() == 0.0
    flag.fill_(1.0)
    if updates:
        scaler.update()
    scaler.step(optimizer)
    assert values(optimizer) == [0.0]
    assert scaler.was_skipped(optimizer) is True


def test_a_failed_step_leaves_what_a_plain_optimizer_calls_its_own() -> None:
    scaler, optimizer = begin("", "FAILED", None)
    optimizer.grad_scale = optimizer.found_inf = 0.5
    scaler.step(optimizer)
    assert (values(optimizer), optimizer.grad_scale, optimizer.found_inf) == ([0.0], 0.5, 0.5)


def updated(scaler: Any) -> None:
    """Take another optimizer's step, and update: with nothing else checked, that raises."""
    scaler.step(optimizer_of())
    scaler.update()


def test_a_carried_step_waits_as_many_updates_as_come() -> None:
    scaler, optimizer = begin("", "CARRIED", None)
    for _ in range(2):
        updated(scaler)
    scaler.unscale_(optimizer)
    assert grads(optimizer) == [2.0]
    scaler.step(optimizer)
    assert values(optimizer) == [-1.0]


@BY_HAND
def test_new_gradients_of_a_carried_step_are_divided_and_so_are_old_ones_once_a_loss_is_scaled(
    method: str, given: tuple[float, ...]
) -> None:
    scaler, optimizer = begin("", "CARRIED", None)
    renew(optimizer)
    getattr(scaler, method)(optimizer, *given)
    assert grads(optimizer) == [2.0]
    scaler.update()
    scale(scaler)
    getattr(scaler, method)(optimizer, *given)
    assert grads(optimizer) == [0.5]


def test_a_carried_step_that_is_unscaled_again_goes_by_its_new_flag() -> None:
    scaler, optimizer = begin("", "CARRIED", None)
    renew(optimizer, math.inf)
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.step(optimizer)
    scaler.update()
    assert (values(optimizer), scaler.get_scale(), scaler.stats().skipped) == ([0.0], SCALE / 4, 2)


def test_what_was_checked_without_a_gradient_is_not_carried() -> None:
    scaler, optimizer = started(GradScaler, "cpu", init_scale=SCALE), sgd([None])
    scaler.unscale_(optimizer)
    updated(scaler)
    renew(optimizer)
    scaler.step(optimizer)
    assert values(optimizer) == [-1.0]


def test_a_step_that_others_have_taken_is_not_carried() -> None:
    """They write the stage, as torch's class does."""
    scaler, optimizer = begin("", "UNSCALED", None)
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
    scaler.update()
    renew(optimizer)
    scaler.step(optimizer)
    assert values(optimizer) == [-1.0]


def test_what_was_unscaled_before_the_last_loss_is_not_carried_beside_what_was_after_it() -> None:
    scaler, optimizer, other = *begin("", "UNSCALED", None), optimizer_of()
    scale(scaler)
    scaler.unscale_(other)
    scaler.update()
    renew(optimizer)
    for each in (optimizer, other):
        scaler.step(each)
        assert values(each) == [-1.0]


def test_what_is_unscaled_after_the_last_loss_is_carried_whatever_others_wrote_before() -> None:
    scaler, optimizer = begin("", "UNSCALED", None)
    scale(scaler)
    write(OptState.READY)(scaler, optimizer)
    renew(optimizer)
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.step(optimizer)
    assert values(optimizer) == [-1.0]


def test_a_step_that_fails_after_another_loss_is_carried_to_be_skipped() -> None:
    scaler, optimizer = begin("", "UNSCALED", None)
    scale(scaler)
    with pytest.raises(MemoryError):
        step_that_fails()(scaler, optimizer)
    scaler.update()
    scaler.step(optimizer)
    assert values(optimizer) == [0.0]


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("devices", [[], ["meta"], ["cpu", "meta"]])
def test_a_failed_steps_flag_is_where_parameters_are_that_can_be_read_or_with_the_scale(devices: list[str]) -> None:
    scaler = started(ShardedGradScaler, "cpu", init_scale=SCALE)
    optimizer: Any = SimpleNamespace(param_groups=[{"params": [torch.ones(1, device=each) for each in devices]}])
    with pytest.raises(MemoryError):
        call("unscale_", fails="take_looks")(scaler, optimizer)
    assert flags(scaler, optimizer) == [1.0]
    scaler.update()
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("assigned", [False, True])
def test_gradients_that_graphs_may_have_written_are_not_carried(assigned: bool) -> None:
    """A replay writes new ones, and no call of `scale` tells of it, whatever registry other code puts in."""
    scaler, optimizer = begin("", "READY", None)
    scaler._ours.steps.replayed = True
    if assigned:
        scaler._per_optimizer_states = {}
    scaler.unscale_(optimizer)
    scaler.update()
    renew(optimizer)
    scaler.step(optimizer)
    assert values(optimizer) == [-1.0]


# Parameters that are replaced


def asked(scaler: Any, optimizer: Any, how: str) -> None:
    if how == "unscale_":
        scaler.unscale_(optimizer)
    elif how == "clip":
        scaler.clip_grad_norm_(optimizer, 1.0)
    elif how == "measure":
        scaler.step(optimizer)
        scaler.headroom()
    scaler.step(optimizer) if how != "measure" else None
    scaler.update()


@pytest.mark.parametrize("how", ["step", "unscale_", "clip", "measure", "load", "new scale"])
@pytest.mark.parametrize("kind", [GradScaler, StepGuard, "spikes"])
@PLACES
def test_a_replaced_parameter_is_freed_at_once_with_its_gradient(place: Place, kind: Any, how: str) -> None:
    options: dict[str, Any] = {"backend": place.backend}
    if kind is GradScaler:
        scaler = GradScaler(place.device, measure=how == "measure", **options)
    else:
        scaler = StepGuard(place.device, spike_sigma=6.0 if kind == "spikes" else None, **options)
    if kind is not GradScaler and how in ("measure", "new scale"):
        pytest.skip("a guard neither measures nor scales")
    scaler.scale(torch.ones((), device=place.device))
    optimizer = sgd([torch.ones(4), torch.ones(3)], place.device)
    gc.disable()  # what only a collection would free is not freed at once
    try:
        for _ in range(3):
            asked(scaler, optimizer, how)
        if how == "load":
            scaler.load_state_dict(scaler.state_dict())
        elif how == "new scale":
            scaler.update(2.0)
        group = optimizer.param_groups[0]
        freed = [weakref.ref(group["params"][0]), weakref.ref(group["params"][0].grad)]
        group["params"] = [torch.nn.Parameter(torch.zeros(5, device=place.device)), group["params"][1]]
        assert [reference() for reference in freed] == [None, None]
        group["params"][0].grad = torch.ones(5, device=place.device)
        asked(scaler, optimizer, how)
        assert not scaler.was_skipped(optimizer)
        assert group["params"][0].abs().min() > 0
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [GradScaler, StepGuard])
def test_memory_does_not_grow_where_parameters_are_replaced_again_and_again(kind: Any) -> None:
    """As where a scene gets more splats, or a stage of training another head."""
    scaler, optimizer, made = kind("cpu"), sgd([torch.ones(8)]), []
    scaler.scale(torch.ones(()))
    gc.disable()
    try:
        for stage in range(50):
            parameter = torch.nn.Parameter(torch.zeros(8 + stage % 7))
            parameter.grad = torch.ones_like(parameter)
            made += [weakref.ref(parameter), weakref.ref(parameter.grad)]
            optimizer.param_groups[0]["params"] = [parameter]
            del parameter
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert sum(reference() is not None for reference in made) == 2
    finally:
        gc.enable()
    assert len(scaler._ours.steps) == 1


def test_parameters_with_a_plan_can_be_swapped() -> None:
    """torch swaps no tensor that has a weak reference."""
    scaler, optimizer = started(GradScaler, "cpu", init_scale=2.0), sgd([torch.ones(3)])
    scaler.step(optimizer)
    scaler.update()
    parameter = params_of(optimizer)[0]
    parameter.grad = None
    torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    parameter.grad = torch.full((2,), 6.0, dtype=torch.float64)
    scaler.step(optimizer)
    assert parameter.tolist() == [-1.5, -1.5]
