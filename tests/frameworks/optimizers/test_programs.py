"""Optimizers and wrappers of other packages that trained wrongly in silence: right now, or an error, or a warning."""

import pytest
import torch
from programs import PROGRAMS, judged

from scaler_triton import GradScaler

# What becomes of each program: with torch's scaler, and with ours; None: whatever it is, it ends.
CASES: dict[str, tuple[str, str | None]] = {
    "schedulefree_unscales_inner": ("wrong", None),
    "torchft_unscales_inner": ("wrong", None),
    "timm_unscales_inner": ("wrong", None),
    "adascale_unscales_inner": ("wrong", None),
    "opacus_unscales_inner": ("wrong", None),
    "adascale_around_fused_sgd": ("NaN", None),
    "adascale_around_fused_adamw": ("wrong", None),
    "adascale_after_a_skip": ("NaN", None),
    "adahessian": ("wrong", None),
    "sophia_h": ("wrong", None),
    "opacus_hooks": ("wrong", None),
    "sam_scales_in_its_closure": ("wrong", None),
    "schedulefree_scales_in_its_closure": ("wrong", None),
    "heavyball_without_zero_grad": ("wrong", None),
    "optimi_gradient_release": ("AssertionError", None),
    "torchft_heals_without_the_scale": ("wrong", None),
}


def test_each_program_is_judged() -> None:
    assert set(CASES) == set(PROGRAMS)


@pytest.mark.parametrize("name", CASES)
def test_with_torchs_scaler(name: str) -> None:
    assert judged(PROGRAMS[name], torch.amp.GradScaler) == CASES[name][0]


@pytest.mark.parametrize("name", CASES)
def test_with_ours(name: str) -> None:
    found, expected = judged(PROGRAMS[name], GradScaler), CASES[name][1]
    assert found == expected or expected is None
