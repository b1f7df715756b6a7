"""Updates that are put off: whoever looks sees what would have been launched."""

import copy
import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import KERNELS, PLACES, Place, places, sgd, started
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.grad_scaler import OptState

from scaler_triton import GradScaler, ScalerStats, StepGuard
from scaler_triton.core import put_off
from scaler_triton.core.dispatch import kernels

GOOD, BAD = torch.ones(1), torch.tensor([math.inf])


def at(place: Place, **options: Any) -> Any:
    return started(GradScaler, place.device, **{"init_scale": 64.0, "backend": place.backend, **options})


def update(scaler: Any, optimizer: Any, *, bad: bool = False) -> None:
    optimizer.param_groups[0]["params"][0].grad.copy_(BAD if bad else GOOD)
    scaler.step(optimizer)
    scaler.update()


def good(scaler: Any, count: int) -> Any:
    """Do good updates, and return the optimizer."""
    optimizer = sgd([GOOD], scaler._device)
    for _ in range(count):
        update(scaler, optimizer)
    return optimizer


def are_put_off(scaler: Any) -> bool:
    return bool(scaler._ours.updates.put_off.is_ahead())


def count_launches(scaler: Any) -> Any:
    """Return a mock that is called for each launch of an update from now on."""
    updater = scaler._ours.updates.updater
    updater.launch = mock.Mock(wraps=updater.launch)
    return updater.launch


# What is launched


@KERNELS
def test_only_overflow_and_growth_launch_anything(place: Place) -> None:
    scaler = at(place, growth_interval=64)
    optimizer = good(scaler, 1)
    launch = count_launches(scaler)
    for launches, bad in ((0, 9 * "."), (1, "x"), (2, "."), (2, 62 * "."), (3, "."), (3, 9 * ".")):
        for each in bad:
            update(scaler, optimizer, bad=each == "x")
        assert launch.call_count == launches, bad
    want = ScalerStats(updates=84, skipped=1, growths=1, backoffs=1, last_skip=11)
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.stats()) == (64.0, 9, want)


@KERNELS
def test_several_optimizers_put_an_update_off_together(place: Place) -> None:
    scaler, optimizers = at(place), [sgd([GOOD], place.device) for _ in range(2)]
    for number in range(4):
        for optimizer in optimizers:
            scaler.step(optimizer)
        if number == 3:  # with the second one's flag unread it is launched
            scaler.unscale_(sgd([GOOD], place.device))
        scaler.update()
        assert are_put_off(scaler) == (number in (1, 2))
    assert scaler.stats().updates == scaler._get_growth_tracker() == 4


@KERNELS
@pytest.mark.parametrize(
    "options",
    [
        {"growth_interval": put_off.LEAST_INTERVAL - 1},
        {"max_consecutive_skips": 5},
        {"scale_policy": "headroom"},
    ],
    ids=str,
)
def test_some_scalers_launch_every_update(place: Place, options: Any) -> None:
    scaler = at(place, **options)
    good(scaler, 1)
    launch = count_launches(scaler)
    good(scaler, 5)
    assert launch.call_count == 5


@KERNELS
@pytest.mark.parametrize("fused", [False, True])
def test_a_flag_that_stays_on_the_device_ends_it(place: Place, fused: bool) -> None:
    scaler = at(place)
    optimizer = good(scaler, 4)
    launch = count_launches(scaler)
    update(scaler, sgd([GOOD], place.device, fused=fused))
    for _ in range(3):
        update(scaler, optimizer)
    assert (launch.call_count, scaler.stats().updates) == ((4, 8) if fused else (0, 8))


@KERNELS
def test_a_guards_updates_are_put_off(place: Place) -> None:
    guard, optimizer = StepGuard(place.device, backend=place.backend), sgd([GOOD], place.device)
    for _ in range(9):
        guard.step(optimizer)
    assert are_put_off(guard)
    assert guard.stats() == ScalerStats(updates=9)


