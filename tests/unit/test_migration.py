"""States of other libraries' scalers go on in ours as they would have gone on there: docs/checkpoints.md's tables."""

import copy
import functools
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from helpers import started, update

from scaler_triton import GradScaler
from scaler_triton.integrations.migration import from_deepspeed, from_megatron


class Megatron:
    """The rule of megatron/core/optimizer/grad_scaler.py: a count that runs down to zero."""

    def __init__(self, scale: float, window: int, hysteresis: int, min_scale: float) -> None:
        self.scale, self.window, self.hysteresis, self.min_scale = scale, window, hysteresis, min_scale
        self.good, self.left = 0, hysteresis

    def update(self, bad: bool) -> float:
        self.good = 0 if bad else self.good + 1
        if bad:
            self.left -= 1
            self.scale = max(self.scale / 2, self.min_scale) if self.left <= 0 else self.scale
        elif self.good == self.window:
            self.good, self.left, self.scale = 0, self.hysteresis, self.scale * 2
        return self.scale

    def ours(self) -> dict[str, Any]:
        state = {"scale": torch.tensor([self.scale]), "growth_tracker": self.good, "hysteresis_tracker": self.left}
        return from_megatron(state, growth_interval=self.window, hysteresis=self.hysteresis, min_scale=self.min_scale)

    def in_step(self) -> bool:  # whether ours will grow at the same update
        return True


class DeepSpeed:
    """The rule and the attributes of deepspeed/runtime/fp16/loss_scaler.py."""

    def __init__(self, scale: float, window: int, shift: int, min_scale: float) -> None:
        self.dynamic, self.cur_scale, self.scale_factor, self.min_scale = True, scale, 2.0, min_scale
        self.scale_window, self.delayed_shift, self.consecutive_hysteresis = window, shift, False
        self.cur_iter, self.last_overflow_iter, self.cur_hysteresis = 0, -1, shift

    def update(self, bad: bool) -> float:
        good = self.cur_iter - self.last_overflow_iter - 1
        if bad:
            if self.cur_hysteresis > 1:
                self.cur_hysteresis -= 1
            else:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            self.last_overflow_iter = self.cur_iter
        elif good > 0 and good % self.scale_window == 0:
            self.cur_hysteresis, self.cur_scale = self.delayed_shift, self.cur_scale * self.scale_factor
        self.cur_iter += 1
        return self.cur_scale

    def ours(self) -> dict[str, Any]:
        return from_deepspeed(vars(self))

    def in_step(self) -> bool:
        return self.cur_iter - self.last_overflow_iter - 1 > 0


def loaded(state: dict[str, Any], **limits: Any) -> Any:
    scaler = started(GradScaler, "cpu", **limits)
    scaler.load_state_dict(state)
    return scaler


@pytest.mark.parametrize("cls", [Megatron, DeepSpeed])
@pytest.mark.parametrize(("window", "hysteresis"), [(3, 1), (2, 3)])
def test_a_run_goes_on_as_it_would_have(cls: Any, window: int, hysteresis: int) -> None:
    """Whenever it changes over: until the first growth after an overflow, which DeepSpeed has a step later."""
    run, draw, grown = cls(64.0, window, hysteresis, 8.0), torch.Generator().manual_seed(3), 0
    for bad in (torch.rand(40, generator=draw) < 0.3).tolist():
        theirs, scaler = copy.deepcopy(run), loaded(run.ours())
        for later in [True] * 2 if not run.in_step() else [False] * 7 + [True, False] * 3 + [True] * 3:
            before = scaler.get_scale()
            assert update(scaler, later) == theirs.update(later)
            grown += scaler.get_scale() > before
        run.update(bad)
    assert grown > 20


def test_deepspeed_grows_a_good_step_later_from_a_fresh_start_and_after_an_overflow() -> None:
    run, steps, ours = DeepSpeed(64.0, 4, 1, 1.0), [], []
    for overflows in (False, False, True):  # from the start, after a growth, after an overflow
        if overflows:
            run.update(True)
        scaler, before = loaded(run.ours()), run.cur_scale
        ours.append(1 + [update(scaler, False) > before for _ in range(5)].index(True))
        steps.append(1)
        while run.update(False) == before:
            steps[-1] += 1
    assert (steps, ours) == ([5, 4, 5], [4, 4, 4])


