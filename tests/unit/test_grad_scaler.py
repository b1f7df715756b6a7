"""The scaler itself: its methods, their arguments and errors, its state, its subclasses."""

import copy
import math
import pickle
import pickletools
import threading
import types
from collections import defaultdict
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import EXTRAS, PLACES, Place, params_of, sgd, started, trained, update, values
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from scaler_triton import GradScaler, ScalerStats, ShardedGradScaler, StepGuard
from scaler_triton.core import check
from scaler_triton.core.step import OptimizerStep
from scaler_triton.integrations.unscaled import unscale_once
from scaler_triton.policy import NO_LIMITS, Limits

EACH = pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
SCALE = 4.0
CLONES = [copy.copy, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))]
COPIES = pytest.mark.parametrize("clone", CLONES, ids=["copy", "deepcopy", "pickle"])


# The public methods


@PLACES
def test_metrics_are_plain_floats_of_what_happened(place: Place) -> None:
    scaler = GradScaler(place.device, init_scale=8.0, growth_interval=2, backend=place.backend)
    assert scaler.metrics()["scaler/scale"] == 8.0
    scaler.scale(torch.ones((), device=place.device))
    for bad in (False, False, True, True, True):
        scaler.step(sgd([torch.tensor([math.inf if bad else 1.0])], place.device))
        scaler.update()
        if place.device == "cuda":
            torch.cuda.synchronize()
        found = scaler.metrics("x/")
    if place.device == "cuda":
        torch.cuda.synchronize()
        found = scaler.metrics("x/")
    names = ("scale", "updates", "skipped", "skip_share", "skipped_in_a_row", "growths", "backoffs", "spikes")
    assert found == dict(zip([f"x/{name}" for name in names], [2.0, 5.0, 3.0, 0.6, 3.0, 1.0, 3.0, 0.0], strict=True))
    assert {type(number) for number in found.values()} == {float}
    assert GradScaler("cpu", enabled=False).metrics() == {}


def attempted(scaler: Any, good_below: float, **options: Any) -> tuple[list[int], list[float]]:
    """Repeat a batch that overflows unless the scale is below a limit; return the attempts, and where it ended."""
    optimizer, attempts = sgd([torch.ones(1)]), []
    scaler.scale(torch.ones(()))
    for attempt in scaler.attempts(optimizer, **options):
        attempts.append(attempt)
        optimizer.param_groups[0]["params"][0].grad[:] = 1.0 if scaler.get_scale() < good_below else math.inf
        scaler.step(optimizer)
        scaler.update()
    return attempts, values(optimizer)


class Replacing(GradScaler):
    """Begins each step with other states, as a subclass does that has copied torch's `update`."""

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)


@pytest.mark.parametrize("cls", [GradScaler, Replacing])
def test_a_skipped_batch_is_repeated_at_the_lower_scale(cls: Any) -> None:
    scaler = cls("cpu", init_scale=64.0)
    assert attempted(scaler, 16.0) == ([1, 2, 3, 4], [-0.5 / 8])
    assert attempted(scaler, 16.0) == ([1], [-0.5 / 8])  # nothing is lost: nothing is repeated
    assert attempted(scaler, 0.0)[0] == [*range(1, 9)]
    assert attempted(scaler, 0.0, max_attempts=2) == ([1, 2], [0.0])
    assert attempted(GradScaler("cpu", enabled=False), 2.0) == ([1], [-0.5])


def test_an_attempt_that_does_not_step_is_the_last() -> None:
    scaler, optimizer = started(GradScaler, "cpu"), sgd([torch.tensor([math.inf])])
    assert [*scaler.attempts(optimizer)] == [1]
    scaler.step(optimizer)
    scaler.update()
    for _ in scaler.attempts(optimizer):  # the step before it was skipped, but was not in the loop
        assert scaler.was_skipped(optimizer)
    assert [*scaler.attempts(optimizer)] == [1]
    assert scaler.was_skipped(optimizer)
    for number in (0, 1.5):
        with pytest.raises((ValueError, TypeError), match=f"max_attempts must be an int.*, got {number}"):
            scaler.attempts(optimizer, max_attempts=number)


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_a_state_of_a_callers_own_making_decides_as_with_torch(flag: float) -> None:
    optimizer = sgd([torch.ones(1)])
    GradScaler("cpu")._maybe_opt_step(optimizer, {"found_inf_per_device": {"cpu": torch.tensor(flag)}})
    assert values(optimizer) == [0.0 if flag else -0.5]


