"""The sweep: what is chosen follows from the times by a rule, and only what is right is timed at all."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from kernel_cases import DEVICE
from scaler_triton.kernels.launch_config import CANDIDATES, DEFAULT, ITEMSIZES, MODES, LaunchConfig
from scaler_triton.kernels.scratch import Scratch

from scaler_triton.kernels import scratch as scratch_module
from scaler_triton.kernels import sweep

FIRST, SECOND = LaunchConfig(4, 1, 2), LaunchConfig(8, 2, 1)
FEW = (FIRST, DEFAULT, SECOND)
PASSES = [(mode, itemsize) for mode in MODES for itemsize in ITEMSIZES]


def tiny(itemsize):
    return {"span": [2100], "mixed": [1, 17, 64]}


def figures(config, span=1.0, mixed=1.0, problem=""):
    ms = {} if problem else {"span": span, "mixed": mixed}
    return sweep.Figures("check", 2, config, problem, ms, ms, 1.0)


@pytest.mark.parametrize(
    ("rivals", "wanted"),
    [
        ([(1.0, 1.0)], DEFAULT),
        ([(0.9, 0.9)], FIRST),
        ([(0.5, 0.99)], DEFAULT),  # by more than 2 % on one workload only
        ([(0.99, 0.5)], DEFAULT),
        ([(1 / 1.02, 0.5)], DEFAULT),  # by just 2 %
        ([(0.98, 0.98)], FIRST),
        ([(0.9, 0.9), (0.8, 0.8)], SECOND),
        ([(0.9, 0.8), (0.8, 0.9)], FIRST),  # a tie: the first in the list
        ([(0.5, 0.99), (0.97, 0.97)], SECOND),
        ([(0.7, 0.97), (0.85, 0.85)], FIRST),  # 1.52 times as fast together, against 1.38
    ],
)
def test_the_choice(rivals, wanted):
    found = [figures(DEFAULT)] + [figures(config, *ms) for config, ms in zip([FIRST, SECOND], rivals, strict=False)]
    assert sweep.choose(found) == wanted


def test_a_dropped_candidate_is_never_chosen():
    assert sweep.choose([figures(FIRST, problem="wrong values"), figures(DEFAULT)]) == DEFAULT


def fake_timer(times):
    """Times by configuration, 1 ms by default; all that was timed is kept in `trials`."""

    def timer(trial):
        timer.trials.append(trial)
        return times.get(trial.config, 1.0)

    timer.trials = []
    return timer


def test_a_sweep_times_every_candidate_in_every_pass():
    timer = fake_timer({FIRST: 0.5})
    steps = []
    found = sweep.sweep(DEVICE, tiny, timer, lambda: steps.append(1), FEW)
    assert sweep.choose_all(found) == dict.fromkeys(PASSES, FIRST)
    assert sorted({(each.mode, each.itemsize) for each in found}) == sorted(PASSES)
    assert [each.config for each in found] == list(FEW) * 6
    assert {each.problem for each in found} == {""}
    assert len(steps) == sweep.count_steps(len(FEW))
    timed = [(trial.mode, trial.itemsize, trial.config, trial.workload) for trial in timer.trials]
    assert len(timed) == sweep.ROUNDS * (6 * len(FEW) * 2 + len(ITEMSIZES))
    assert len(set(timed)) == len(timed) // sweep.ROUNDS


def test_bandwidths_count_what_is_moved():
    times = {None: 0.5, DEFAULT: 2.0}
    for each in sweep.sweep(DEVICE, tiny, fake_timer(times), candidates=[DEFAULT]):
        moved = each.itemsize * (2 if each.mode == "unscale" else 1)
        assert each.ms == {"span": 2.0, "mixed": 2.0}
        assert each.gbps == pytest.approx({"span": 2100 * moved / 2e-3 / 1e9, "mixed": 82 * moved / 2e-3 / 1e9})
        buffer = Scratch([2100], sweep.DTYPES[each.itemsize], DEVICE).buffer
        assert each.copy_gbps == pytest.approx(2 * buffer.nbytes / 0.5e-3 / 1e9)


def test_the_median_of_the_rounds_counts():
    clock = iter([9.0, 1.0, 2.0] * 1000)
    timer = lambda trial: next(clock) if trial.workload == "span" and trial.config else 1.0  # noqa: E731
    assert {each.ms["span"] for each in sweep.sweep(DEVICE, tiny, timer, candidates=[DEFAULT])} == {2.0}


def test_what_is_timed_can_be_repeated_and_stores_everything():
    tried = Scratch([5, 300], torch.float16, DEVICE)
    launch = tried.launch_of("unscale", FIRST)
    for sign in (-1, 1, -1):
        launch()
        for start, numel in zip(tried._starts, tried.numels, strict=True):
            assert torch.equal(tried.buffer[start : start + numel], sign * tried.original[start : start + numel])
    assert tried.found_inf.item() == 0
    tried.copy()
    assert scratch_module._same_bits(tried.spare, tried.buffer)


def spoiled(name, spoil):
    """A launcher that does its work for the default and something else for others."""
    launch = getattr(scratch_module, name)

    def wrong(table, *args, **kwargs):
        if table.config == DEFAULT:
            launch(table, *args, **kwargs)
        else:
            spoil(launch, table, *args, **kwargs)

    return mock.patch.object(scratch_module, name, wrong)


def does_nothing(launch, table, *args, **kwargs):
    pass


def always_flags(launch, table, *args, **kwargs):
    launch(table, *args, **kwargs)
    args[-1].fill_(1.0)


def forgets_the_flag(launch, table, *args, **kwargs):
    before = args[-1].clone()
    launch(table, *args, **kwargs)
    args[-1].copy_(before)


def raises(launch, table, *args, **kwargs):
    raise RuntimeError("out of resources: registers\nand a long story")


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("launch_unscale", does_nothing, "wrong values (span)"),
        ("launch_unscale", always_flags, "finite values flagged (span)"),
        ("launch_check_nonfinite", always_flags, "finite values flagged (span)"),
        ("launch_check_nonfinite", forgets_the_flag, "an Inf was missed (span)"),
        ("launch_check_nonfinite", raises, "RuntimeError: out of resources: registers"),
    ],
)
def test_a_wrong_candidate_is_dropped_untimed_and_reported(name, spoil, said):
    timer = fake_timer({FIRST: 0.1})
    with spoiled(name, spoil):
        found = sweep.sweep(DEVICE, tiny, timer, candidates=(FIRST, DEFAULT))
    mode = "unscale" if name == "launch_unscale" else "check"
    dropped = [each for each in found if each.problem]
    assert {(each.mode, each.config, each.problem) for each in dropped} == {(mode, FIRST, said)}
    assert len(dropped) == len(ITEMSIZES)
    assert not any(trial.mode == mode and trial.config == FIRST for trial in timer.trials)
    assert all(each.ms == each.gbps == {} for each in dropped)
    chosen = sweep.choose_all(found)
    assert {config for key, config in chosen.items() if key[0] == mode} == {DEFAULT}
    assert {config for key, config in chosen.items() if key[0] != mode} == {FIRST}


def test_a_default_that_is_wrong_ends_the_sweep():
    with (
        mock.patch.object(scratch_module, "launch_check_nonfinite"),
        pytest.raises(RuntimeError, match="the default configuration fails in check of 2 bytes: an Inf was missed"),
    ):
        sweep.sweep(DEVICE, tiny, fake_timer({}), candidates=FEW)


@pytest.mark.parametrize("config", CANDIDATES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_every_candidate_is_right(mode, config):
    # More than a chunk of the largest program, and ends that are no whole vectors.
    for dtype in sweep.DTYPES.values():
        chunk = config.chunk_elements(dtype.itemsize)
        assert Scratch([1, chunk + 1, 7, 0, 3], dtype, DEVICE).problem(mode, config) == ""


def test_a_write_beside_the_tensors_is_found_out():
    def write_beside(launch, table, *args, **kwargs):
        launch(table, *args, **kwargs)
        tried.buffer[0] = 0

    tried = Scratch([64], torch.float32, DEVICE)
    with spoiled("launch_check_nonfinite", write_beside):
        assert tried.problem("check", DEFAULT) == ""
        assert tried.problem("check", FIRST) == "wrong values"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seen", ["first", "last"])
def test_a_pass_that_looks_at_one_end_only_is_found_out(mode, seen):
    name = {"unscale": "launch_unscale", "check": "launch_check_nonfinite"}[mode]
    tried = Scratch([64, 64], torch.float32, DEVICE)

    def half_blind(launch, table, *args, **kwargs):
        before = args[-1].clone()
        views = dict(zip(["first", "last"], tried._views(tried.buffer), strict=True))
        bad = not views[seen].isfinite().all()
        launch(table, *args, **kwargs)
        args[-1].copy_(torch.ones_like(before) if bad else before)

    with spoiled(name, half_blind):
        assert tried.problem(mode, DEFAULT) == ""
        assert tried.problem(mode, FIRST) == "an Inf was missed"


def test_the_workloads_of_a_gpu():
    numels = sweep.gpu_workloads(50 * 2**20)
    for itemsize in ITEMSIZES:
        assert sum(numels(itemsize)["span"]) * itemsize == 200 * 2**20
        assert len(numels(itemsize)["mixed"]) == 2000
        assert min(numels(itemsize)["mixed"]) >= 16
        assert max(numels(itemsize)["mixed"]) <= 2**18
    assert numels(2)["mixed"] == sweep.gpu_workloads(2**20)(2)["mixed"]  # the same on every card
    assert numels(2)["span"] != sweep.gpu_workloads(2**20)(2)["span"] == [32 * 2**20]


def test_the_gpus_timer_is_a_median_of_launches_behind_reads():
    """Behind writes a check would be timed with theirs, which the cache has yet to pass on."""
    calls, took = [], [9.0] * 10 + [1.0] * 51 + [5.0] * 49  # the first 10 do not count

    class Mark:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("mark")
            self.launches = calls.count("launch")

        def elapsed_time(self, end):
            assert end.launches == self.launches + 1
            return took[self.launches]

    def zeros(numel, *, dtype, device):
        assert numel * dtype.itemsize == 4 * 2**20
        return SimpleNamespace(sum=lambda: calls.append("read"))

    cuda = {"Event": Mark, "current_device": lambda: 0, "synchronize": lambda: calls.append("wait")}
    cuda["get_device_properties"] = lambda device: SimpleNamespace(L2_cache_size=2**20)
    with mock.patch.multiple(torch.cuda, **cuda), mock.patch.object(torch, "zeros", zeros):
        assert sweep.gpu_timer(sweep.Trial("copy", 2, "span", None, lambda: calls.append("launch"))) == 1.0
    assert calls == ["read", "mark", "launch", "mark"] * 110 + ["wait"]


@pytest.mark.gpu
def test_a_sweep_with_the_gpus_own_timer():
    found = sweep.sweep(DEVICE, sweep.gpu_workloads(2**20), sweep.gpu_timer, candidates=(FIRST, DEFAULT))
    assert {each.problem for each in found} == {""}
    assert all(speed > 0 for each in found for speed in each.gbps.values())
    assert set(sweep.choose_all(found)) == set(PASSES)