@KERNELS
def test_a_replaced_scale_is_looked_at_by_the_next_update(place: Place) -> None:
    scaler = at(place, max_scale=128.0)
    optimizer, before = good(scaler, 5), scaler._scale
    scaler._scale = torch.full((), 1024.0, device=place.device)
    while scaler._scale._version < before._version:  # so much alike
        scaler._scale.fill_(1024.0)
    update(scaler, optimizer)
    assert (scaler.get_scale(), before.item(), scaler._get_growth_tracker()) == (128.0, 64.0, 6)
    if place.device == "cpu":  # where Python updates an fp64 one
        good(scaler, 5)
        scaler._scale = scaler._scale.double()
        update(scaler, optimizer, bad=True)
        assert (scaler._get_growth_tracker(), scaler.stats().last_skip) == (0, 12)


@KERNELS
def test_a_flag_that_other_code_may_have_written_is_looked_at(place: Place) -> None:
    scaler = at(place)
    optimizer = good(scaler, 5)
    flags = scaler._found_inf_per_device(optimizer)
    assert flags == {}
    scaler.step(optimizer)
    for flag in scaler._found_inf_per_device(optimizer).values():
        flag.fill_(1.0)
    scaler.update()
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.stats().skipped) == (32.0, 0, 1)


@KERNELS
def test_a_step_that_is_carried_over_an_update_keeps_its_flag(place: Place) -> None:
    scaler = at(place)
    optimizer, later = good(scaler, 5), sgd([BAD], place.device)
    scaler.unscale_(later)
    scaler.update()
    for count in range(7, 10):
        scaler.step(optimizer)
        scaler.update()
        assert scaler.stats().updates == count
    scaler.step(later)
    scaler.update()
    assert (scaler.was_skipped(later), scaler.get_scale(), scaler.stats().skipped) == (True, 16.0, 2)


@KERNELS
def test_a_scale_without_a_version_is_updated_at_once(place: Place) -> None:
    scaler = at(place)
    with torch.inference_mode():
        scaler._scale = torch.full((), 64.0, device=place.device)
    good(scaler, 5)
    assert not are_put_off(scaler)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (64.0, 5)


def test_torchs_ops_update_at_once() -> None:
    scaler = at(Place("cpu", "torch"))
    good(scaler, 5)
    assert not are_put_off(scaler)
    scaler._scale = scaler._scale.as_subclass(type("Subclass", (torch.Tensor,), {}))  # by ops, not by Python
    good(scaler, 5)
    assert not are_put_off(scaler)
    assert scaler.stats().updates == 10


@KERNELS
def test_a_scale_that_is_written_is_looked_at_by_the_next_update(place: Place) -> None:
    scaler = at(place, max_scale=128.0)
    optimizer = good(scaler, 4)
    scaler._scale.fill_(1024.0)
    update(scaler, optimizer)
    assert scaler.get_scale() == 128.0
    assert scaler.stats().updates == 5


@KERNELS
@pytest.mark.parametrize(
    ("changed", "scale", "tracker"), [({"max_scale": 32.0}, 32.0, 6), ({"growth_interval": 6}, 128.0, 0)], ids=str
)
def test_a_rule_that_is_changed_holds_at_the_next_update(place: Place, changed: Any, scale: Any, tracker: Any) -> None:
    scaler = at(place, growth_interval=100)
    optimizer = good(scaler, 5)
    if "max_scale" in changed:
        scaler.set_limits(**changed)
    else:
        scaler.set_growth_interval(changed["growth_interval"])
    update(scaler, optimizer)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (scale, tracker)


@KERNELS
def test_a_scale_that_is_set_after_a_skip_counts_it_where_it_was(place: Place) -> None:
    scaler = at(place)
    optimizer = good(scaler, 4)
    optimizer.param_groups[0]["params"][0].grad.copy_(BAD)
    scaler.step(optimizer)
    scaler.update(16.0)
    good(scaler, 4)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (16.0, 8)
    assert scaler.stats() == ScalerStats(updates=9, skipped=1, last_skip=5)


@KERNELS
def test_the_tracker_stops_where_int32_ends(place: Place) -> None:
    scaler = at(place)
    scaler.load_state_dict({**scaler.state_dict(), "growth_interval": 10**12, "_growth_tracker": 2**31 - 4})
    good(scaler, 6)
    assert (scaler._get_growth_tracker(), scaler.stats().updates) == (2**31 - 1, 6)


@KERNELS
def test_a_loss_that_was_scaled_before_cannot_be_differentiated_after_it(place: Place) -> None:
    """As after a launch."""
    scaler = at(place)
    optimizer = good(scaler, 4)
    loss = scaler.scale(torch.ones((), device=place.device, requires_grad=True))
    update(scaler, optimizer)
    assert are_put_off(scaler)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@KERNELS
