"""The update rule told plainly, and the ways in which a scale is updated."""

import math
from typing import Any

import pytest
import torch
from helpers import places
from hypothesis import strategies as st
from torch import Tensor

from scaler_triton.core import update as rule
from scaler_triton.core.dispatch import kernels
from scaler_triton.core.torch_ops import host_memory
from scaler_triton.core.update import Counters, DevicePolicy, Numbers
from scaler_triton.kernels import abi
from scaler_triton.policy import Limits

CPU = torch.device("cpu")
TRITON = [place for place in places() if place.backend == "triton"]


def fp32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float64).float().item()


def plain_rule(scale: float, tracker: int, bad: bool, numbers: Numbers, limits: Limits, counters: list[int]) -> Any:
    """Return scale and tracker after an update, as the head of update.py tells; in fp32 by NumPy's rounding."""
    growth, backoff, interval = numbers
    updates, skipped, streak, growths, backoffs, last_skip, strikes, spikes = counters
    updates, new = updates + 1, scale
    if bad:
        skipped, streak, strikes, last_skip, tracker = skipped + 1, streak + 1, strikes + 1, updates, 0
        new = fp32(scale * backoff) if strikes >= limits.hysteresis else scale
    else:
        streak, tracker = 0, tracker + 1
        if tracker >= interval:
            grown = fp32(scale * growth)
            new, tracker, strikes = grown if math.isfinite(grown) else scale, 0, 0
    new = limits.min_scale if math.isnan(new) else min(max(new, limits.min_scale), limits.max_scale)
    growths, backoffs = growths + (new > scale), backoffs + (new < scale)
    counters[:] = updates, skipped, streak, growths, backoffs, last_skip, strikes, spikes
    return new, min(tracker, abi.MAX_TRACKER)


def by_host(scale: Tensor, tracker: Tensor, flag: Tensor, rules: Any, held: Counters) -> None:
    memory, found_inf = host_memory(tracker.view(-1)), bool(flag.item() != 0)
    rule.update_on_host_(scale, memory, found_inf, *rules, host_memory(held.on(CPU)))


def a_row(largest: Tensor) -> Tensor:
    row = torch.zeros(1, abi.MEASURED_ROW, dtype=torch.float64, device=largest.device)
    row[0, abi.LARGEST], row[0, abi.MEASURED_AT] = largest * 4.0, 4.0
    return row


def by_ops(scale: Tensor, tracker: Tensor, flag: Tensor, rules: Any, held: Counters, *measured: Any) -> None:
    policy = (measured[0], a_row(measured[1])) if measured else ()
    rule.update_by_ops_(scale, tracker, flag, *rules, held.on(scale.device), *policy)


def by_kernel(scale: Tensor, tracker: Tensor, flag: Tensor, rules: Any, held: Counters, *measured: Any) -> None:
    policy = DevicePolicy(scale.device).hold(*rules)
    options = measured[0].launch_options(a_row(measured[1])) if measured else {}
    bind = kernels().update_scale.bind_update
    bind(flag, flag, policy, held.on(scale.device), clear=False, **options)(scale, tracker, 1)


PATHS = [("cpu", by_host), ("cpu", by_ops), *((place.device, by_kernel) for place in TRITON)]
NAMED = pytest.mark.parametrize(("device", "path"), PATHS, ids=[path.__name__ for _, path in PATHS])


any_numbers = st.tuples(st.floats(1.0, 4.0), st.floats(0.01, 1.0), st.integers(1, 4))


@st.composite
def any_limits(draw: st.DrawFn) -> Limits:
    bounds = st.sampled_from([abi.MIN_SCALE, 1.0, 4096.0, 65536.0, abi.MAX_SCALE])
    low, high = sorted((draw(bounds), draw(bounds)))
    return Limits(low, high, draw(st.integers(1, 4)))
