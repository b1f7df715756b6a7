"""Every number of a scaler: what is refused by its name, in the constructor, the setters and checkpoints."""

import math
import re
from typing import Any

import pytest
import torch
from helpers import started

from scaler_triton import GradScaler, ShardedGradScaler, StepGuard, policy
from scaler_triton.policy import KEY, NO_LIMITS, Limits

EXTRAS: dict[str, Any] = {"min_scale": 2.0, "max_scale": 4096.0, "hysteresis": 3, "max_consecutive_skips": 7}
SHARED = [GradScaler, ShardedGradScaler]

# Field, value, error, and the text behind the field.
WRONG: list[tuple[str, Any, type[Exception], str]] = [
    *(("scale", value, ValueError, "must be a positive finite fp32 number") for value in (0.0, -1.0, math.nan, 1e39)),
    ("scale", 10**400, ValueError, "must be a positive finite fp32 number"),  # beyond every float
    ("scale", "64", TypeError, "must be a number"),
    ("scale", torch.ones(2), TypeError, "must be a number"),
    *(("growth_factor", value, ValueError, "must be finite and >= 1") for value in (0.5, math.inf, math.nan)),
    *(("growth_factor", value, ValueError, "must be finite and >= 1") for value in (10**400, -(10**400))),
    ("growth_factor", None, TypeError, "must be a number"),
    *(("backoff_factor", value, ValueError, r"must be in \(0, 1\]") for value in (0.0, 1.5, math.nan)),
    ("backoff_factor", b"1", TypeError, "must be a number"),
    *(("growth_interval", value, ValueError, r"must be an int >= 1 \(steps\)") for value in (0, -1, 2**63)),
    *(("growth_interval", value, TypeError, "must be an int") for value in (2.0, "2", None)),
    *(("_growth_tracker", value, ValueError, "must be an int in") for value in (-1, 2**31)),
    *(("_growth_tracker", value, TypeError, "must be an int") for value in (2.5, "2")),
    *(("min_scale", value, ValueError, "must be a positive finite") for value in (0.0, math.nan, 2.0**-127)),
    *(("max_scale", value, ValueError, "must be a positive finite") for value in (math.inf, 2.0**-127)),
    *((bound, "1", TypeError, "must be a number") for bound in ("min_scale", "max_scale")),
    *(("hysteresis", value, ValueError, r"must be an int >= 1 \(overflows\)") for value in (0, 2**63)),
    *(("hysteresis", value, TypeError, "must be an int") for value in (1.5, None)),
    ("max_consecutive_skips", -1, ValueError, r"must be None or an int >= 0 \(updates\)"),
    ("max_consecutive_skips", 2.5, TypeError, "must be an int"),
]
ARGUMENTS = [
    *(each for each in WRONG if each[0][0] != "_"),
    ("scale_policy", "measure", ValueError, "must be 'probe' or 'headroom'"),
    ("headroom_bits", -1, ValueError, r"must be an int in \[0, 30\]"),
    ("headroom_bits", 1.5, TypeError, "must be an int"),
    ("headroom_window", 0, ValueError, r"must be an int in \[1, 1024\]"),
    ("measure", 1, TypeError, "must be True or False"),
]


@pytest.mark.parametrize("cls", SHARED)
@pytest.mark.parametrize(("field", "value", "error", "text"), ARGUMENTS)
def test_2_the_constructor_names_what_is_wrong(cls: Any, field: str, value: Any, error: Any, text: str) -> None:
    name = "init_scale" if field == "scale" else field
    with pytest.raises((error, AssertionError)) as caught:
        cls("cpu", **{name: value})
    if caught.type is AssertionError:  # torch's, for factors on the wrong side of 1
        assert field.endswith("factor")
    else:
        caught.match(f"^{name} {text}.*, got {re.escape(repr(value))}$")
    with pytest.raises(ValueError, match="init_scale='measured' needs scale_policy='headroom'"):
        cls("cpu", init_scale="measured")


@pytest.mark.parametrize(("field", "value", "error", "text"), WRONG)
def test_2_a_setter_names_what_is_wrong_and_changes_nothing(field: str, value: Any, error: Any, text: str) -> None:
    scaler = GradScaler("cpu", **EXTRAS)
    before = scaler.state_dict()
    if field in EXTRAS:
        with pytest.raises(error, match=f"^{field} {text}.*, got "):
            scaler.set_limits(**{**dict.fromkeys(EXTRAS, 5), field: value})
    elif hasattr(scaler, f"set_{field}"):
        with pytest.raises(error, match=f"^new_(factor|interval) {text}.*, got "):
            getattr(scaler, f"set_{field}")(value)
    assert scaler.state_dict() == before


