"""Bounds, hysteresis and counters of the one launch that updates the scale; the flags that it clears are kept."""

import pytest
import torch
from kernel_cases import DEVICE, INF, NAN, interrupted_copies, launched

from scaler_triton import overflow_marks, policy, stats, verdict
from scaler_triton.flag_buffer import FlagBuffer
from scaler_triton.kernels import common, update_scale
from scaler_triton.kernels.update_scale import DevicePolicy, launch_update_rows, launch_update_scale

GUARD = -7


class Run:
    """A scale, its tracker and its counters, every buffer guarded, moved by one launch a step."""

    def __init__(self, scale=64.0, tracker=0, growth=2.0, backoff=0.5, interval=3, **limits):
        self.scales = torch.tensor([NAN, scale, NAN]).to(DEVICE)
        self.trackers = torch.tensor([GUARD, tracker, GUARD], dtype=torch.int32).to(DEVICE)
        self.counters = torch.tensor([GUARD, *[0] * 7, GUARD]).to(DEVICE)
        self.policy = DevicePolicy(DEVICE)
        self.numbers = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval, **limits}

    def step(self, flag):
        """The scale after one step; whatever lies around must be as it was."""
        with launched("_update_scale_kernel"):
            launch_update_rows(
                self.scales[1],
                self.trackers[1],
                torch.tensor([[float(flag), NAN]]).to(DEVICE),
                self.policy.hold(**self.numbers),
                self.counters[1:-1],
                1,
                clear=False,
            )
        assert self.scales[::2].isnan().all()
        assert self.trackers[::2].tolist() == self.counters[[0, -1]].tolist() == [GUARD] * 2
        return self.scales[1].item()

    def steps(self, flags):
        return [self.step(flag) for flag in flags]

    def counted(self):
        return dict(zip(stats.NAMES, self.counters[1:-1].tolist(), strict=True))


def test_counters_lie_where_the_host_looks_for_them():
    assert len(stats.NAMES) == update_scale.N_COUNTERS
    for name in ("UPDATES", "SKIPPED", "STREAK", "GROWTHS", "BACKOFFS", "LAST_SKIP", "STRIKES"):
        assert getattr(update_scale, f"_{name}").value == getattr(stats, name)


def test_kernels_and_host_lay_out_what_they_share_the_same_way():
    assert (update_scale.MAX_FLAGS.value, update_scale._COLUMNS.value) == (FlagBuffer.ROWS, verdict.COLUMNS)
    assert (policy.MIN_SCALE, policy.MAX_SCALE) == (update_scale.MIN_SCALE, update_scale.MAX_SCALE)
    assert (common.SAW_NAN.value, common.SAW_INF.value) == (overflow_marks.NAN, overflow_marks.INF)
    assert common.KIND_BITS.value == overflow_marks._KIND_BITS
    assert common.GENERATIONS.value == overflow_marks._GENERATIONS


@pytest.mark.parametrize(
    ("consecutive", "want"),
    [
        (False, [64, 64, 32, 32, 16, 16, 16, 32, 32, 32, 16]),  # Megatron: refilled by growth only
        (True, [64, 64, 32, 32, 32, 32, 32, 64, 64, 64, 32]),  # DeepSpeed: and by every good step
    ],
)
def test_hysteresis_waits_for_the_last_overflow(consecutive, want):
    run = Run(hysteresis=3, consecutive_hysteresis=consecutive)
    assert run.steps([1, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1]) == want


def test_an_interval_that_ends_refills_although_the_scale_cannot_grow():
    run = Run(scale=2.0**127, interval=1, hysteresis=2)
    assert run.steps([1, 0, 1, 1]) == [2.0**127, 2.0**127, 2.0**127, 2.0**126]


@pytest.mark.parametrize("flag", [1.0, NAN, INF])
def test_the_tracker_starts_anew_though_the_scale_stays(flag):
    run = Run(tracker=2, hysteresis=2)
    assert run.step(flag) == 64.0
    assert run.trackers[1].item() == 0


@pytest.mark.parametrize(
    ("scale", "flags", "want"),
    [
        (64.0, [1, 1, 1, 1], [32, 16, 12, 12]),
        (64.0, [0, 0, 0, 0], [96, 96, 96, 96]),
        (1.0, [0], [12]),  # from outside, or under bounds that were others
        (1e9, [1], [96]),
        (NAN, [0], [12]),
        (INF, [1], [96]),
    ],
)
def test_the_scale_stays_within_its_bounds(scale, flags, want):
    assert Run(scale, interval=1, min_scale=12.0, max_scale=96.0).steps(flags) == want


