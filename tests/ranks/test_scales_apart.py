"""Ranks whose scales have come apart are told, all of them, at the next step: the flag's reduction carries scales."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from ranks import cases
from ranks.cases import INIT_SCALE, give_grads, new_optimizer, new_scaler, plain_param, said

pytestmark = pytest.mark.distributed

INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None, reason="the CPU has Triton's interpreter without a GPU"
)
OTHER = 64.0  # rank 1's scale
DIFFERENT = "RuntimeError: The ranks hold different scales, some below "
FARTHEST = f"RuntimeError: The ranks hold different scales, from {INIT_SCALE} to {OTHER}: "


def means(ranks: int) -> str:
    """What a sum tells: all but one rank hold the initial scale, that one another."""
    mean, harmonic = ((ranks - 1) * INIT_SCALE + OTHER) / ranks, ranks / ((ranks - 1) / INIT_SCALE + 1 / OTHER)
    return f"{DIFFERENT}{harmonic:g}, some above {mean:g}: "


def stepped(rank: int, kind: str, layout: str, how: str) -> list[list[str]]:
    """Rank 1's scale is written over in the second step; what each says, for each of two optimizers."""
    scaler, params = new_scaler(kind), cases.LAYOUTS[layout]()
    optimizers, texts = [new_optimizer("sgd", [param]) for param in params], []
    for number in range(3):
        give_grads(scaler, params, number)
        if rank == 1 and number == 1:
            scaler._scale.fill_(OTHER)
        if how == "clip":
            scaler.clip_grad_norm_(optimizers, 1.0)
        if how == "unscale_":
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        texts.append([said(scaler.step, optimizer) for optimizer in optimizers])
        scaler.update(INIT_SCALE if number == 1 else None)
    return texts


@pytest.mark.parametrize("how", ["step", "unscale_", "clip"])
@pytest.mark.parametrize(("kind", "layout"), [("sharded", "line-shards"), ("grad", "line-shards"), ("grad", "hsdp")])
def test_different_scales_raise_on_every_rank(four, kind, layout, how):
    for first, apart, again in four.run(stepped, kind, layout, how):
        assert first == again == ["", ""]
        assert all(text.startswith(means(4) if how == "clip" else FARTHEST) for text in apart)


def asked(scaler: Any, optimizer: Any) -> str:
    """What `was_skipped` returns or raises."""
    answers: list[bool] = []
    return said(lambda: answers.append(scaler.was_skipped(optimizer))) or str(answers[0])


def clipped_a_factor_apart(rank: int, backend: str, dtypes: list[torch.dtype], factor: float) -> list[str]:
    """Rank 1's scale is so much larger; what is said of a clipped step, and of one of two optimizers."""
    texts = []
    for several in (1, 2):
        scaler = new_scaler("sharded", backend=backend)
        scaler.scale(torch.ones(()))
        params = [[plain_param(3, dtype=dtype) for dtype in dtypes] for _ in range(several)]
        optimizers = [new_optimizer("sgd-fused", each) for each in params]
        for param in (param for each in params for param in each):
            param.grad = torch.ones_like(param)
        if rank == 1:
            scaler._scale.mul_(factor)
        scaler.clip_grad_norm_(optimizers, 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
            texts.append(asked(scaler, optimizer))
    return texts


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=INTERPRETED)])
@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float32, torch.bfloat16]], ids=["one dtype", "two"])
def test_scales_that_differ_by_little_raise_wherever_they_are_compared(two, dtypes, backend):
    for factor, told in ((1.0, "False"), (1.001, DIFFERENT), (1.00001, DIFFERENT), (8.0, DIFFERENT)):
        for texts in two.run(clipped_a_factor_apart, backend, dtypes, factor):
            assert len(texts) == 3
            assert all(text.startswith(told) for text in texts), (factor, texts)


def asked_after_another_rank_failed(rank: int, backend: str) -> list[str]:
    """Rank 1 cannot clip; what was_skipped says of a fused step, before and after an update that clears the flags."""
    scaler, params = new_scaler("sharded", backend=backend), [plain_param(3)]
    optimizer = new_optimizer("adamw-fused", params)
    give_grads(scaler, params, 0)
    if rank == 1:
        params[0].grad = torch.ones(1).expand(3)
    said(scaler.clip_grad_norm_, optimizer, 1.0)
    scaler.step(optimizer)
    texts = [asked(scaler, optimizer)]
    scaler.update()
    return [*texts, asked(scaler, optimizer)]


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=INTERPRETED)])
def test_a_rank_that_failed_to_clip_is_not_taken_for_one_with_another_scale(two, backend):
    first, second = two.run(asked_after_another_rank_failed, backend)
    assert first[0].startswith("RuntimeError: Another rank failed to check its gradients")
    assert second == ["True", "True"]
    assert "scales" not in first[1]
