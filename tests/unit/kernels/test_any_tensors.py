"""Any tensors, any factor: unscaling and checking agree with torch bit for bit."""

import math
import random

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
)

from scaler_triton.kernels.config import LaunchConfig

# Each configuration is compiled anew for a GPU; the interpreter takes any.
COMPILED = NATIVE or (SIMULATED is not None and not THOROUGH)
SHAPES = [SMALL] if COMPILED else [SMALL, LaunchConfig(1, 1, 1), LaunchConfig(1, 2, 2), LaunchConfig(2, 1, 3)]


def some_gradients(draw):
    dtype, grads = draw.choice(DTYPES), []
    for _ in range(draw.randint(1, 5)):
        values = finite_values(draw.randint(0, 1300), dtype, seed=draw.randint(0, 1000))
        for _ in range(draw.randint(0, 3) if len(values) else 0):
            values[draw.randrange(len(values))] = draw.choice([NAN, INF, -INF])
        grads.append(Guarded(values, draw.randint(0, 9)))
    return grads


@pytest.mark.parametrize("seed", range(150 if NATIVE or THOROUGH else 75))
def test_any_tensors_and_any_factors(seed):
    draw = random.Random(seed)
    grads, config = some_gradients(draw), draw.choice(SHAPES)
    scale = math.ldexp(draw.uniform(1, 2), draw.randint(-126, 125))
    factor = draw.choice([scale, -scale, 0.0, -0.0, INF, NAN, math.ldexp(1.0, draw.randint(-149, -127))])
    check_only(grads, config)
    check_unscale(grads, torch.tensor(scale), inverse=False, config=config)
    fresh = [Guarded(grad.values, grad.tensor.storage_offset() % 8) for grad in grads]
    check_unscale(fresh, torch.tensor(factor), inverse=True, config=config)