def test_setters_are_read_at_the_next_launch():
    run = Run(hysteresis=9)
    assert run.steps([1, 1]) == [64, 64]
    run.numbers["hysteresis"] = 3
    assert run.step(1) == 32
    run.numbers["min_scale"] = 24.0
    assert run.steps([1, 1]) == [24, 24]


def test_every_update_is_counted():
    run = Run(interval=2, min_scale=16.0)
    run.steps([0, 0, 1, 1, 1, 1, 0])
    assert run.counted() == {
        "updates": 7,
        "skipped": 4,
        "consecutive_skips": 0,
        "growths": 1,
        "backoffs": 3,  # the last overflow found the scale at its minimum
        "last_skip": 6,
        "strikes": 4,
    }
    run.steps([1])
    assert run.counted()["consecutive_skips"] == 1
    assert run.counted()["last_skip"] == 8


def test_counts_go_beyond_32_bits():
    run = Run()
    run.counters[1:-1] = 2**40
    run.step(1)
    assert run.counted()["updates"] == run.counted()["last_skip"] == 2**40 + 1


def test_without_counters_nothing_is_remembered():
    scale, tracker = torch.tensor(64.0, device=DEVICE), torch.zeros((), dtype=torch.int32, device=DEVICE)
    for want in (32.0, 16.0):
        launch_update_scale(scale, tracker, torch.ones((), device=DEVICE), 2.0, 0.5, 3)
        assert scale.item() == want


def test_cleared_flags_are_kept_row_by_row():
    buffer = FlagBuffer(DEVICE)
    buffer.status[:] = torch.arange(128.0).view(32, 4) % 3
    before = buffer.status.clone()
    scales, trackers = torch.tensor([NAN, 64.0, NAN]).to(DEVICE), torch.tensor([GUARD, 0, GUARD]).int().to(DEVICE)
    counters, rows = torch.tensor([GUARD, *[0] * 7, GUARD]).to(DEVICE), 0b10110
    policy = DevicePolicy(DEVICE).hold(2.0, 0.5, 3)
    with launched("_update_scale_kernel"):
        launch_update_rows(scales[1], trackers[1], buffer.status, policy, counters[1:8], rows, clear=True)
    assert scales[::2].isnan().all()
    assert {*trackers[::2].tolist(), *counters[::8].tolist()} == {GUARD}
    for row in range(32):
        chosen = rows >> row & 1
        assert buffer.status[row].tolist() == ([0.0, 0.0] * bool(chosen) + before[row].tolist()[2 * bool(chosen) :])
        assert buffer.last_flags[row].item() == (before[row, 0].item() if chosen else 0.0)


def test_numbers_are_copied_only_when_they_changed(monkeypatch):
    policy = DevicePolicy(DEVICE)
    copies = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *args, **kwargs: copies.append(args) or copy(*args, **kwargs))
    for hysteresis in (1, 1, 2, 2):
        assert policy.hold(2.0, 0.5, 3, hysteresis=hysteresis)[5].item() == hysteresis
    assert len(copies) == 2


def test_after_an_interrupted_copy_the_numbers_before_are_sent_again():
    policy = DevicePolicy(DEVICE)
    policy.hold(2.0, 0.5, 3)
    with interrupted_copies(), pytest.raises(KeyboardInterrupt):
        policy.hold(2.0, 0.5, 7)
    assert policy.hold(2.0, 0.5, 3)[2].item() == 3


def test_only_the_flags_that_counted_are_cleared():
    rows, columns = FlagBuffer.ROWS, verdict.COLUMNS
    before = torch.zeros(rows, columns + 1).to(DEVICE)  # the last flags lie behind the status
    status = before.view(-1)[: rows * columns].view(rows, columns)
    status[:2] = torch.tensor([1.0, 1.0, 5.0, 6.0])
    run = Run()
    with launched("_update_scale_kernel"):
        launch_update_rows(
            run.scales[1], run.trackers[1], status, run.policy.hold(**run.numbers), run.counters[1:-1], 0b10, clear=True
        )
    assert status[:2].tolist() == [[1.0, 1.0, 5.0, 6.0], [0.0, 0.0, 5.0, 6.0]]
    assert before.view(-1)[rows * columns :].tolist() == [0.0, 1.0] + [0.0] * (rows - 2)
