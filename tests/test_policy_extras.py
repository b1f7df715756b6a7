"""Bounds, hysteresis and the limit of skips, as a scaler's arguments, setters and checkpoints."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import Place, places, sgd, started
from limits_setup import BAD, EVERYWHERE, GOOD, at, step, steps
from megatron_rule import Megatron
from scaler_triton.limits import KEY
from scaler_triton.stats import NAMES
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded

from scaler_triton import GradScaler, ShardedGradScaler, batch_ops

PAIRS = pytest.mark.parametrize(
    ("ours", "theirs"), [(GradScaler, torch.amp.GradScaler), (ShardedGradScaler, TorchSharded)]
)
EXTRAS: dict[str, Any] = {
    "min_scale": 2.0,
    "max_scale": 4096.0,
    "hysteresis": 3,
    "consecutive_hysteresis": True,
    "max_consecutive_skips": 7,
}
TINY, HUGE = 2.0**-126, torch.finfo(torch.float32).max


@EVERYWHERE
def test_hysteresis_is_megatrons(place: Place) -> None:
    draw = torch.Generator().manual_seed(0)
    bad = (torch.rand(120, generator=draw) < 0.45).tolist()
    rule = Megatron(64.0, 2, 3, 8.0)
    scaler = at(place, init_scale=64.0, growth_interval=2, hysteresis=3, min_scale=8.0)
    want = [rule.update(b) for b in bad]
    assert steps(scaler, [BAD if b else GOOD for b in bad], place.device) == want
    assert min(want) == 8.0
    assert max(want) > 64.0


@EVERYWHERE
def test_consecutive_hysteresis_is_deepspeeds(place: Place) -> None:
    scaler = at(place, init_scale=64.0, hysteresis=2, consecutive_hysteresis=True)
    gradients = [BAD, GOOD, BAD, GOOD, BAD, BAD, BAD]
    assert steps(scaler, gradients, place.device) == [64, 64, 64, 64, 64, 32, 16]


@EVERYWHERE
@pytest.mark.parametrize("consecutive", [False, True])
def test_an_update_to_a_number_counts_for_hysteresis_as_others_do(place: Place, consecutive: bool) -> None:
    scaler = at(place, init_scale=8.0, hysteresis=2, consecutive_hysteresis=consecutive, growth_interval=100)
    step(scaler, BAD, device=place.device)
    scaler.step(sgd([torch.tensor([GOOD])], place.device))
    scaler.update(8.0)
    assert step(scaler, BAD, device=place.device) == (8.0 if consecutive else 4.0)


@EVERYWHERE
def test_an_overflow_that_is_forgiven_still_skips_and_starts_the_tracker_anew(place: Place) -> None:
    scaler = at(place, init_scale=64.0, growth_interval=3, hysteresis=2)
    optimizer = sgd([torch.tensor([BAD])], place.device)
    steps(scaler, [GOOD, GOOD], place.device)
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.param_groups[0]["params"][0].item() == 0.0
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (64.0, 0)


@EVERYWHERE
def test_the_scale_is_clamped(place: Place) -> None:
    scaler = at(place, init_scale=64.0, growth_interval=1, min_scale=24.0, max_scale=100.0)
    assert steps(scaler, [GOOD, GOOD, BAD, BAD, BAD], place.device) == [100, 100, 50, 25, 24]
    scaler._scale.fill_(1e6)  # by hand: the next update takes it back
    assert step(scaler, BAD, device=place.device) == 100.0


@EVERYWHERE
def test_setters_take_effect_at_the_next_update(place: Place) -> None:
    scaler = at(place, init_scale=64.0)
    for name, value in (("hysteresis", 2), ("consecutive_hysteresis", True), ("max_consecutive_skips", 9)):
        getattr(scaler, f"set_{name}")(value)
        assert getattr(scaler, f"get_{name}")() == value
    assert steps(scaler, [BAD, BAD], place.device) == [64, 32]
    scaler.set_max_scale(16)
    assert scaler.get_scale() == 32.0
    assert step(scaler, GOOD, device=place.device) == 16.0
    scaler.set_min_scale(16)
    assert steps(scaler, [BAD] * 2, place.device) == [16, 16]
    assert (scaler.get_min_scale(), scaler.get_max_scale()) == (16.0, 16.0)


def test_a_hysteresis_set_later_counts_the_overflows_before() -> None:
    scaler = started(GradScaler, "cpu", init_scale=64.0, hysteresis=9)
    assert steps(scaler, [BAD] * 3) == [64] * 3
    scaler.set_hysteresis(4)
    assert step(scaler, BAD) == 32.0


def test_bounds_are_rounded_to_fp32_and_reached_exactly() -> None:
    scaler = started(GradScaler, "cpu", init_scale=1.0, min_scale=0.3, max_scale=1.7)
    bounds = scaler.get_min_scale(), scaler.get_max_scale()
    assert bounds == tuple(torch.tensor([0.3, 1.7]).tolist())
    assert steps(scaler, [BAD] * 4)[-1] == bounds[0]
    assert scaler.stats().backoffs == 2
    scaler.update(0.3)
    scaler.update(1.7)


BAD_NUMBERS: list[tuple[str, Any, type[Exception], str]] = [
    ("min_scale", 0.0, ValueError, "min_scale must be"),
    ("min_scale", math.nan, ValueError, "min_scale must be"),
    ("min_scale", "1", TypeError, "min_scale must be a number"),
    ("max_scale", math.inf, ValueError, "max_scale must be"),
    ("max_scale", 2.0**-127, ValueError, "max_scale must be"),
    ("hysteresis", 0, ValueError, r"hysteresis must be an int >= 1 \(overflows\)"),
    ("hysteresis", 1.5, TypeError, "hysteresis must be an int"),
    ("consecutive_hysteresis", 1, TypeError, "consecutive_hysteresis must be True or False"),
    ("max_consecutive_skips", -1, ValueError, "max_consecutive_skips must be None or an int >= 0"),
    ("max_consecutive_skips", 2.5, TypeError, "max_consecutive_skips must be an int"),
]


@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
@pytest.mark.parametrize(("name", "value", "error", "text"), BAD_NUMBERS)
def test_what_cannot_work_is_refused_by_name(
    cls: type, name: str, value: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"^{text}.*, got {value!r}"):
        cls("cpu", **{name: value})
    scaler = cls("cpu", **EXTRAS)
    before = scaler.state_dict()
    with pytest.raises(error, match=f"^new_.*, got {value!r}"):
        getattr(scaler, f"set_{name}")(value)
    broken = {**before, KEY: {**before[KEY], name: value}}
    with pytest.raises(error, match=f"^{text}.*, got {value!r}"):
        scaler.load_state_dict(broken)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("value", ["no", None, 1])
def test_check_unscaled_is_true_or_false(value: Any) -> None:
    with pytest.raises(TypeError, match=f"^check_unscaled must be True or False, got {value!r}$"):
        GradScaler("cpu", check_unscaled=value)


def test_bounds_that_leave_no_room_are_refused() -> None:
    text = r"^min_scale must be <= max_scale, got 8.0 and 4.0$"
    with pytest.raises(ValueError, match=text):
        GradScaler("cpu", min_scale=8, max_scale=4)
    scaler = GradScaler("cpu", init_scale=6.0, max_scale=8.0)
    with pytest.raises(ValueError, match=r"^min_scale must be <= max_scale, got 9.0 and 8.0$"):
        scaler.set_min_scale(9)
    assert scaler.get_min_scale() == TINY


def test_the_first_scale_is_clamped_and_a_new_one_beyond_the_bounds_is_refused() -> None:
    assert GradScaler("cpu", init_scale=1.0, min_scale=2).get_scale() == 2.0
    scaler = started(GradScaler, "cpu", min_scale=2, max_scale=4096)
    assert scaler.get_scale() == 4096.0
    for wrong in (1.0, torch.tensor(8192.0)):
        with pytest.raises(ValueError, match=r"^new_scale must be in \[min_scale, max_scale\], \[2.0, 4096.0\], got "):
            scaler.update(wrong)
    assert scaler.get_scale() == 4096.0


def test_a_disabled_scaler_takes_anything() -> None:
    scaler = GradScaler("cpu", enabled=False, min_scale=-1.0, max_scale=-2.0, hysteresis=0, max_consecutive_skips=-5)
    assert scaler.state_dict() == {}
    assert scaler.get_hysteresis() == 1


@PAIRS
def test_checkpoints_have_one_more_key_only_when_an_extra_is_on(ours: type, theirs: type) -> None:
    plain = set(theirs("cpu").state_dict())
    assert set(ours("cpu").state_dict()) == plain
    assert set(ours("cpu", min_scale=TINY, max_scale=HUGE).state_dict()) == plain  # these are no limits
    for name, value in EXTRAS.items():
        scaler = ours("cpu", init_scale=64.0, **{name: value})
        assert set(scaler.state_dict()) == {*plain, KEY}
    getattr(scaler, f"set_{name}")(None)
    assert set(scaler.state_dict()) == plain


@PAIRS
def test_checkpoints_go_both_ways(ours: type, theirs: type) -> None:
    scaler = ours("cpu", init_scale=64.0, **EXTRAS)
    saved = scaler.state_dict()
    other = ours("cpu")
    other.load_state_dict(copy.deepcopy(saved))
    assert other.state_dict() == saved
    for name, value in EXTRAS.items():
        assert getattr(other, f"get_{name}")() == value
    torchs = theirs("cpu")
    torchs.load_state_dict(saved)
    assert torchs.state_dict() == {name: value for name, value in saved.items() if name != KEY}
    other.load_state_dict(theirs("cpu", init_scale=8.0).state_dict())  # no key: limits stay
    assert other.get_scale() == 8.0
    assert other.get_hysteresis() == 3


def test_a_checkpoint_is_plain_data_that_torch_loads_safely(tmp_path: Any) -> None:
    scaler = started(GradScaler, "cpu", init_scale=64.0, **EXTRAS)
    steps(scaler, [BAD, GOOD])
    torch.save(scaler.state_dict(), tmp_path / "scaler.pt")
    other = GradScaler("cpu")
    other.load_state_dict(torch.load(tmp_path / "scaler.pt", weights_only=True))
    assert other.state_dict() == scaler.state_dict()


@EVERYWHERE
def test_a_resumed_run_is_the_uninterrupted_one(place: Place) -> None:
    gradients = [BAD, BAD, GOOD, BAD, GOOD, GOOD, BAD, BAD, BAD, GOOD]
    make: Any = {"init_scale": 64.0, "growth_interval": 2, "hysteresis": 3}
    whole = at(place, **make)
    want = steps(whole, gradients, place.device)
    for stop in range(1, len(gradients)):
        first, second = at(place, **make), at(place)
        head = steps(first, gradients[:stop], place.device)
        steps(second, [BAD], place.device)  # what it counted is forgotten
        second.load_state_dict(first.state_dict())
        assert head + steps(second, gradients[stop:], place.device) == want
        assert second.stats() == whole.stats()


@pytest.mark.parametrize("place", [place for place in places() if place.backend == "triton"], ids=str)
def test_loading_writes_the_counters_where_a_graph_counts(place: Place) -> None:
    scaler = at(place, hysteresis=2)
    saved = scaler.state_dict()
    step(scaler, BAD, device=scaler._device)
    tensor = scaler._counters.storage()
    scaler.load_state_dict(saved)
    assert scaler._counters.storage() is tensor
    assert tensor.tolist() == [0] * len(NAMES)


CHANGES: list[tuple[str, Any]] = [
    *(("growth_factor", 8.0), ("backoff_factor", 0.25), ("growth_interval", 3)),
    *(("min_scale", 60.0), ("max_scale", 80.0), ("hysteresis", 2)),
]


@pytest.mark.parametrize("place", [place for place in places() if place.backend == "triton"], ids=str)
@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_a_graph_updates_by_the_numbers_that_were_loaded(place: Place, name: str, value: Any) -> None:
    """A replay is what an update launched, launched again."""
    numbers = {"init_scale": 64.0, "growth_interval": 1}
    scaler, other = at(place, **numbers), at(place, **{**numbers, name: value})
    module = batch_ops.kernels().update_scale
    with mock.patch.object(module, "launch_update_rows", wraps=module.launch_update_rows) as launched:
        step(scaler, GOOD, device=place.device)
    launch = launched.call_args
    scaler.load_state_dict(other.state_dict())
    replayed = []
    for gradient in (GOOD, BAD, BAD):
        launch.args[2][:, 0] = float(gradient == BAD)  # the flags of all optimizers
        module.launch_update_rows(*launch.args, **launch.kwargs)
        replayed.append(scaler.get_scale())
    assert replayed == steps(other, (GOOD, BAD, BAD), place.device)


@pytest.mark.parametrize("name", [*NAMES, None])
def test_a_checkpoint_with_wrong_counters_changes_nothing(name: str | None) -> None:
    scaler = started(GradScaler, "cpu", **{**EXTRAS, "init_scale": 64.0})
    step(scaler, BAD)
    before = scaler.state_dict()
    counters = before[KEY]["counters"]
    wrong: list[tuple[Any, type[Exception], str]] = [({}, KeyError, f"^'{name or NAMES[0]}'$"), (3, TypeError, "dict")]
    if name is not None:
        wrong += [
            ({**counters, name: -1}, ValueError, f"^{name} must be .*, got -1$"),
            ({**counters, name: 0.5}, TypeError, f"^{name} must be an int, got 0.5$"),
        ]
        wrong[0] = ({key: count for key, count in counters.items() if key != name}, KeyError, f"^'{name}'$")
    for value, error, text in wrong:
        with pytest.raises(error, match=text):
            scaler.load_state_dict({**before, "scale": 2.0, KEY: {**before[KEY], "counters": value}})
        assert scaler.state_dict() == before


@pytest.mark.parametrize("field", [*EXTRAS, "counters"])
def test_a_checkpoint_without_a_field_is_a_keyerror_and_changes_nothing(field: str) -> None:
    scaler = GradScaler("cpu", **{**EXTRAS, "init_scale": 64.0})
    before = scaler.state_dict()
    rest = {name: value for name, value in before[KEY].items() if name != field}
    with pytest.raises(KeyError, match=f"^'{field}'$"):
        scaler.load_state_dict({**before, "scale": 2.0, KEY: rest})
    with pytest.raises(TypeError, match="^scaler_triton must be a dict, got 3$"):
        scaler.load_state_dict({**before, "scale": 2.0, KEY: 3})
    assert scaler.state_dict() == before


@EVERYWHERE
@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_keep_limits_and_count_for_themselves(place: Place, clone: Any) -> None:
    scaler = at(place, **{**EXTRAS, "init_scale": 64.0, "hysteresis": 2})
    step(scaler, BAD, device=place.device)
    copied = clone(scaler)
    assert copied.state_dict() == scaler.state_dict()
    copied.scale(torch.ones((), device=place.device))
    assert step(copied, BAD, device=place.device) == 32.0
    assert (scaler.stats().skipped, copied.stats().skipped) == (1, 2)
