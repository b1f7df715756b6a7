"""Any tensors, any scale: the kernels agree with torch bit for bit."""

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
    assert_untouched,
    check_unscale,
    expected_bits,
    finite_values,
    make_table,
    run_check,
)

from scaler_triton.kernels.launch_config import LaunchConfig

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

# Each config is compiled anew for a GPU; the interpreter takes any.
COMPILED = NATIVE or (SIMULATED is not None and not THOROUGH)
CONFIGS = [SMALL] if COMPILED else [SMALL, LaunchConfig(1, 1, 1), LaunchConfig(1, 2, 2), LaunchConfig(2, 1, 3)]
EXAMPLES = 150 if NATIVE or THOROUGH else 75

positive_scales = st.floats(2.0**-126, 2.0**126, width=32)
any_factors = st.floats(width=32)


@st.composite
def guarded_tensors(draw, dtype):
    numel, offset = draw(st.integers(0, 1300)), draw(st.integers(0, 9))
    values = finite_values(numel, dtype, seed=draw(st.integers(0, 1000)))
    if numel:
        place = st.integers(0, numel - 1)
        for at, special in draw(st.lists(st.tuples(place, st.sampled_from([NAN, INF, -INF])), max_size=3)):
            values[at] = special
    return Guarded(values, offset)


@st.composite
def grad_lists(draw):
    dtype = draw(st.sampled_from(DTYPES))
    return draw(st.lists(guarded_tensors(dtype), min_size=1, max_size=5))


@settings(max_examples=EXAMPLES, deadline=None)
@given(grad_lists(), positive_scales, st.sampled_from(CONFIGS))
def test_unscale_by_a_scale(grads, scale, config):
    check_unscale(grads, torch.tensor(scale), inverse=False, config=config)


@settings(max_examples=EXAMPLES, deadline=None)
@given(grad_lists(), any_factors, st.sampled_from(CONFIGS))
def test_unscale_by_any_factor(grads, inv_scale, config):
    check_unscale(grads, torch.tensor(inv_scale), inverse=True, config=config)


@settings(max_examples=EXAMPLES, deadline=None)
@given(grad_lists(), st.sampled_from(CONFIGS))
def test_check_reads_and_never_writes(grads, config):
    table = make_table(grads, grads[0].tensor.dtype, config)
    found_inf = run_check(table)
    bits = [expected_bits(grad.values) for grad in grads]
    assert table.bits[:, 0].tolist() == bits
    assert found_inf == float(any(bits))
    for grad in grads:
        assert_untouched(grad.buffer, grad.start)
