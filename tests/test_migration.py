"""States of Megatron's and DeepSpeed's scalers go on in ours as they would have gone on there."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import started, update
from megatron_rule import Megatron
from page_blocks import blocks

from scaler_triton import GradScaler, ShardedGradScaler
from scaler_triton.limits import KEY
from scaler_triton.migration import from_deepspeed, from_megatron
from scaler_triton.stats import NAMES


class DeepSpeed:
    """The rule of deepspeed/runtime/fp16/loss_scaler.py and its attributes, told anew."""

    def __init__(self, scale: float, window: int, shift: int, min_scale: float, consecutive: bool = False) -> None:
        self.dynamic, self.raise_error_at_min_scale = True, False
        self.cur_scale, self.scale_factor, self.min_scale = scale, 2.0, min_scale
        self.scale_window, self.delayed_shift, self.consecutive_hysteresis = window, shift, consecutive
        self.cur_iter, self.last_overflow_iter, self.cur_hysteresis = 0, -1, shift

    def update(self, bad: bool) -> float:
        if bad:
            if self.cur_hysteresis > 1:
                self.cur_hysteresis -= 1
            else:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            good = self.cur_iter - self.last_overflow_iter - 1
            if good > 0 and good % self.scale_window == 0:
                self.cur_hysteresis, self.cur_scale = self.delayed_shift, self.cur_scale * self.scale_factor
        self.cur_iter += 1
        return self.cur_scale

    def ours(self) -> dict[str, Any]:
        return from_deepspeed(vars(self))

    def in_step(self) -> bool:
        """Whether ours will grow at the same update: not with nothing but overflows before."""
        return self.cur_iter - self.last_overflow_iter - 1 > 0


RUNS = [
    Megatron(64.0, 3, 1, 8.0),
    Megatron(64.0, 2, 3, 8.0),
    DeepSpeed(64.0, 3, 1, 8.0),
    DeepSpeed(64.0, 2, 3, 8.0),
    DeepSpeed(64.0, 3, 2, 8.0, consecutive=True),
]
IDS = ["megatron", "megatron-hysteresis", "deepspeed", "deepspeed-hysteresis", "deepspeed-consecutive"]


@pytest.mark.parametrize("run", RUNS, ids=IDS)
@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
def test_a_run_goes_on_as_it_would_have(run: Any, cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it changes over: until a first growth after an overflow, which DeepSpeed has a step later."""
    monkeypatch.setattr(cls, "_is_sharded", False)  # nobody else is here to agree with
    run, draw = copy.deepcopy(run), torch.Generator().manual_seed(3)
    grown = 0
    for bad in (torch.rand(40, generator=draw) < 0.3).tolist():
        theirs, scaler = copy.deepcopy(run), started(cls, "cpu")
        scaler.load_state_dict(run.ours())
        assert scaler.get_scale() == (run.scale if isinstance(run, Megatron) else run.cur_scale)
        for later in [True] * 2 if not run.in_step() else [False] * 7 + [True, False] * 3 + [True] * 3:
            before = scaler.get_scale()
            assert update(scaler, later) == theirs.update(later)
            grown += scaler.get_scale() > before
        run.update(bad)
    assert grown > 20


def test_deepspeed_grows_one_step_later_after_an_overflow() -> None:
    """As docs/checkpoints.md says: the one thing that is not carried over."""
    run, scaler = DeepSpeed(64.0, 3, 1, 1.0), started(GradScaler, "cpu")
    run.update(True)
    scaler.load_state_dict(run.ours())
    assert [run.update(False) for _ in range(7)] == [32, 32, 32, 64, 64, 64, 128]
    assert [update(scaler, False) for _ in range(7)] == [32, 32, 64, 64, 64, 128, 128]


def test_megatrons_state() -> None:
    state = {"scale": torch.tensor([2.0**32]), "growth_tracker": 7, "hysteresis_tracker": -3}
    ours = from_megatron(state, growth_interval=1000, hysteresis=2, min_scale=1.0)
    assert ours == {
        "scale": 2.0**32,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 1000,
        "_growth_tracker": 7,
        KEY: {
            "min_scale": 1.0,
            "max_scale": torch.finfo(torch.float32).max,
            "hysteresis": 2,
            "consecutive_hysteresis": False,
            "max_consecutive_skips": None,
            "counters": {**dict.fromkeys(NAMES, 0), "strikes": 5},
        },
    }
    assert_plain(ours)
    other = from_megatron(state, growth_interval=9, hysteresis=2, min_scale=1.0, growth_factor=4, backoff_factor=0.25)
    assert (other["growth_factor"], other["backoff_factor"]) == (4.0, 0.25)


