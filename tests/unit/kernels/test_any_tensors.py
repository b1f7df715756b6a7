"""Any tensors, any factor: unscaling and checking agree with torch bit for bit."""

import pytest
import torch
from kernel_cases import (
    DTYPES,
    INF,
    NAN,
    NATIVE,
    SIMULATED,
    SMALL,
    THOROUGH,
    Guarded,
    check_only,
    check_unscale,
    finite_values,
)  # fmt: skip

from scaler_triton.kernels.config import LaunchConfig

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

# Each configuration is compiled anew for a GPU; the interpreter takes any.
COMPILED = NATIVE or (SIMULATED is not None and not THOROUGH)
SHAPES = [SMALL] if COMPILED else [SMALL, LaunchConfig(1, 1, 1), LaunchConfig(1, 2, 2), LaunchConfig(2, 1, 3)]
EXAMPLES = 150 if NATIVE or THOROUGH else 75


@st.composite
def grad_lists(draw):
    dtype, grads = draw(st.sampled_from(DTYPES)), []
    for _ in range(draw(st.integers(1, 5))):
        numel, offset = draw(st.integers(0, 1300)), draw(st.integers(0, 9))
        values = finite_values(numel, dtype, seed=draw(st.integers(0, 1000)))
        if numel:
            places = st.tuples(st.integers(0, numel - 1), st.sampled_from([NAN, INF, -INF]))
            for place, special in draw(st.lists(places, max_size=3)):
                values[place] = special
        grads.append(Guarded(values, offset))
    return grads


@settings(max_examples=EXAMPLES, deadline=None)
@given(grad_lists(), st.floats(2.0**-126, 2.0**126, width=32), st.floats(width=32), st.sampled_from(SHAPES))
def test_any_tensors_and_any_factors(grads, scale, factor, config):
    check_only(grads, config)
    check_unscale(grads, torch.tensor(scale), inverse=False, config=config)
    fresh = [Guarded(grad.values, grad.tensor.storage_offset() % 8) for grad in grads]
    check_unscale(fresh, torch.tensor(factor), inverse=True, config=config)
