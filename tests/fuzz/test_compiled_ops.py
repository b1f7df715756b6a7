"""Random calls of the ops within a compiled function write and return what they do uncompiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_cases import fresh_compiler
from fuzz_profile import Chunk, chunks
from helpers import assert_all_same
from hypothesis import strategies as st
from strategies import INF, NAN, all_dtypes
from torch import Tensor
from worlds import SHAPES, GradientSpec

from scaler_triton import ops

FORMS = st.sampled_from(["dense", "transposed", "channels-last", "gaps", "offset"])
PLANTS = st.sampled_from([None, None, INF, -INF, NAN])
SPECS = st.builds(GradientSpec, FORMS, st.integers(0, 20), st.sampled_from([1.0, 1e3]), PLANTS)
GRADIENTS = st.lists(st.tuples(st.sampled_from(SHAPES), all_dtypes, SPECS), max_size=4)
FLAGS, INV_SCALES = st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 2.0**-16, 0.3, 1.0, 4.0])


def unscale_and_update(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> Tensor:
    scale, tracker = inv_scale + 8.0, torch.zeros((), dtype=torch.int32)
    ops.unscale_(grads, inv_scale, found_inf)
    ops.update_scale_(scale, tracker, found_inf, 2.0, 0.5, 1)
    return scale


OPS: dict[str, Callable[..., Any]] = {
    "unscale": lambda grads, flag, inv_scale: (ops.unscale_(grads, inv_scale, flag), flag + 1),
    "check": lambda grads, flag, inv_scale: (ops.check_nonfinite(grads, flag), flag * inv_scale),
    "norm": lambda grads, flag, inv_scale: ops.grad_norm(grads, flag, inv_scale=inv_scale) * 2,
    "update": unscale_and_update,
}


def outcome(op: Callable[..., Any], drawn: list[Any], flag: float, inv_scale: float) -> list[Tensor]:
    """Return the gradients, the flag and what the op returned."""
    grads, found_inf = [spec.build(torch.empty(shape, dtype=dtype)) for shape, dtype, spec in drawn], torch.tensor(flag)
    returned = op(grads, found_inf, torch.tensor(inv_scale))
    return [*grads, found_inf, returned[1] if isinstance(returned, tuple) else returned]


# Torch's compiler meets deprecated parts of torch while it is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("chunk", chunks(15, 0.01), ids=str)
def test_compiled_ops_do_the_same(chunk: Chunk, name: str) -> None:
    def agree(drawn: list[Any], flag: float, inv_scale: float) -> None:
        with fresh_compiler():
            compiled = torch.compile(OPS[name], backend="aot_eager", fullgraph=True)
            ours = outcome(compiled, drawn, flag, inv_scale)
        assert_all_same(ours, outcome(OPS[name], drawn, flag, inv_scale))

    chunk.run(agree, GRADIENTS, FLAGS, INV_SCALES)
