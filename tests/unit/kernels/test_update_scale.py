"""The scale after a step: torch's op to the bit where torch is right, and its limits where it is not."""

import math
import random
from unittest import mock

import pytest
import torch
from kernel_cases import DEVICE, INF, NAN, NATIVE, assert_same, launched

from scaler_triton.kernels import launcher, update_scale
from scaler_triton.kernels.update_scale import launch_update_scale

MIN_SCALE = 2.0**-126
MAX_SCALE = torch.finfo(torch.float32).max


def update(scale, tracker, found_inf, growth=2.0, backoff=0.5, interval=2000, shape=()):
    """Scale and tracker after one launch, every buffer guarded; the flag must stay as it was."""
    scales = torch.full((3,), NAN)
    scales[1] = scale
    trackers = torch.tensor([-7, tracker, -7], dtype=torch.int32)
    flags = torch.tensor([NAN, found_inf, NAN])
    on_device = [tensor.to(DEVICE) for tensor in (scales, trackers, flags)]
    with launched("_update_scale_kernel"):
        launch_update_scale(*(tensor[1:2].view(shape) for tensor in on_device), growth, backoff, interval)
    after = [tensor.cpu() for tensor in on_device]
    assert_same(after[2], flags)
    assert_same(after[0][::2], scales[::2])
    assert after[1][::2].tolist() == [-7, -7]
    return after[0][1], after[1][1].item()


def torch_update(scale, tracker, found_inf, growth, backoff, interval):
    scale, tracker = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
    torch._amp_update_scale_(scale, tracker, torch.tensor(found_inf), growth, backoff, interval)
    return scale, tracker.item()


def random_case(rng):
    interval = rng.randint(1, 4)
    return {
        "scale": torch.tensor(math.ldexp(rng.uniform(1, 2), rng.randint(-120, 127))).item(),
        "tracker": rng.randrange(interval),  # torch asks for ==, so beyond it torch is wrong
        "found_inf": rng.choice([0.0, 0.0, 0.0, 1.0]),
        "growth": rng.choice([2.0, 1.0, 1.1, 1.001, 3.3, rng.uniform(1, 4)]),
        "backoff": rng.choice([0.5, 1.0, 0.9, 1 / 3, 0.1, rng.uniform(0.1, 1)]),
        "interval": interval,
    }


@pytest.mark.parametrize("seed", range(10))
def test_random_steps_are_torchs(seed):
    rng = random.Random(seed)
    for _ in range(40):
        case = random_case(rng)
        scale, tracker = update(**case)
        want_scale, want_tracker = torch_update(**case)
        assert_same(scale, want_scale)
        assert tracker == want_tracker, case


def test_a_factor_arrives_in_fp64():
    # 3 * 1.1 rounds to another fp32 if 1.1 is first rounded itself.
    assert 3.0 * torch.tensor(1.1).item() != 3.0 * 1.1
    assert_same(update(3.0, 0, 0.0, growth=1.1, interval=1)[0], torch.tensor(3.0 * 1.1))
    assert_same(update(7.0, 0, 1.0, backoff=0.1)[0], torch.tensor(7.0 * 0.1))


@pytest.mark.parametrize(
    ("tracker", "interval", "want"),
    [
        (0, 1, (4.0, 0)),
        (1, 3, (2.0, 2)),
        (2, 3, (4.0, 0)),
        (5, 3, (4.0, 0)),  # an interval set lower than the tracker: torch would never grow again
        (2**31 - 2, 2**31 - 1, (4.0, 0)),
        (2**31 - 1, 2**31 - 1, (4.0, 0)),
        (2**31 - 1, 2**40, (2.0, 2**31 - 1)),  # the tracker stops where int32 does
        (5, 2**40, (2.0, 6)),
        (15, 16, (4.0, 0)),
    ],
)
def test_growth_waits_for_the_interval(tracker, interval, want):
    scale, after = update(2.0, tracker, 0.0, interval=interval)
    assert (scale.item(), after) == want


@pytest.mark.parametrize("flag", [1.0, NAN, INF, -1.0, 2.0**-149])
def test_any_flag_but_zero_is_bad(flag):
    scale, tracker = update(8.0, 3, flag, interval=4)
    assert (scale.item(), tracker) == (4.0, 0)


def test_minus_zero_is_a_good_flag():
    assert update(8.0, 3, -0.0, interval=4)[0] == 16.0


