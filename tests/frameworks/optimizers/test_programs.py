"""Optimizers and wrappers of other packages that trained wrongly in silence: right now, or an error, or a warning."""

import pytest
import torch
from programs import PROGRAMS, judged

from scaler_triton import GradScaler

# What becomes of each program: with torch's scaler, and with ours.
CASES = {
    "schedulefree_unscales_inner": ("wrong", "right"),
    "torchft_unscales_inner": ("wrong", "right [ST04]"),
    "timm_unscales_inner": ("wrong", "right"),
    "adascale_unscales_inner": ("wrong", "right"),
    "opacus_unscales_inner": ("wrong", "right"),
    "adascale_around_fused_sgd": ("NaN", "right"),
    "adascale_around_fused_adamw": ("wrong", "right"),
    "adascale_after_a_skip": ("NaN", "NaN [ST06]"),
    "adahessian": ("wrong", "right"),
    "sophia_h": ("wrong", "right"),
    "opacus_hooks": ("wrong", "right"),
    "sam_scales_in_its_closure": ("wrong", "wrong [ST02]"),
    "schedulefree_scales_in_its_closure": ("wrong", "wrong [ST02]"),
    "heavyball_without_zero_grad": ("wrong", "wrong [ST05]"),
    "optimi_gradient_release": ("AssertionError", "AssertionError [ST07]"),
    "torchft_heals_without_the_scale": ("wrong", "wrong [ST04]"),
}


def test_each_program_is_judged() -> None:
    assert set(CASES) == set(PROGRAMS)


@pytest.mark.parametrize("name", CASES)
def test_with_torchs_scaler(name: str) -> None:
    assert judged(PROGRAMS[name], torch.amp.GradScaler) == CASES[name][0]


@pytest.mark.parametrize("name", CASES)
def test_with_ours(name: str) -> None:
    assert judged(PROGRAMS[name], GradScaler) == CASES[name][1]