def assert_plain(state: dict[str, Any]) -> None:
    for value in state.values():
        if isinstance(value, dict):
            assert_plain(value)
        else:
            assert value is None or type(value) in (int, float, bool)


def test_deepspeeds_optimizer_saves_less_and_has_no_hysteresis() -> None:
    saved = {
        "dynamic_loss_scale": True,
        "cur_scale": 256.0,
        "cur_iter": 25,
        "last_overflow_iter": 4,
        "scale_factor": 2.0,
        "scale_window": 8,
        "optimizer_state_dict": object(),
    }
    config = {"min_scale": 1, "delayed_shift": 2, "consecutive_hysteresis": True}  # of which it uses only the first
    ours = from_deepspeed({**saved, **config})
    assert (ours["scale"], ours["growth_interval"], ours["_growth_tracker"]) == (256.0, 8, 3)
    assert (ours[KEY]["min_scale"], ours[KEY]["hysteresis"], ours[KEY]["consecutive_hysteresis"]) == (1.0, 1, False)
    assert_plain(ours)
    assert from_deepspeed({**saved, "min_scale": 1}) == ours
    with pytest.raises(KeyError, match="^'min_scale'$"):
        from_deepspeed(saved)
    by_four = from_deepspeed({**saved, **config, "scale_factor": 4.0})
    assert (by_four["growth_factor"], by_four["backoff_factor"]) == (4.0, 0.25)


@pytest.mark.parametrize("name", ["dynamic", "dynamic_loss_scale"])
def test_a_static_scale_stays(name: str) -> None:
    scaler = started(GradScaler, "cpu", growth_interval=1)
    scaler.load_state_dict(from_deepspeed({"cur_scale": 128, name: False}))
    assert [update(scaler, bad) for bad in (False, True, True, False)] == [128.0] * 4


MEGATRON: dict[str, Any] = Megatron(64.0, 3, 2, 8.0).state()
DEEPSPEED: dict[str, Any] = vars(DeepSpeed(64.0, 3, 2, 8.0))
NUMBERS: dict[str, Any] = {"growth_interval": 3, "hysteresis": 2, "min_scale": 8.0}


@pytest.mark.parametrize("field", MEGATRON)
def test_a_field_that_megatron_lacks_is_named(field: str) -> None:
    with pytest.raises(KeyError, match=f"^'{field}'$"):
        from_megatron({name: value for name, value in MEGATRON.items() if name != field}, **NUMBERS)


@pytest.mark.parametrize("field", sorted(set(DEEPSPEED) - {"raise_error_at_min_scale", "dynamic"}))
def test_a_field_that_deepspeed_lacks_is_named(field: str) -> None:
    with pytest.raises(KeyError, match=f"^'{field}'$"):
        from_deepspeed({name: value for name, value in DEEPSPEED.items() if name != field})


def test_whether_deepspeeds_scale_is_dynamic_must_be_told() -> None:
    with pytest.raises(KeyError, match="^'dynamic_loss_scale'$"):
        from_deepspeed({name: value for name, value in DEEPSPEED.items() if name != "dynamic"})


MEGATRON_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"scale": 0.0}, ValueError, "scale must be a positive finite fp32 number .*, got 0.0"),
    ({"scale": torch.tensor([math.nan])}, ValueError, "scale must be .*, got nan"),
    ({"scale": torch.ones(2)}, ValueError, r"scale must be one number, got a tensor of shape \(2,\)"),
    ({"scale": "8"}, TypeError, "scale must be a number, got '8'"),
    ({"growth_tracker": -1}, ValueError, "growth_tracker must be .*, got -1"),
    ({"growth_tracker": 1.5}, TypeError, "growth_tracker must be an int, got 1.5"),
    ({"hysteresis_tracker": 3}, ValueError, "hysteresis_tracker must be at most hysteresis=2, got 3"),
    ({"hysteresis_tracker": 0.5}, TypeError, "hysteresis_tracker must be an int, got 0.5"),
    ({"hysteresis_tracker": True}, TypeError, "hysteresis_tracker must be an int, got True"),
]


