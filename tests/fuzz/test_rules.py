"""Random norms and overflows: the rule of spikes is NumPy's, and the headroom policy is what its page says."""

import math
import random

import pytest
import torch
from fuzz_profile import Chunk, cases
from helpers import sgd, started
from spike_rule import judged, series

from scaler_triton import GradScaler
from scaler_triton.flag import Flag
from scaler_triton.kernels import abi
from scaler_triton.spikes import Window
from scaler_triton.update import Counters

pytestmark = pytest.mark.slow

EACH = pytest.mark.parametrize(("backend", "chunk"), cases([("torch", 100, 1.0), ("triton", 5, 1.0)]))


@EACH
def test_steps_are_skipped_as_numpy_says(backend: str, chunk: Chunk) -> None:
    for number in range(chunk.programs):
        draw = random.Random(1000 * chunk.seed + number)
        sigma, length = draw.choice([0.3, 1.0, 3.0, 6.0]), draw.choice([2, 3, 4, 7, 9])
        window, counters = Window(sigma, length, torch.device("cpu"), backend), Counters()
        flag, norms = Flag(torch.zeros(abi.STATUS)), series(draw, draw.randint(2, 3 * length))
        found = []
        for norm in norms:
            flag.clear()
            totals = torch.tensor([norm * norm, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
            window.judge(totals, flag, counters, 0, first=True)
            found.append(flag.is_set())
        assert found == [skips for skips, _ in judged(norms, sigma, length)], (sigma, length, norms)


@EACH
def test_scales_are_what_the_policy_says(backend: str, chunk: Chunk) -> None:
    for number in range(chunk.programs):
        draw = random.Random(1000 * chunk.seed + number)
        numbers = draw.choice([2.0, 1.5]), draw.choice([0.5, 0.3]), draw.choice([1, 2, 5])
        bits, window = draw.choice([0, 2, 5]), draw.choice([1, 3, 16])
        low, high = draw.choice([(abi.MIN_SCALE, abi.MAX_SCALE), (1.0, 2.0**20)])
        options = dict(zip(("growth_factor", "backoff_factor", "growth_interval"), numbers, strict=True))
        options |= {"min_scale": low, "max_scale": high, "headroom_bits": bits, "headroom_window": window}
        first = draw.choice([1.0, 1000.0, 65536.0])
        scaler = started(GradScaler, "cpu", scale_policy="headroom", init_scale=first, backend=backend, **options)
        scale, cap, tracker, exponents = first, abi.MAX_SCALE, 0, []  # the policy, told plainly
        for _ in range(draw.randint(2, 12)):
            bad, size = draw.random() < 0.2, 0.0 if draw.random() < 0.1 else 2.0 ** draw.uniform(-30, 3)
            gradient = torch.tensor([0.0, size * scaler.get_scale(), math.nan if bad else 0.0])
            scaler.step(sgd([gradient]))
            scaler.update()
            if bad:
                scale = cap = clamp(fp32(scale * numbers[1]), low, high)
                tracker = 0
            else:
                tracker = (tracker + 1) % numbers[2]
                grown = fp32(cap * numbers[0]) if tracker == 0 else cap
                cap = clamp(grown if math.isfinite(grown) else cap, low, high)
                largest = gradient[1].item() / scale
                exponents += [math.frexp(largest)[1] - 1] if largest > 0 else []
                if exponents:
                    scale = clamp(min(2.0 ** (15 - bits - max(exponents[-window:])), cap), low, high)
            assert scaler.get_scale() == scale, (backend, chunk.seed, number)


def fp32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float64).float().item()


def clamp(number: float, low: float, high: float) -> float:
    return min(max(number, low), high)