@pytest.mark.parametrize("by", ["step", "unscale_", "clip"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [GradScaler, StepGuard])
@PLACES
def test_an_optimizers_hooks_may_ask_whether_their_step_is_skipped(
    place: Place, kind: Any, fused: bool, by: str
) -> None:
    """A fused one's run although its kernels skip; a plain one's do not."""
    optimizer, seen = sgd([torch.ones(2)], place.device, fused=fused), []
    scaler = kind(place.device, backend=place.backend)
    scaler.scale(torch.ones((), device=place.device))
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda *_: seen.append(scaler.was_skipped(optimizer)))
    for number in (1.0, math.inf, 2.0):
        params_of(optimizer)[0].grad = torch.full((2,), number, device=place.device)
        if by != "step":
            scaler.unscale_(optimizer) if by == "unscale_" else scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert seen == [False, False, *([True, True] if fused else []), False, False]


@pytest.mark.parametrize("fused", [False, True])
def test_after_a_step_that_raised_nothing_was_stepped(fused: bool) -> None:
    optimizer, scaler = sgd([torch.ones(2)], fused=fused), started(GradScaler, "cpu")
    optimizer.register_step_post_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    with pytest.raises(ValueError, match="was not stepped yet"):
        scaler.was_skipped(optimizer)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("done", ["unscale_", "clip", "look", "step", "failed", "carried"])
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("kind", [GradScaler, ShardedGradScaler, StepGuard])
def test_a_loaded_checkpoint_begins_every_step_anew(kind: Any, bad: bool, done: str) -> None:
    """A rollback in the middle of a step: what was divided or found bad before it does not count after it."""
    ended = []
    for rolls_back in (False, True):
        optimizer, other = sgd([torch.ones(2)]), sgd([torch.ones(2)])
        scaler = kind("cpu") if kind is StepGuard else kind("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))
        state = scaler.state_dict()
        if rolls_back:
            params_of(optimizer)[0].grad = torch.full((2,), math.inf if bad else 1024.0)
            if done == "failed":
                with mock.patch.object(check.Checks, "take_looks", side_effect=MemoryError), pytest.raises(MemoryError):
                    scaler.unscale_(optimizer)
            elif done in ("unscale_", "carried"):
                scaler.unscale_(optimizer)
            elif done == "clip":
                scaler.clip_grad_norm_(optimizer, 0.5)
            elif done == "look":
                scaler._check_inf_per_device(optimizer)
            else:
                scaler.step(optimizer)
            if done == "carried":
                scaler.step(other)
                scaler.update()
            with torch.no_grad():
                params_of(optimizer)[0].zero_()
            scaler.load_state_dict(state)
        params_of(optimizer)[0].grad = scaler.scale(torch.ones(2))
        scaler.step(optimizer)
        scaler.update()
        ended.append(
            (values(optimizer), scaler.get_scale(), scaler.was_skipped(optimizer), scaler._get_growth_tracker())
        )
    assert ended[0] == ended[1]
    assert ended[0][2] is False


def test_the_first_loss_may_be_scaled_in_a_transform() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    assert torch.func.grad(scaler.scale)(torch.ones(())).item() == 8.0
    assert [update(scaler, bad) for bad in (False, True)] == [8.0, 4.0]


def test_a_disabled_scaler_passes_everything_through() -> None:
    scaler, optimizer = GradScaler("cpu", enabled=False, hysteresis=0, min_scale=-1.0), sgd([torch.ones(1)])
    loss = optimizer.param_groups[0]["params"][0].sum()
    assert scaler.scale(loss) is loss
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, lambda: 3.0) == 3.0
    scaler.update(7.0)
    assert values(optimizer) == [-0.5]
    assert (scaler.state_dict(), scaler.get_scale(), scaler.limits) == ({}, 1.0, NO_LIMITS)
    assert (scaler.stats(), scaler.was_skipped(optimizer), scaler.is_enabled()) == (ScalerStats(), False, False)
    scaler.load_state_dict({"scale": 3.0})
    scaler._lazy_init_scale_growth_tracker("cpu")
    scaler.overflow_report()


