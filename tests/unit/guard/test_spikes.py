"""Windows of norms: NumPy's decisions on every path, the same bits on all of them, and what a checkpoint holds."""

import math
import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import PLACES, Place, assert_all_same
from spike_rule import judged, remembered, series
from torch._subclasses.fake_tensor import FakeTensorMode

from scaler_triton.core import dispatch
from scaler_triton.core.flag import Flag
from scaler_triton.core.update import Counters
from scaler_triton.guard import spikes
from scaler_triton.guard.spikes import Guard, Window
from scaler_triton.kernels import abi
from scaler_triton.stats import ScalerStats


class Judge:
    """A window at a place, with all that a judgement reads and writes."""

    def __init__(self, place: Place, sigma: float = 3.0, length: int = 6) -> None:
        self.device = torch.device(place.device)
        self.window, self.counters = Window(sigma, length, self.device, place.backend), Counters()
        assert self.window.by_kernel == (place.backend == "triton")
        self.totals = torch.zeros(abi.TOTALS, dtype=torch.float64, device=self.device)
        self.flag = Flag(torch.zeros(abi.STATUS, device=self.device))

    def judge(self, norm: float, ranks: int = 0, *, first: bool = True) -> bool:
        """Return whether a step of this norm is skipped."""
        numbers = [norm * norm, 0.0, 0.0, 2.0, 2.0]
        self.totals.copy_(torch.tensor(numbers, dtype=torch.float64))
        self.flag.clear()
        if ranks:
            self.flag.summed_over, self.flag.is_final = ranks, True
        self.window.is_judged = not first
        self.window.judge(self.totals, self.flag, self.counters)
        assert self.totals[abi.OVERFLOWS].item() == self.flag.is_set()
        return self.flag.is_set()


@PLACES
def test_decisions_are_numpys(place: Place) -> None:
    draw = random.Random(7)
    for _ in range(100 if place.backend == "torch" else 10):
        sigma, length = draw.choice([0.5, 3.0, 6.0]), draw.choice([2, 3, 5, 8, 20])
        run, norms = Judge(place, sigma, length), series(draw, 40)
        want = judged(norms, sigma, length)
        assert [run.judge(norm) for norm in norms] == [skips for skips, _ in want]
        spikes = [(norm, *each) for norm, each in zip(norms, want, strict=True) if each[0] and math.isfinite(norm)]
        assert ScalerStats.of(run.counters.read()).spikes == len(spikes)
        if spikes:
            norm, _, limit = spikes[-1]
            assert run.window.spike(0) == pytest.approx((norm, limit), rel=1e-12)
        assert run.window.norms() == pytest.approx(remembered(norms, sigma, length), rel=1e-12)


@PLACES
def test_norms_have_the_same_bits_everywhere(place: Place) -> None:
    if str(place) == "cuda-torch":
        pytest.skip("torch's own square root there")
    run, draw = Judge(place), random.Random(1)
    for _ in range(300 if place.backend == "torch" else 20):
        run.totals[abi.SQUARES] = squares = draw.uniform(1.0, 1e6)
        run.window.is_judged = False
        run.window.judge(run.totals, run.flag, run.counters)
        assert run.window.norms()[-1] == math.sqrt(squares)


def test_on_the_cpu_no_square_root_is_torchs(monkeypatch: Any) -> None:
    """That is one bit off for a few numbers, which are others on each machine."""
    run = Judge(Place("cpu", "torch"))
    for owner in (torch, torch.Tensor):
        monkeypatch.setattr(owner, "sqrt", None)
    assert not run.judge(2.0)


SQUARES = [math.nan, math.inf, 0.0, 5e-324, 1e300, 1e308, 2.0]


@pytest.mark.parametrize("seed", range(30))
def test_numpy_on_the_cpu_has_the_bits_of_torchs_ops(seed: int, monkeypatch: Any) -> None:
    draw = random.Random(seed)
    sigma, length = draw.choice([1e-3, 1.0, 6.0]), draw.choice([2, 3, 8, draw.randint(4, 200)])
    pair = [Judge(Place("cpu", "torch"), sigma, length) for _ in range(2)]
    ours, theirs = pair
    monkeypatch.setattr(torch, "sqrt", lambda number: torch.tensor(math.sqrt(number), dtype=torch.float64))
    held = [draw.choice([0.0, 1.0, draw.lognormvariate(0.0, 1.0)]) for _ in range(draw.randint(0, 2 * length))]
    for run in pair:
        run.window.restore(held)
        run.counters.set([41] * abi.COUNTERS)
    theirs.window._on_host = None
    for _ in range(40):
        usual = draw.lognormvariate(0.0, 0.3) * draw.choice([1.0] * 9 + [1e6])
        totals = torch.tensor([draw.choice([*SQUARES, *[usual] * 40]), draw.choice([0.0, 2.0]), 0.0, 2.0, 2.0]).double()
        first, ranks = draw.random() < 0.8, draw.choice([None, 2])
        for run in pair:
            run.flag.clear()
            run.totals.copy_(totals)
            run.flag.summed_over, run.window.is_judged = ranks, not first
            run.window.judge(run.totals, run.flag, run.counters)
        same = [(run.window.memory, run.totals, run.flag.status) for run in pair]
        assert_all_same(*same)
        assert ours.counters.read() == theirs.counters.read()