@pytest.mark.parametrize(
    ("scale", "backoff", "want"),
    [
        (MIN_SCALE, 0.5, MIN_SCALE),
        (2 * MIN_SCALE, 0.5, MIN_SCALE),
        (2 * MIN_SCALE, 0.4, MIN_SCALE),
        (MIN_SCALE, 1.0, MIN_SCALE),
        (2.0**-149, 0.5, MIN_SCALE),
        (0.0, 0.5, MIN_SCALE),
        (-4.0, 0.5, MIN_SCALE),
        (NAN, 0.5, MIN_SCALE),
        (INF, 0.5, MAX_SCALE),
        (MAX_SCALE, 1.0, MAX_SCALE),
    ],
)
def test_backoff_stays_where_the_inverse_is_finite(scale, backoff, want):
    assert_same(update(scale, 3, 1.0, backoff=backoff)[0], torch.tensor(want))


@pytest.mark.parametrize(
    ("scale", "growth", "want"),
    [
        (2.0**127, 2.0, 2.0**127),
        (2.0**126, 2.0, 2.0**127),
        (MAX_SCALE, 1.0, MAX_SCALE),
        (MAX_SCALE, 1 + 2.0**-26, MAX_SCALE),  # rounds back to the same number
        (MAX_SCALE, 1 + 2.0**-24, MAX_SCALE),  # rounds to infinity
        (2.0**127, 2 - 2.0**-24, 2.0**127),
        (2.0**127, 2 - 2.0**-23, MAX_SCALE),
        (1.0, 1e300, 1.0),
    ],
)
def test_growth_that_would_not_be_finite_is_not_taken(scale, growth, want):
    after, tracker = update(scale, 6, 0.0, growth=growth, interval=7)
    assert_same(after, torch.tensor(want))
    assert tracker == 0
    assert_same(after, torch_update(scale, 6, 0.0, growth, 0.5, 7)[0])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_any_shape_of_one_element(shape):
    scale, tracker = update(8.0, 0, 1.0, shape=shape)
    assert (scale.item(), tracker) == (4.0, 0)


def test_whole_training_runs_in_step_with_torch():
    scale, tracker = torch.tensor([65536.0], device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    torch_scale, torch_tracker = torch.tensor([65536.0]), torch.zeros(1, dtype=torch.int32)
    rng = random.Random(0)
    for _ in range(60):
        found_inf = torch.tensor(float(rng.random() < 0.2))
        launch_update_scale(scale, tracker, found_inf.to(DEVICE), 1.7, 0.3, 3)
        torch._amp_update_scale_(torch_scale, torch_tracker, found_inf, 1.7, 0.3, 3)
        assert_same(scale, torch_scale)
        assert tracker.item() == torch_tracker.item()


def test_numbers_that_a_graph_may_read_are_never_freed():
    update_scale._policy_on.cache_clear()
    for interval in range(1, 100):
        assert update(64.0, 0, 1.0, interval=interval) == (32.0, 0)
    assert update_scale._policy_on.cache_info().currsize == 99


def test_new_numbers_are_waited_for_and_not_captured():
    """Whoever comes next with the same ones may be on another stream, and a graph's memory is its own."""
    module = torch.get_device_module(DEVICE)
    update_scale._policy_on.cache_clear()
    with (
        mock.patch.object(launcher, "capture_query", return_value=lambda: True),
        pytest.raises(RuntimeError, match="captured"),
    ):
        update(64.0, 0, 0.0)
    with mock.patch.object(module, "synchronize", side_effect=module.synchronize) as waited:
        for _ in range(3):
            assert update(64.0, 0, 1.0) == (32.0, 0)
    assert waited.call_count == 1


@pytest.mark.gpu
@pytest.mark.skipif(not NATIVE, reason="streams need a GPU")
def test_numbers_that_one_stream_is_late_with_are_right_on_another():
    update_scale._policy_on.cache_clear()
    held = [[torch.full((), 8.0, device=DEVICE), torch.zeros((), dtype=torch.int32, device=DEVICE)] for _ in range(2)]
    flag, streams = torch.ones((), device=DEVICE), [torch.cuda.Stream() for _ in held]
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(100_000_000)
    for stream, (scale, tracker) in zip(streams, held, strict=True):
        with torch.cuda.stream(stream):
            launch_update_scale(scale, tracker, flag, 3.0, 0.25, 5)
    streams[1].synchronize()
    torch.cuda.synchronize()
    assert [scale.item() for scale, _ in held] == [2.0, 2.0]
