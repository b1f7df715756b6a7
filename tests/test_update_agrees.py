"""The kernel and the torch path give the same scale and tracker, whatever was in them."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Place, assert_same, places
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scaler_triton import ops

FLAGS = st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf])
SCALES = st.one_of(st.floats(width=32), st.sampled_from([2.0**-126, 2.0**127, 1e-45, 0.0, 65536.0]))


@pytest.mark.parametrize("place", [p for p in places() if p.backend == "triton"], ids=str)
@given(SCALES, st.integers(0, 9), FLAGS, st.floats(1.0, 4.0), st.floats(0.01, 1.0), st.integers(1, 9))
@example(math.nan, 0, 1.0, 2.0, 0.5, 1)
@example(2.0**-126, 3, 1.0, 2.0, 0.5, 1)
@example(1e-45, 0, 0.0, 2.0, 0.5, 9)
@example(3e38, 8, 0.0, 4.0, 0.5, 2)
@settings(max_examples=200, deadline=None)
def test_update_is_the_same_on_every_backend(
    place: Place, scale: float, tracker: int, flag: float, growth: float, backoff: float, interval: int
) -> None:
    results = []
    for backend in (place.backend, "torch"):
        state = (
            torch.tensor(scale, device=place.device),
            torch.tensor(tracker, dtype=torch.int32, device=place.device),
        )
        found_inf = torch.tensor(flag, device=place.device)
        ops.update_scale_(*state, found_inf, growth, backoff, interval, backend=backend)
        results.append(state)
    assert_same(results[0][0], results[1][0])
    assert results[0][1].item() == results[1][1].item()
    assert 2.0**-126 <= results[0][0].item() <= torch.finfo(torch.float32).max