@pytest.mark.parametrize(("wrong", "error", "text"), MEGATRON_ERRORS)
def test_a_wrong_field_of_megatrons_is_named(wrong: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{text}$"):
        from_megatron({**MEGATRON, **wrong}, **NUMBERS)


@pytest.mark.parametrize(
    ("name", "value"),
    [("growth_interval", 0), ("hysteresis", 0), ("min_scale", 0.0), ("growth_factor", 0.5), ("backoff_factor", 2.0)],
)
def test_a_wrong_number_of_megatrons_run_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be .*, got {value}"):
        from_megatron(MEGATRON, **{**NUMBERS, name: value})


DEEPSPEED_ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cur_scale": math.inf}, ValueError, "cur_scale must be .*, got inf"),
    ({"dynamic": 1}, TypeError, "dynamic must be True or False, got 1"),
    ({"scale_factor": 0.5}, ValueError, "scale_factor must be finite and >= 1, got 0.5"),
    ({"scale_window": 0}, ValueError, "scale_window must be .*, got 0"),
    ({"delayed_shift": 0}, ValueError, "delayed_shift must be .*, got 0"),
    ({"cur_hysteresis": 0}, ValueError, "cur_hysteresis must be .*, got 0"),
    ({"cur_hysteresis": 3}, ValueError, "cur_hysteresis must be at most delayed_shift=2, got 3"),
    ({"consecutive_hysteresis": 0}, TypeError, "consecutive_hysteresis must be True or False, got 0"),
    ({"min_scale": -1.0}, ValueError, "min_scale must be .*, got -1.0"),
    ({"cur_iter": -1}, ValueError, "cur_iter must be .*, got -1"),
    ({"cur_iter": 4, "last_overflow_iter": 4}, ValueError, "last_overflow_iter must be .*, got 4 and cur_iter=4"),
    ({"last_overflow_iter": -2}, ValueError, "last_overflow_iter must be .*, got -2 and cur_iter=0"),
    ({"last_overflow_iter": None}, TypeError, "last_overflow_iter must be an int, got None"),
]


@pytest.mark.parametrize(("wrong", "error", "text"), DEEPSPEED_ERRORS)
def test_a_wrong_field_of_deepspeeds_is_named(wrong: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{text}$"):
        from_deepspeed({**DEEPSPEED, **wrong})


def test_an_object_is_no_state() -> None:
    """Its attributes are: nothing of another library's is run here."""
    with pytest.raises(TypeError, match=r"^state must be a dict, such as vars\(\) of an object, got DeepSpeed$"):
        from_deepspeed(RUNS[2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^state must be a dict"):
        from_megatron([], **NUMBERS)  # type: ignore[arg-type]


def test_the_page_on_checkpoints() -> None:
    """Its programs run, and leave the scaler with what they were given."""
    optimizer = {"dynamic_loss_scale": True, **{name: DEEPSPEED[name] for name in ("scale_factor", "scale_window")}}
    optimizer |= {"cur_scale": 128.0, "cur_iter": 9, "last_overflow_iter": 3}
    names: dict[str, Any] = {
        "checkpoint": {"optimizer": {"grad_scaler": MEGATRON}},
        "args": SimpleNamespace(loss_scale_window=1000.0, hysteresis=2, min_loss_scale=1.0),
        "optimizer_state": {"loss_scaler": RUNS[3], **optimizer},
    }
    scales = []
    for block in blocks("docs/checkpoints.md"):
        names["scaler"] = GradScaler("cpu")
        exec(block, names)
        scales.append((names["scaler"].get_scale(), names["scaler"].get_growth_interval()))
    assert scales == [(64.0, 1000), (64.0, 2), (128.0, 3)]


def test_what_was_given_is_left_as_it_was() -> None:
    for function, state, more in ((from_megatron, MEGATRON, NUMBERS), (from_deepspeed, DEEPSPEED, {})):
        before = copy.deepcopy(state)
        function(state, **more)
        assert state == before