def test_a_flag_that_graphs_write_is_saved_and_cleared_by_a_launch(place: Place) -> None:
    scaler = at(place)
    optimizer = good(scaler, 4)
    launch, updater = count_launches(scaler), scaler._ours.updates.updater
    updater.rows.of_graphs.add(scaler._ours.steps.open(optimizer).flag)
    update(scaler, optimizer)
    assert launch.call_count == 1


# Who reads


def twice(scaler: Any, read: Callable[[], Any]) -> Any:
    """Read what comes without a wait: the second time, what was on its way has arrived."""
    read()
    if scaler._device == "cuda":
        torch.cuda.synchronize()
    return read()


READERS: dict[str, Callable[[Any], Any]] = {
    "stats": lambda scaler: scaler.stats().updates,
    "stats without a wait": lambda scaler: twice(scaler, lambda: scaler.stats(wait=False).updates),
    "metrics": lambda scaler: twice(scaler, lambda: scaler.metrics()["scaler/updates"]),
    "tracker": lambda scaler: scaler._get_growth_tracker(),
    "tracker itself": lambda scaler: scaler._growth_tracker.item(),
    "checked tracker": lambda scaler: scaler._check_scale_growth_tracker("update")[1].item(),
    "state_dict": lambda scaler: scaler.state_dict()["_growth_tracker"],
    "pickle": lambda scaler: copy.deepcopy(scaler)._get_growth_tracker(),
    "copy": lambda scaler: copy.copy(scaler).stats().updates,
    "repr": lambda scaler: twice(scaler, lambda: int(repr(scaler).split("; ")[2].split()[0])),
}


@KERNELS
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_sees_all_updates(place: Place, reader: str) -> None:
    scaler = at(place)
    optimizer = good(scaler, 5)
    assert are_put_off(scaler)
    assert READERS[reader](scaler) == 5
    update(scaler, optimizer)
    assert READERS[reader](scaler) == 6
    assert scaler.get_scale() == 64.0


@KERNELS
def test_25_whoever_holds_the_tracker_sees_every_update_and_may_write_it(place: Place) -> None:
    scaler = at(place, growth_interval=100)
    optimizer = good(scaler, 5)
    tracker = scaler._growth_tracker
    for count in range(6, 10):
        update(scaler, optimizer)
        assert tracker.item() == count
    tracker.fill_(98)
    for _ in range(2):
        update(scaler, optimizer)
    assert (scaler.get_scale(), tracker.item()) == (128.0, 0)


@KERNELS
def test_25_what_nobody_tells_of_is_limited_at_the_next_launch(place: Place) -> None:
    scaler = at(place, growth_interval=64, max_scale=128.0)
    optimizer = good(scaler, 5)
    assert vars(scaler)["_growth_tracker"].item() == 1
    scaler._scale.data.fill_(1024.0)
    update(scaler, optimizer)
    assert scaler.get_scale() == 1024.0
    update(scaler, optimizer, bad=True)
    assert scaler.get_scale() == 128.0


@KERNELS
def test_a_loaded_state_counts_from_there(place: Place) -> None:
    scaler = at(place, growth_interval=100)
    optimizer = good(scaler, 5)
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 90})
    for _ in range(9):
        update(scaler, optimizer)
    assert are_put_off(scaler)
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.stats().updates) == (64.0, 99, 9)
    update(scaler, optimizer)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (128.0, 0)


@KERNELS
def test_a_capture_is_refused_until_the_device_knows_of_all(place: Place) -> None:
    """Each replay would count those before it again."""
    scaler = at(place)
    optimizer = good(scaler, 5)
    scaler.step(optimizer)
    updates, steps = scaler._ours.updates, scaler._ours.steps.all()
    arguments = scaler._scale, vars(scaler)["_growth_tracker"], steps, (2.0, 0.5, 2000)
    with pytest.raises(RuntimeError, match=r"cannot be captured .*: call scaler.stats\(\) before"):
        updates.by_flags(*arguments, captured=True)
    assert scaler.stats().updates == 5
    updates.by_flags(*arguments, captured=True)
    scaler.update()
    good(scaler, 3)  # replays may have updated meanwhile
    assert not are_put_off(scaler)
    assert scaler.stats().updates == 10


