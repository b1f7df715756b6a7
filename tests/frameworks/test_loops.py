"""Loops as people write them: two ranks skip together, and train as with torch's scaler where that is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import loop_cases as loops
import pytest
import torch
from loop_cases import BAD_BATCH, BAD_SHARD, Outcome

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
Run = Callable[..., list[Any]]

WRAPPERS = pytest.mark.parametrize("wrapper", ["ddp", "fsdp1-full", "fsdp2"])
CLIPS = pytest.mark.parametrize("clip", ["torch", "ours"])
OPTIMIZERS = pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])


def assert_equal(mine: Outcome, other: Outcome) -> None:
    """Assert equality to the bit."""
    assert mine.scales == other.scales
    assert torch.equal(torch.tensor(mine.norms).nan_to_num(-1.0), torch.tensor(other.norms).nan_to_num(-1.0))
    assert all(map(torch.equal, mine.weights, other.weights))


def assert_trained_as_one(mine: Outcome, one: Outcome) -> None:
    """Assert that ranks trained as one process on all their batches."""
    assert mine.scales == one.scales
    for ours, expected in zip(mine.norms, one.norms, strict=True):
        if all(map(math.isfinite, expected)):
            assert ours == pytest.approx(expected, rel=1e-4)
    # Gradients are summed over the ranks in another order, and Adam divides tiny ones by their own size.
    for ours, expected in zip(mine.weights, one.weights, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-4)
        assert expected.isfinite().all()


def bad_steps(norms: Sequence[Sequence[float]]) -> list[int]:
    """Return the steps whose norm a loop sees to be NaN or infinite."""
    return [step for step, found in enumerate(norms) if not all(map(math.isfinite, found))]


@WRAPPERS
@OPTIMIZERS
@CLIPS
def test_verl(two: Run, wrapper: str, optimizer: str, clip: str) -> None:
    results = two(loops.verl, wrapper, "ours", optimizer, clip)
    references = loops.verl(None, wrapper, "torch-grad", "adamw", "torch")
    for which, reference in enumerate(references):
        mine, other = (result[which] for result in results)
        assert_equal(mine, other)
        assert_trained_as_one(mine, reference)
        assert bad_steps(mine.norms) == [BAD_BATCH + which, BAD_SHARD]
    assert results[0][0].scales == loops.SCALES


# torch's ShardedGradScaler warns of itself on DTensors; its GradScaler is right there.
TORCHS = pytest.mark.parametrize(
    ("wrapper", "torchs"), [("ddp", "torch"), ("fsdp1-full", "torch"), ("fsdp2", "torch-grad")]
)


@TORCHS
def test_verl_as_with_torchs_scaler(two: Run, wrapper: str, torchs: str) -> None:
    """To the bit, with the plain optimizer: with a fused one torch's sharded scaler is wrong."""
    mine, theirs = (two(loops.verl, wrapper, which, "adamw", "torch") for which in ("ours", torchs))
    for ours, other in zip(mine, theirs, strict=True):
        for learner, reference in zip(ours, other, strict=True):
            assert_equal(learner, reference)


@WRAPPERS
@OPTIMIZERS
@CLIPS
def test_dinov2(two: Run, wrapper: str, optimizer: str, clip: str) -> None:
    mine, other = two(loops.dinov2, wrapper, "ours", optimizer, clip)
    assert_equal(mine, other)
    assert mine.scales == loops.SCALES
    assert bad_steps(mine.norms) == [BAD_BATCH, BAD_SHARD]
    assert_trained_as_one(mine, loops.dinov2(None, wrapper, "torch-grad", "adamw", "torch"))


@TORCHS
def test_dinov2_as_with_torchs_scaler(two: Run, wrapper: str, torchs: str) -> None:
    mine, theirs = (two(loops.dinov2, wrapper, which, "adamw", "torch") for which in ("ours", torchs))
    assert_equal(mine[0], theirs[0])


@WRAPPERS
@OPTIMIZERS
@CLIPS
def test_gan(two: Run, wrapper: str, optimizer: str, clip: str) -> None:
    which = "ours" if wrapper.startswith("fsdp1") else "ours-grad"
    mine, other = two(loops.gan, wrapper, which, optimizer, clip)
    assert_equal(mine, other)
    assert mine.scales == loops.SCALES
    # Two norms a step, the generator's first: at BAD_BATCH it steps, the judge does not.
    assert bad_steps(mine.norms) == [2 * BAD_BATCH + 1, 2 * BAD_SHARD, 2 * BAD_SHARD + 1]
    assert_trained_as_one(mine, loops.gan(None, wrapper, "torch-grad", "adamw", "torch"))


@TORCHS
def test_gan_as_with_torchs_scaler(two: Run, wrapper: str, torchs: str) -> None:
    mine, theirs = (two(loops.gan, wrapper, which, "adamw", "torch") for which in ("ours", torchs))
    assert_equal(mine[0], theirs[0])