def test_states_are_plain_numbers_and_what_was_given_is_left_as_it_was() -> None:
    state = {"scale": torch.tensor([2.0**32]), "growth_tracker": 7, "hysteresis_tracker": -3}
    before = copy.deepcopy(state)
    numbers = {"growth_interval": 9, "hysteresis": 2, "min_scale": 1.0, "growth_factor": 4.0, "backoff_factor": 0.25}
    ours = from_megatron(state, **numbers)  # type: ignore[arg-type]
    torchs = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
    assert [ours[name] for name in torchs] == [2.0**32, 4.0, 0.25, 9, 7]
    extra = next(value for name, value in ours.items() if name not in torchs)
    assert (extra["min_scale"], extra["hysteresis"], extra["counters"]["strikes"]) == (1.0, 2, 5)
    plain = {*map(type, ours.values()), *map(type, extra.values()), *map(type, extra["counters"].values())}
    assert plain <= {int, float, bool, dict, type(None)}
    assert state == before


def test_deepspeeds_fp16_optimizer_saves_less_and_a_static_scale_stays() -> None:
    saved: dict[str, Any] = {"dynamic_loss_scale": True, "cur_scale": 256.0, "cur_iter": 25, "last_overflow_iter": 4}
    saved |= {"scale_factor": 4.0, "scale_window": 8, "min_scale": 1, "optimizer_state_dict": object()}
    ours = from_deepspeed({**saved, "delayed_shift": 2, "consecutive_hysteresis": True})  # which it does not use
    assert ours == from_deepspeed(saved)
    assert [ours[name] for name in ("scale", "growth_interval", "_growth_tracker")] == [256.0, 8, 3]
    assert (ours["growth_factor"], ours["backoff_factor"]) == (4.0, 0.25)
    for name in ("dynamic", "dynamic_loss_scale"):
        scaler = loaded(from_deepspeed({"cur_scale": 128, name: False}))
        assert [update(scaler, bad) for bad in (False, True, True, False)] == [128.0] * 4


# From other libraries: the rule of each one's scale, and what the page's table takes from its state


class Counts:
    """Keras' rule, and jmp's, MindSpore's DynamicLossScaler's and Paddle's: good steps in a row are counted."""

    floor = 0.0
    limits: ClassVar[dict[str, Any]] = {}

    def __init__(self, scale: float, window: int) -> None:
        self.scale, self.window, self.count = scale, window, 0

    def update(self, bad: bool) -> float:
        self.count = 0 if bad else (self.count + 1) % self.window
        self.scale = max(self.scale / 2, self.floor) if bad else self.scale * (1 if self.count else 2)
        return self.scale

    def ours(self) -> dict[str, Any]:
        return {"scale": self.scale, "growth_interval": self.window, "_growth_tracker": self.count}

    def resumed(self) -> Any:
        return copy.copy(self)


class FloorOfOne(Counts):
    """jmp's and MindSpore's, and Paddle's in a static graph."""

    floor, limits = 1.0, {"min_scale": 1.0}


class Flax(Counts):
    """The step after `growth_interval` good ones lets the scale grow, if it is good, too."""

    def update(self, bad: bool) -> float:
        grows = self.count == self.window and not bad
        self.scale *= 0.5 if bad else 2.0 if grows else 1.0
        self.count = 0 if bad or grows else self.count + 1
        return self.scale

    def ours(self) -> dict[str, Any]:
        return {**super().ours(), "growth_interval": self.window + 1}


class MindSporeManager(FloorOfOne):
    """All steps are counted, from 1, and the last overflow is remembered."""

    done, last = 1, 0

    def update(self, bad: bool) -> float:
        if bad:
            self.scale, self.last = max(self.scale / 2, self.floor), self.done
        elif (self.done - self.last) % self.window == 0:
            self.scale *= 2
        self.done += 1
        return self.scale

    def ours(self) -> dict[str, Any]:
        return {**super().ours(), "_growth_tracker": (self.done - self.last - 1) % self.window}


class Fairseq(Counts):
    """Only the scale is saved: a resumed run counts from 0."""

    def resumed(self) -> Any:
        return type(self)(self.scale, self.window)

    def ours(self) -> dict[str, Any]:
        return {"scale": self.scale, "growth_interval": self.window, "_growth_tracker": 0}


class ColossalAI(Fairseq):
    """As Megatron's: from the second overflow on it backs off, until the scale has grown."""

    limits: ClassVar[dict[str, Any]] = {"hysteresis": 2}
    bad = 0

    def update(self, bad: bool) -> float:
        self.count, self.bad = 0 if bad else self.count + 1, self.bad + bad
        if bad and self.bad >= 2:
            self.scale /= 2
        elif self.count == self.window:
            self.count, self.bad, self.scale = 0, 0, self.scale * 2
        return self.scale


class ConstantOfMmengine(Counts):
    """A `loss_scale` given as a float, in torch's state."""

    def update(self, bad: bool) -> float:
        return self.scale

    def ours(self) -> dict[str, Any]:
        return {**torch.amp.GradScaler("cpu", self.scale).state_dict(), "growth_factor": 1.0, "backoff_factor": 1.0}