@KERNELS
def test_a_loggers_thread_may_read_at_any_time(place: Place) -> None:
    scaler, seen, is_over = at(place), [], threading.Event()

    def read() -> None:
        while not is_over.is_set():
            seen.append(scaler.stats().updates)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        good(scaler, 40)
    finally:
        is_over.set()
        thread.join()
    assert (scaler.stats().updates, scaler._get_growth_tracker()) == (40, 40)
    assert seen == sorted(seen)


# What others do


@KERNELS
def test_a_signals_handler_may_save_a_checkpoint_at_any_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    scaler, seen = at(place), []
    good(scaler, 5)
    tell = kernels().update_scale.launch_counts

    def interrupted(*args: Any) -> None:
        if not seen:
            seen.append({})
            seen.append(scaler.state_dict())
        tell(*args)

    monkeypatch.setattr(kernels().update_scale, "launch_counts", interrupted)
    assert scaler.stats().updates == scaler._get_growth_tracker() == seen[1]["_growth_tracker"] == 5


@KERNELS
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_interrupted_reader_changes_nothing(place: Place, error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = at(place)
    optimizer, tell = good(scaler, 5), kernels().update_scale.launch_counts

    def interrupted(*args: Any) -> None:
        tell(*args)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(kernels().update_scale, "launch_counts", interrupted)
        with pytest.raises(error):
            scaler.stats()
    update(scaler, optimizer)
    assert scaler.stats().updates == scaler._get_growth_tracker() == 6


@pytest.mark.parametrize("place", [place for place in places() if place != Place("cuda", "torch")], ids=str)
def test_flags_that_other_code_has_assigned_are_looked_at(place: Place) -> None:
    scaler = at(place)
    optimizer = good(scaler, 4)
    found = {torch.device(place.device): torch.ones((), device=place.device)}
    scaler._per_optimizer_states = {id(optimizer): {"stage": OptState.STEPPED, "found_inf_per_device": found}}
    scaler.update()
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.stats().skipped) == (32.0, 0, 1)


@PLACES
def test_a_flag_that_an_override_has_kept_is_looked_at(place: Place) -> None:
    class Keeps(GradScaler):
        def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
            self.kept = found_inf
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    scaler = started(Keeps, place.device, init_scale=64.0, backend=place.backend)
    optimizer = good(scaler, 4)
    scaler.step(optimizer)
    scaler.kept.fill_(1.0)
    scaler.update()
    update(scaler, optimizer)
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.was_skipped(optimizer)) == (32.0, 1, False)


def stored(name: str) -> Any:
    return property(lambda self: vars(self).get(name), lambda self, value: vars(self).update({name: value}))


@PLACES
@pytest.mark.parametrize("tracker", [None, stored("theirs")], ids=["attribute", "property"])
def test_a_subclass_may_keep_its_tracker_in_its_own_way(place: Place, tracker: Any) -> None:
    scaler = started(type("Own", (GradScaler,), {"_growth_tracker": tracker}), place.device, backend=place.backend)
    good(scaler, 5)
    assert (scaler._growth_tracker.item(), scaler._get_growth_tracker()) == (5, 5)


@KERNELS
def test_torchs_modes_and_transforms_intercept_nothing(place: Place) -> None:
    scaler = at(place)
    optimizer = good(scaler, 5)
    found = torch.func.grad(lambda x: (x * x).sum() * scaler.stats().updates)(torch.ones(3))
    assert found.tolist() == [10.0] * 3
    update(scaler, optimizer)
    with FakeTensorMode() if place.device == "cuda" else nullcontext():  # Triton's interpreter makes tensors
        scaler._ours.updates.settle()
    update(scaler, optimizer)
    with torch.inference_mode():
        assert scaler.stats().updates == 7
    assert scaler._get_growth_tracker() == 7


@KERNELS
def test_a_scaler_that_is_given_another_state_counts_from_there(place: Place) -> None:
    scaler = at(place)
    optimizer = good(scaler, 5)
    other = at(place)
    good(other, 2)
    scaler.__setstate__(other.__getstate__())
    scaler.scale(torch.ones((), device=place.device))
    for _ in range(3):
        update(scaler, optimizer)
    assert (scaler._get_growth_tracker(), scaler.stats().updates) == (5, 5)