def test_7_what_comes_by_position_is_forwarded_and_a_closure_by_keyword_is_refused() -> None:
    class Wants(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            return args[0](), args[1:], kwargs

    optimizer, call = Wants(sgd([torch.ones(1)]).param_groups), lambda: 3.0
    assert started(GradScaler, "cpu").step(optimizer, call, 2, key=5) == (3.0, (2,), {"key": 5})
    for cls in (GradScaler, torch.amp.GradScaler):
        with pytest.raises(RuntimeError, match=r"^Closure use is not currently supported if GradScaler is enabled\.$"):
            started(cls, "cpu").step(optimizer, closure=call)


def test_unscale_once_unscales_once_in_a_step_and_across_an_update() -> None:
    scaler, optimizer = started(GradScaler, "cpu", init_scale=SCALE), sgd([torch.full((1,), 8.0)])
    with pytest.raises(RuntimeError, match="single memory location"):  # after the other one
        unscale_once(scaler, sgd([torch.ones(1).expand(4)]), optimizer)
    for between in (None, scaler.update, None):
        if between:
            between()
        assert optimizer.param_groups[0]["params"][0].grad.tolist() == [2.0]
        unscale_once(scaler, optimizer)
    scaler.step(optimizer)
    assert values(optimizer) == [-1.0]


@pytest.mark.parametrize("captured", [(True, False), (False, True)])
def test_a_carried_step_begins_anew_where_only_one_of_the_two_is_captured(captured: tuple[bool, bool]) -> None:
    scaler, optimizer = started(GradScaler, "cpu", init_scale=SCALE), sgd([torch.full((1,), 8.0)])
    scaler.unscale_(optimizer)
    scaler.update()
    scaler._ours.steps.open(optimizer).flag.is_captured = captured[0]
    with mock.patch.object(check, "is_captured", return_value=captured[1]):
        scaler.step(optimizer)
    assert values(optimizer) == [-0.25]


def test_6_the_first_loss_may_be_scaled_in_inference_mode() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    with torch.inference_mode():
        scaler.scale(torch.ones(()))
    assert not any(each.is_inference() for each in (scaler._scale, scaler._growth_tracker))
    assert update(scaler, bad=True) == 4.0


# Its state


def test_state_without_the_key_leaves_limits_and_clears_counters() -> None:
    scaler = trained(GradScaler, **EXTRAS)
    scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=8.0).state_dict())
    assert (scaler.get_scale(), scaler.limits, scaler.stats()) == (8.0, Limits(**EXTRAS), ScalerStats())


@EACH
@COPIES
@pytest.mark.usefixtures("two_ranks")
def test_copies_go_on_where_the_original_stood_and_leave_it_alone(cls: Any, clone: Any) -> None:
    scaler = trained(cls, **EXTRAS, backend="torch")
    saved, copied = scaler.state_dict(), clone(scaler)
    assert type(copied) is cls
    assert (copied.state_dict(), copied._ours.checks.requested) == (saved, "torch")
    assert copied._ours.checks.sharded is (cls is ShardedGradScaler)
    copied._lazy_init_scale_growth_tracker("cpu")
    copied._scale.fill_(1.0)
    copied._ours.counters.on(torch.device("cpu"))[0] += 1
    assert scaler.state_dict() == saved


@COPIES
def test_a_disabled_scaler_is_copied_whatever_it_was_asked_and_whoever_made_it(clone: Any) -> None:
    ours, torchs = GradScaler("cpu", enabled=False), GradScaler.__new__(GradScaler)
    torch.amp.GradScaler.__init__(torchs, "cpu", enabled=False)  # as a subclass may that calls no other
    assert ours._found_inf_per_device(sgd([torch.ones(2)])) == {}
    for scaler in (torchs, *map(clone, (ours, torchs))):
        scaler.set_growth_interval(5)
        assert (scaler.is_enabled(), scaler.state_dict(), scaler.get_growth_interval()) == (False, {}, 5)


@EACH
def test_a_pickle_names_its_own_class_only(cls: Any) -> None:
    opcodes = pickletools.genops(pickle.dumps(started(cls, "cpu"), protocol=2))
    assert [name for opcode, name, _ in opcodes if "GLOBAL" in opcode.name] == [f"{cls.__module__} {cls.__name__}"]