@pytest.mark.parametrize(("field", "value", "error", "text"), WRONG)
def test_2_a_checkpoint_names_what_is_wrong_and_changes_nothing(field: str, value: Any, error: Any, text: str) -> None:
    scaler = GradScaler("cpu", **EXTRAS)
    before = scaler.state_dict()
    key = {**before[KEY], field: value} if field in EXTRAS else before[KEY]
    broken = {**before, "scale": 16.0, "growth_factor": 3.0, KEY: key, **({} if field in EXTRAS else {field: value})}
    with pytest.raises(error, match=f"^{field} {text}.*, got "):
        scaler.load_state_dict(broken)
    assert scaler.state_dict() == before


COUNTER, TORCHS = policy.COUNTER_NAMES[2], torch.amp.GradScaler("cpu").state_dict()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        *((lambda saved, name=name: saved.pop(name), KeyError, f"^'{name}'$") for name in TORCHS),
        *((lambda saved, name=name: saved[KEY].pop(name), KeyError, f"^'{name}'$") for name in [*EXTRAS, "counters"]),
        (lambda saved: saved.update({KEY: 3}), TypeError, "^scaler_triton must be a dict, got 3$"),
        (lambda saved: saved[KEY].update(counters=3), TypeError, "^counters must be a dict, got 3$"),
        (lambda saved: saved[KEY]["counters"].pop(COUNTER), KeyError, f"^'{COUNTER}'$"),
        (lambda saved: saved[KEY]["counters"].update({COUNTER: -1}), ValueError, f"^{COUNTER} must be .*, got -1$"),
        (lambda saved: saved[KEY]["counters"].update({COUNTER: 0.5}), TypeError, f"^{COUNTER} must be an int, got 0.5"),
        (dict.clear, RuntimeError, "^The source state dict is empty"),
    ],
)
def test_a_checkpoint_without_a_field_is_refused_and_changes_nothing(change: Any, error: Any, text: str) -> None:
    scaler, broken = GradScaler("cpu", **EXTRAS), GradScaler("cpu", 16.0, 3.0, **EXTRAS).state_dict()
    before = scaler.state_dict()
    change(broken)
    with pytest.raises(error, match=text):
        scaler.load_state_dict(broken)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, GradScaler])
def test_a_guard_takes_no_scale_of_a_scalers_checkpoint(cls: Any) -> None:
    guard = StepGuard("cpu")
    guard.load_state_dict(cls("cpu", 16.0).state_dict())
    assert guard.state_dict()["scale"] == guard._init_scale == 1.0


def test_a_checkpoint_that_is_no_dict_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^state_dict must be a dict, got \[3\]$"):
        GradScaler("cpu").load_state_dict([3])  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", SHARED)
@pytest.mark.parametrize("name", ["growth_interval", "hysteresis", "max_consecutive_skips"])
def test_true_is_held_as_1(cls: Any, name: str) -> None:
    scaler = cls("cpu", **{name: True})
    assert repr(scaler.get_growth_interval() if name == "growth_interval" else getattr(scaler.limits, name)) == "1"


def test_limits_change_by_name_and_none_is_the_widest_bound() -> None:
    limits = NO_LIMITS.changed(**EXTRAS)
    assert limits == Limits(2.0, 4096.0, 3, 7)
    assert limits.changed(hysteresis=1) == Limits(2.0, 4096.0, 1, 7)
    assert limits.changed(min_scale=None, max_scale=None, hysteresis=1, max_consecutive_skips=None) == NO_LIMITS


def test_bounds_are_fp32_numbers_within_which_a_scale_is_brought() -> None:
    limits = NO_LIMITS.changed(min_scale=0.3, max_scale=1.7)
    assert (limits.min_scale, limits.max_scale) == tuple(torch.tensor([0.3, 1.7]).tolist())
    assert [limits.clamp(scale) for scale in (0.1, 1.0, 9.0)] == [limits.min_scale, 1.0, limits.max_scale]
    scaler = started(GradScaler, "cpu", min_scale=0.3, max_scale=1.7)
    for bound in (0.3, 1.7):
        scaler.update(bound)


@pytest.mark.parametrize("make", [lambda **limits: GradScaler("cpu", **limits), NO_LIMITS.changed])
def test_bounds_that_leave_no_room_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"^min_scale must be <= max_scale, got 8.0 and 4.0$"):
        make(min_scale=8, max_scale=4)


def test_an_unknown_limit_is_named_beside_the_known_ones() -> None:
    text = "^set_limits takes min_scale, max_scale, hysteresis, max_consecutive_skips, got floor, min$"
    with pytest.raises(TypeError, match=text):
        GradScaler("cpu").set_limits(min=3, floor=2, hysteresis=2)