@pytest.mark.parametrize("cls", [Counts, FloorOfOne, Flax, MindSporeManager, Fairseq, ColossalAI, ConstantOfMmengine])
def test_a_run_of_another_library_goes_on_as_it_would_have(cls: type[Counts]) -> None:
    draw, scales = random.Random(5), set()
    for _ in range(60):
        run = cls(4.0 if cls.floor else 2.0**30, draw.randint(1, 5))
        for _ in range(draw.randrange(40)):
            run.update(draw.random() < 0.3)
        scaler, theirs = loaded({**GradScaler("cpu").state_dict(), **run.ours()}, **cls.limits), run.resumed()
        for bad in [draw.random() < 0.3 for _ in range(20)]:
            assert update(scaler, bad) == theirs.update(bad)
            scales.add(theirs.scale)
    assert len(scales) > 8 or cls is ConstantOfMmengine
    assert cls.floor in {0.0, *scales}


MEGATRON: dict[str, Any] = {"scale": torch.tensor([64.0]), "growth_tracker": 0, "hysteresis_tracker": 2}
NUMBERS: dict[str, Any] = {"growth_interval": 3, "hysteresis": 2, "min_scale": 8.0}
DEEPSPEED = vars(DeepSpeed(64.0, 3, 2, 8.0))
WRONG = [
    (MEGATRON, {"scale": 0.0}, "scale must be a positive finite fp32 number .*, got 0.0"),
    (
        MEGATRON,
        {"scale": torch.tensor(math.inf)},
        r"scale must .* inf; go on from a finite one, such as 2.0\*\*16",
    ),
    (MEGATRON, {"scale": torch.ones(2)}, r"scale must be one number, got a tensor of shape \(2,\)"),
    (MEGATRON, {"growth_tracker": -1}, "growth_tracker must be .*, got -1"),
    (MEGATRON, {"hysteresis_tracker": 3}, "hysteresis_tracker must be at most hysteresis=2, got 3"),
    (MEGATRON, {"hysteresis_tracker": 1.5}, "hysteresis_tracker must be an int, got 1.5"),
    (DEEPSPEED, {"cur_scale": math.inf}, r"cur_scale must .*, got inf; go on from a finite one, such as 2.0\*\*16"),
    (DEEPSPEED, {"dynamic": 1}, "dynamic must be True or False, got 1"),
    (DEEPSPEED, {"scale_factor": 0.5}, "scale_factor must be finite and >= 1, got 0.5"),
    (DEEPSPEED, {"cur_hysteresis": 3}, "cur_hysteresis must be at most delayed_shift=2, got 3"),
    (DEEPSPEED, {"min_scale": -1.0}, "min_scale must be .*, got -1.0"),
    (DEEPSPEED, {"last_overflow_iter": 4}, "last_overflow_iter must be .*, got 4 and cur_iter=0"),
]


@pytest.mark.parametrize(("state", "wrong", "text"), WRONG)
def test_a_wrong_or_missing_field_is_named(state: dict[str, Any], wrong: dict[str, Any], text: str) -> None:
    convert: Any = from_deepspeed if state is DEEPSPEED else functools.partial(from_megatron, **NUMBERS)
    with pytest.raises((TypeError, ValueError), match=f"^{text}"):
        convert(state | wrong)
    with pytest.raises(KeyError, match=next(iter(wrong))):
        convert({name: value for name, value in state.items() if name not in wrong})
    with pytest.raises(TypeError, match=r"^state must be a dict, such as vars\(\) of an object, got object$"):
        convert(object())


@pytest.mark.parametrize("name", NUMBERS)
def test_a_wrong_number_of_a_megatron_run_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be .*, got 0"):
        from_megatron(MEGATRON, **NUMBERS | {name: 0})


def test_the_page_on_checkpoints() -> None:
    """Its programs run, and leave the scaler with what they were given."""
    names: dict[str, Any] = {
        "checkpoint": {"optimizer": {"grad_scaler": MEGATRON}},
        "args": SimpleNamespace(loss_scale_window=1000.0, hysteresis=2, min_loss_scale=1.0),
        "dynamic_scale": SimpleNamespace(scale=torch.tensor(128.0), growth_interval=7, fin_steps=torch.tensor(3)),
        "optimizer_state": DEEPSPEED | {"loss_scaler": DeepSpeed(32.0, 5, 1, 1.0)},
    }
    page, found = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text(), []
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        if "dcp.load(" in block:
            continue  # runs on two ranks, in tests/ranks/test_checkpoints.py
        names["scaler"] = GradScaler("cpu")
        exec(block, names)
        found.append((names["scaler"].get_scale(), names["scaler"].get_growth_interval()))
    assert found == [(64.0, 1000), (32.0, 5), (64.0, 3), (128.0, 8)]