def test_a_pickle_of_torchs_class_becomes_one_of_ours() -> None:
    """As under `patch_torch`, which puts our class where the pickle names torch's."""
    state = torch.amp.GradScaler("cpu", init_scale=8.0).__getstate__()
    scaler = GradScaler.__new__(GradScaler)
    scaler.__setstate__(state)
    assert (scaler.get_scale(), scaler.process_group, scaler.limits) == (8.0, None, NO_LIMITS)
    assert update(started(lambda _: scaler, "cpu"), bad=True) == 4.0


def test_a_scaler_that_holds_itself_is_copied_with_what_it_holds() -> None:
    scaler = GradScaler("cpu")
    scaler.update = types.MethodType(GradScaler.update, scaler)  # type: ignore[method-assign]
    copied: Any = copy.deepcopy(scaler)
    assert copied.update.__self__ is copied is not scaler


# Subclasses


class Locked(GradScaler):
    """Has something that cannot be copied, and leaves it out by hand."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=64.0)
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()


@COPIES
def test_a_copy_is_made_of_what_a_subclass_says_is_its_state(clone: Any) -> None:
    scaler = Locked()
    copied = clone(scaler)
    assert copied.get_scale() == 64.0
    assert copied.lock is not scaler.lock
    assert update(started(lambda _: copied, "cpu"), bad=True) == 32.0


def own_init(base: Any) -> Any:
    """Return a subclass whose `__init__` sets what torch's class has, and calls none."""

    class Own(base):
        def __init__(self, device: str) -> None:
            self._enabled, self._device = True, device
            self._init_scale, self._scale = 8.0, None
            self._growth_factor, self._backoff_factor, self._growth_interval = 2.0, 0.5, 2
            self._init_growth_tracker, self._growth_tracker = 0, None
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    return Own("cpu")


ALLOWED = {*vars(torch.amp.GradScaler("cpu")), "process_group"}


def strict_names(base: Any) -> Any:
    """Return a subclass whose `__setattr__` allows torch's names only."""

    class Strict(base):
        def __setattr__(self, name: str, value: Any) -> None:
            assert name in ALLOWED, name
            super().__setattr__(name, value)

    return Strict("cpu", init_scale=8.0, growth_interval=2)


# Private names that ours has, and what its parts are called.
OURS = GradScaler("cpu")._ours
PARTS = {*vars(GradScaler), *vars(OURS), *vars(OURS.checks), *vars(OURS.updates), *OptimizerStep.__slots__}
NAMES = sorted({f"_{name.strip('_')}" for name in PARTS} - {"_ours", *dir(torch.amp.GradScaler("cpu"))})


def own_names(base: Any) -> Any:
    """Return a subclass with attributes of its own, named like what is ours within."""

    class Named(base):
        def __init__(self) -> None:
            for name in NAMES:
                setattr(self, name, None)
            super().__init__("cpu", init_scale=8.0, growth_interval=2)
            for name in NAMES:
                setattr(self, name, f"a user's {name}")

    return Named()


def own_methods(base: Any) -> Any:
    """Return a subclass with methods of its own, so named."""
    named = dict.fromkeys(NAMES, lambda self, *args: pytest.fail("a user's method was called"))
    return type("Named", (base,), named)("cpu", init_scale=8.0, growth_interval=2)


@pytest.mark.parametrize("make", [own_init, strict_names, own_names, own_methods])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_subclass_with_things_of_its_own_trains_as_torchs_does(make: Any, fused: bool, unscales: bool) -> None:
    """Fault 5."""

    def run(base: Any) -> list[Any]:
        scaler, parameter, seen = make(base), torch.nn.Parameter(torch.ones(3)), []
        optimizer = torch.optim.SGD([parameter], lr=0.5, fused=fused)
        for bad in (False, False, True, False, True, False):
            optimizer.zero_grad()
            scaler.scale(parameter.sum() * (math.inf if bad else 1.0)).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            seen.append((parameter.tolist(), scaler.get_scale(), scaler._get_growth_tracker()))
        if make is own_names:
            assert all(getattr(scaler, name) == f"a user's {name}" for name in NAMES)
        return seen

    assert run(GradScaler) == run(torch.amp.GradScaler)
