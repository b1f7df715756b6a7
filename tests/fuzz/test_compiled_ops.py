"""Random calls of the ops within a compiled function write and return what they do uncompiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from compile_cases import fresh_compiler
from fuzz_profile import Chunk, chunks, settings_for
from helpers import assert_same
from hypothesis import given, seed
from hypothesis import strategies as st
from torch import Tensor

from scaler_triton import ops

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t(),
    "strided": lambda tensor: tensor[:, ::2],
    "part": lambda tensor: tensor[1:],
}
INV_SCALES = [0.0, 2.0**-16, 0.3, 1.0, 4.0]
NORMS = [0.5, 1.0, 2.0, 3.0, math.inf]


class Drawn(NamedTuple):
    """A gradient: how many rows and columns, in what dtype and layout, and a value to put into it."""

    rows: int
    columns: int
    dtype: torch.dtype
    layout: str
    value: float

    def tensor(self) -> Tensor:
        count = self.rows * self.columns
        whole = torch.linspace(-3.0, 3.0, count).reshape(self.rows, self.columns).to(self.dtype)
        if count:
            whole[-1, -1] = self.value
        return LAYOUTS[self.layout](whole)


class Factors(NamedTuple):
    flag: float
    inv_scale: float
    norm_type: float


GRADIENTS = st.lists(
    st.builds(
        Drawn,
        st.integers(0, 4),
        st.integers(0, 5),
        st.sampled_from(DTYPES),
        st.sampled_from(sorted(LAYOUTS)),
        st.sampled_from([1.0, -7.5, math.inf, -math.inf, math.nan]),
    ),
    max_size=4,
)
FACTORS = st.builds(Factors, st.sampled_from([0.0, 1.0]), st.sampled_from(INV_SCALES), st.sampled_from(NORMS))
Op = Callable[[list[Tensor], Tensor, Tensor, float], Tensor]


def unscale(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor, norm_type: float) -> Tensor:
    ops.unscale_(grads, inv_scale, found_inf)
    return found_inf + 1


def check(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor, norm_type: float) -> Tensor:
    ops.check_nonfinite(grads, found_inf)
    return found_inf * inv_scale


def norm(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor, norm_type: float) -> Tensor:
    return ops.grad_norm(grads, found_inf, inv_scale=inv_scale, norm_type=norm_type) * 2


def unscale_and_update(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor, norm_type: float) -> Tensor:
    scale, tracker = inv_scale + 8.0, torch.zeros((), dtype=torch.int32)
    ops.unscale_(grads, inv_scale, found_inf)
    ops.update_scale_(scale, tracker, found_inf, 2.0, 0.5, 1)
    return scale


def outcome(op: Op, drawn: list[Drawn], factors: Factors) -> list[Tensor]:
    """Return the gradients, the flag and what the op returned."""
    grads = [each.tensor() for each in drawn]
    found_inf, inv_scale = torch.tensor(factors.flag), torch.tensor(factors.inv_scale)
    returned = op(grads, found_inf, inv_scale, factors.norm_type)
    return [*grads, found_inf, returned]


# Torch's compiler meets deprecated parts of torch while it is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("op", [unscale, check, norm, unscale_and_update])
@pytest.mark.parametrize("chunk", chunks(15, 0.01), ids=str)
def test_compiled_ops_do_the_same(chunk: Chunk, op: Op) -> None:
    @seed(chunk.seed)
    @settings_for(chunk.programs)
    @given(GRADIENTS, FACTORS)
    def agree(drawn: list[Drawn], factors: Factors) -> None:
        with fresh_compiler():
            compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
            ours = outcome(compiled, drawn, factors)
        for mine, other in zip(ours, outcome(op, drawn, factors), strict=True):
            assert_same(mine, other)

    agree()