@PLACES
def test_a_step_that_is_judged_again_replaces_its_norm(place: Place) -> None:
    run = Judge(place, length=4)
    assert [run.judge(norm) for norm in (1.0, 1.0, 50.0)] == [False, False, True]
    assert not run.judge(1.0, first=False)
    assert (run.window.norms(), ScalerStats.of(run.counters.read()).spikes) == ([1.0, 1.0, 1.0], 0)
    assert run.judge(60.0, first=False)
    limit = 1.0 + 3.0 * (1e-3 * 1.0)
    assert (run.window.norms(), ScalerStats.of(run.counters.read()).spikes) == ([1.0, 1.0, limit], 1)
    assert not run.judge(1.0)
    assert run.window.norms() == [1.0, 1.0, limit, 1.0]


def usual() -> list[float]:
    """Return norms that vary by 17 %."""
    draw = random.Random(0)
    return [draw.lognormvariate(0.0, 0.17) for _ in range(200)]


def resumed(place: Place, norms: Sequence[float]) -> Judge:
    """Return a window of 128, by 6 deviations, after norms none of which is a spike."""
    run = Judge(place, 6.0, 128)
    run.window.restore(norms)
    return run


@PLACES
def test_a_large_spike_does_not_hide_later_ones(place: Place) -> None:
    """As themselves the first would have lifted the limit to 500 times what is usual."""
    factors = {0: 1000.0, 10: 300.0, 20: 50.0, 35: 20.0}
    norms = usual()
    run = resumed(place, norms[:136])
    skipped = [step for step, norm in enumerate(norms[136:176]) if run.judge(norm * factors.get(step, 1.0))]
    assert skipped == [*factors]


@PLACES
@pytest.mark.parametrize(("factor", "skips"), [(10.0, 18), (3.0, 7)])
def test_a_lasting_change_is_accepted(place: Place, factor: float, skips: int) -> None:
    norms = usual()
    run = resumed(place, norms[:160])
    skipped = [run.judge(factor * norm) for norm in norms[160:]]
    assert skipped == [True] * skips + [False] * (40 - skips)


@PLACES
def test_a_spike_after_zeros_enters_as_itself(place: Place) -> None:
    """Its limit, 0, would have all that is not 0 skipped for ever."""
    run = Judge(place, 6.0, 4)
    assert [run.judge(norm) for norm in (0.0, 0.0, 5.0, 5.0)] == [False, False, True, False]
    assert run.window.norms() == [0.0, 0.0, 5.0, 5.0]


@PLACES
def test_the_status_is_that_of_the_ranks(place: Place) -> None:
    run = Judge(place, length=2)
    flags = [run.judge(norm, ranks=2) for norm in (1.0, 1.0, 9.0)]
    assert (flags, run.flag.status.tolist()) == ([False, False, True], [1.0, 0.0, 2.0, 0.0])


@PLACES
def test_a_spike_is_known_by_its_generation(place: Place) -> None:
    run = Judge(place, length=2)
    run.counters.set([5, 3, *[0] * (abi.COUNTERS - 2)])
    for norm in (2.0, 2.0, 9.0, 1.0):
        run.judge(norm)
    assert run.window.spike(3) == pytest.approx((9.0, 2.006))
    assert run.window.spike(2) is run.window.spike(4) is None


@PLACES
@pytest.mark.parametrize("before", [1, 4, 9, 10])
@pytest.mark.parametrize("length", [2, 4, 6])
def test_a_restored_window_decides_as_the_first_one(place: Place, before: int, length: int) -> None:
    norms = [1.0, 3.0, 2.0, 5.0, 9.0, 4.0, 6.0, 7.0, 3.5, 100.0, 5.0, 90.0, 8.0]
    run, resumed = Judge(place, 1.5, 4), Judge(place, 1.5, length)
    for norm in norms[:before]:
        run.judge(norm)
    assert run.window.norms() == pytest.approx(remembered(norms[:before], 1.5, 4), rel=1e-12)
    resumed.window.restore(run.window.norms())
    assert resumed.window.norms() == run.window.norms()[-length:]
    assert resumed.window.spike(0) is None
    for norm in norms[before:] if length == 4 else ():
        assert run.judge(norm) == resumed.judge(norm)
        assert run.window.spike(0) == resumed.window.spike(0) or resumed.window.spike(0) is None


def test_a_guard_gives_windows_the_norms_of_a_checkpoint_in_their_order() -> None:
    guard = Guard(3.0, 2, [[1.0, 2.0, 3.0], [4.0]])
    window = guard.new_window(torch.device("cpu"), "torch")
    assert guard.numbers() == (3.0, 2, [[2.0, 3.0], [4.0]])
    guard.restore([[7.0]])
    assert guard.numbers() == (3.0, 2, [[7.0]])
    guard.restore([])
    assert guard.numbers() == (3.0, 2, [[]])
    del window  # as with a step whose optimizer is freed
    assert guard.numbers() == (3.0, 2, [])


def test_fake_tensors_are_not_the_kernels() -> None:
    with FakeTensorMode(), mock.patch.object(spikes, "choose", return_value="triton"):
        assert not Window(3.0, 2, torch.device("cpu"), "triton").by_kernel


def test_a_window_is_not_made_in_a_capture(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dispatch, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a guard's first step cannot be captured"):
        Window(3.0, 2, torch.device("cuda:0"), "auto")