# Whatever is done, in whatever order

SCALES = [1.0, 3.0, 64.0, 1024.0]  # two of them are no legal ones
programs = st.lists(
    st.one_of(
        st.sampled_from([*"....", "x", "fused", "unscale", "read", "stats", "repr", "load", "copy"]),
        st.sampled_from(["take", "expose", "tracker"]),
        st.tuples(st.sampled_from(["write", "write data", "replace", "set", "set bad"]), st.sampled_from(SCALES)),
        st.tuples(st.just("interval"), st.integers(1, 6)),
        st.tuples(st.just("limits"), st.sampled_from([(2.0, 1), (4.0, 2)])),
    ),
    min_size=4,
    max_size=30,
)


class Program:
    """A scaler and its optimizers, on which a program runs."""

    def __init__(self, place: Place, puts_off: bool) -> None:
        self.place, self.puts_off = place, puts_off
        self.plain, self.fused = (sgd([GOOD], place.device, fused=fused) for fused in (False, True))
        self.seen: list[Any] = []
        self.count = 0
        self.use(at(place, growth_interval=4, min_scale=2.0, max_scale=512.0))

    def use(self, scaler: Any) -> None:
        self.scaler = scaler
        if not self.puts_off:
            scaler._ours.updates.put_off.is_over = True

    def run(self, name: str, value: Any) -> None:
        scaler = self.scaler
        scaler.scale(torch.ones((), device=self.place.device))  # no step is carried over
        self.count += are_put_off(scaler)
        if name in (".", "x", "fused"):
            update(scaler, self.fused if name == "fused" else self.plain, bad=name == "x")
        elif name == "unscale":
            scaler.unscale_(self.plain)
            scaler.update()
        elif name in ("set", "set bad"):
            self.plain.param_groups[0]["params"][0].grad.copy_(BAD if name == "set bad" else GOOD)
            scaler.step(self.plain)
            scaler.update(min(max(value, 4.0), 512.0))
        elif name in ("write", "replace"):
            if name == "write":
                scaler._scale.fill_(value)
            else:
                scaler._scale = torch.full((), value, device=self.place.device)
        elif name == "write data":  # what is illegal is looked at by the next launch only
            scaler._scale.data.fill_(min(max(value, 4.0), 512.0))
        elif name == "interval":
            scaler.set_growth_interval(value)
        elif name == "limits":
            scaler.set_limits(min_scale=value[0], hysteresis=value[1])
        elif name == "load":
            scaler.load_state_dict({**scaler.state_dict(), "scale": 16.0})
        elif name == "copy":
            self.use(copy.deepcopy(scaler))
            self.scaler.scale(torch.ones((), device=self.place.device))
        elif name == "tracker":
            scaler._growth_tracker.fill_(2)
        elif name == "expose":
            assert scaler._per_optimizer_states is not None
        self.look(name)

    def look(self, name: str) -> None:
        scaler = self.scaler
        self.seen.append(scaler.get_scale())
        if name == "read":
            self.seen.append(scaler._get_growth_tracker())
        elif name == "stats":
            self.seen.append(scaler.stats())
        elif name == "repr":
            self.seen.append(repr(scaler))
        elif name == "take":
            self.seen.append(scaler._growth_tracker.item())


@KERNELS
@given(programs)
@example([*"......x...", ("interval", 3), *"....", "stats"])
@example([*"....", ("write", 1.0), *"..", "read"])
@example([*"...", ("limits", (4.0, 2)), *"x.x...", "copy", *"....", "tracker", *"..."])
@settings(max_examples=40, deadline=None)
def test_it_is_as_if_each_update_was_launched(place: Place, program: list[Any]) -> None:
    with mock.patch.object(put_off, "LEAST_INTERVAL", 1):
        ends = []
        for puts_off in (True, False):
            run = Program(place, puts_off)
            for each in program:
                run.run(*each) if isinstance(each, tuple) else run.run(each, None)
            state = {**run.scaler.state_dict(), "stats": run.scaler.stats()}
            ends.append(repr([run.seen, state, run.plain.param_groups, run.fused.param_groups]))
            assert puts_off or not run.count
    assert ends[0] == ends[1]
