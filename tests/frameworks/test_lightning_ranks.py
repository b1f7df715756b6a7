"""Lightning on two ranks, one of which overflows: both skip, hold one scale, and train as one process does."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning_cases as cases
import lightning_rank_cases as ranks
import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.distributed

Run = Callable[..., list[Any]]

# How far the weights may end from one process's. Gradients are the same but for the order of sums in fp32; Lightning
# has FSDP1 keep and reduce them in fp16.
TOLERANCES = {"ddp": 1e-6, "fsdp1": 1e-3, "fsdp1-no-shard": 1e-3, "fsdp2": 1e-6}
OWN_PLUGINS = pytest.mark.parametrize("strategy", ["fsdp1-own", "fsdp1-patched"])


@pytest.fixture
def name() -> str:
    """The first namespace that is installed: they differ in nothing but the name."""
    installed = [name for name in cases.NAMESPACES if find_spec(name)]
    if not installed:
        pytest.skip("needs Lightning")
    return installed[0]


def in_one_process(optimizer_name: str, clip: float | None) -> Tensor:
    """Train on both ranks' batches by torch's scaler; the bad steps are skipped."""
    net, scaler = cases.network(), cases.theirs()
    optimizer = cases.new_optimizer(optimizer_name, net.parameters())
    for pair in zip(ranks.data_of(0), ranks.data_of(1), strict=True):
        optimizer.zero_grad()
        for batch in pair:
            with torch.autocast("cpu", torch.float16):
                loss = net(batch).float().square().mean() / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), clip or 1e9)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == cases.SCALES[-1]
    return cases.values(net)


@pytest.mark.parametrize("clip", [None, cases.MAX_NORM], ids=["", "clip"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw-fused"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp1-no-shard", "fsdp2"])
def test_trainer(two: Run, name: str, strategy: str, optimizer: str, clip: float | None) -> None:
    (scales, mine), (other_scales, other) = two(ranks.trainer_fit, name, strategy, optimizer, clip)
    assert scales == other_scales == cases.SCALES
    assert torch.equal(mine, other)
    expected = in_one_process(optimizer.removesuffix("-fused"), clip)
    torch.testing.assert_close(mine, expected, rtol=0, atol=TOLERANCES[strategy])


@OWN_PLUGINS
@pytest.mark.parametrize("optimizer", ["sgd", "adamw-fused"])
@pytest.mark.parametrize("case", [ranks.trainer_fit, ranks.fabric_fit])
def test_lightnings_own_fsdp_plugin(two: Run, name: str, case: Any, strategy: str, optimizer: str) -> None:
    """With a scaler of ours that it is given, or makes itself under `patch_torch`; it clips nothing."""
    (scales, mine), (other_scales, other) = two(case, name, strategy, optimizer, None)
    assert scales == other_scales == cases.SCALES
    assert torch.equal(mine, other)
    expected = in_one_process(optimizer.removesuffix("-fused"), None)
    torch.testing.assert_close(mine, expected, rtol=0, atol=TOLERANCES["fsdp1"])


def test_the_other_namespace(two: Run) -> None:
    other = [name for name in cases.NAMESPACES if find_spec(name)][1:]
    for name in other:
        (scales, mine), (_, theirs) = two(ranks.trainer_fit, name, "fsdp1", "adamw-fused", cases.MAX_NORM)
        assert scales == cases.SCALES
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("saver", "loader", "optimizer"),
    [
        ("fsdp1", "fsdp1", "adamw"),
        ("fsdp1", "fsdp1", "adamw-fused"),
        # Of Lightning's own plugin with torch's scaler, which splits the ranks of a fused optimizer.
        ("fsdp1-torch", "fsdp1", "adamw"),
        ("fsdp1", "fsdp1-torch", "adamw"),
    ],
)
def test_fsdp_resumes_to_the_bit(two: Run, name: str, saver: str, loader: str, optimizer: str, tmp_path: Path) -> None:
    results = two(ranks.fsdp_resumed, name, optimizer, str(tmp_path), saver, loader)
    assert results == [(cases.SCALES, True)] * 2


@pytest.mark.parametrize("clip", ["", "fabric", "scaler"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw-fused"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_fabric(two: Run, name: str, strategy: str, optimizer: str, clip: str) -> None:
    (scales, mine), (other_scales, other) = two(ranks.fabric_fit, name, strategy, optimizer, clip)
    assert scales == other_scales == cases.SCALES
    assert torch.equal(mine, other)
    expected = in_one_process(optimizer.removesuffix("-fused"), cases.MAX_NORM if clip else None)
    torch.testing.assert_close(mine, expected, rtol=0, atol=TOLERANCES[strategy])
