"""What is trained: the ranks against the single process, in every mode, small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from scaler_triton.demo import train
from scaler_triton.demo.checks import judge, parameters_match
from scaler_triton.demo.config import DemoConfig
from scaler_triton.demo.model import CharTransformer, ModelSize
from scaler_triton.demo.ranks import RankPool
from scaler_triton.demo.single_process import Reference, one_thread, train_reference
from scaler_triton.demo.text import python_topics
from scaler_triton.demo.trace import Trace

SMALL = ModelSize(layers=2, width=16, heads=2, context=16)


def small(scaler: str, mode: str, optimizer: str = "adamw", steps: int = 24) -> DemoConfig:
    """A run of a second or so."""
    return DemoConfig(scaler, mode, optimizer, steps, 1 if mode == "single" else 2, size=SMALL)


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """A rank takes one thread; this process gets its own back."""
    with one_thread():
        yield


@pytest.fixture(scope="module")
def pool(strict_ranks: None) -> Iterator[RankPool]:
    with RankPool(2) as opened:
        yield opened


@pytest.fixture
def feed(tmp_path: Path) -> str:
    return str(tmp_path / "feed")


def train_two(pool: RankPool, config: DemoConfig, feed: str) -> list[Trace]:
    """What two ranks went through."""
    results = pool.run(train.train_rank, config, feed)
    assert all(result.ok for result in results), results
    return [result.value for result in results]


def failures(ranks: list[Trace], config: DemoConfig) -> list[str]:
    """What the verdict finds."""
    reference = reference_of(replace(config, scaler="ours", mode="fsdp2"))
    return [check.text for check in judge(ranks, reference) if not check.ok]


@cache
def reference_of(config: DemoConfig) -> Trace:
    """The single process, which knows of neither mode nor scaler."""
    return train_reference(config)


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["ddp", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "sgd"])
def test_our_ranks_agree_and_match_one_process(mode: str, optimizer: str, pool: RankPool, feed: str) -> None:
    config = small("ours", mode, optimizer)
    assert failures(train_two(pool, config, feed), config) == []
    assert len(Path(feed).read_text().splitlines()) == config.steps


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["ddp", "fsdp1"])
def test_torchs_ranks_split_with_a_fused_optimizer(mode: str, pool: RankPool, feed: str) -> None:
    config = small("torch", mode, "adamw-fused")
    found = "\n".join(failures(train_two(pool, config, feed), config))
    assert "the scales of the ranks split after step 5" in found
    assert "step counts differ" in found
    assert "do NOT match a single process" in found


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "sgd"])
@pytest.mark.parametrize("scaler", ["ours", "torch"])
def test_one_process_matches_the_loop_by_hand(scaler: str, optimizer: str, feed: str) -> None:
    config = small(scaler, "single", optimizer)
    assert failures([train.train_rank(0, config, feed)], config) == []


def test_a_disabled_scaler_is_found(feed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "new_scaler", lambda config, device: torch.amp.GradScaler("cpu", enabled=False))
    config = small("ours", "single", steps=6)
    assert "the scaler is disabled on rank 0" in failures([train.train_rank(0, config, feed)], config)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_noise_in_the_last_bits_is_within_the_tolerance(optimizer: str) -> None:
    class Noisy(Reference):
        def _unscale(self) -> bool:
            good = super()._unscale()
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1 + 1e-7 * torch.randn(parameter.shape))
            return good

    config = small("ours", "fsdp2", optimizer)
    noisy = Noisy(config)
    for step in range(config.steps):
        noisy.train_step(step)
    check = parameters_match([noisy.finish()], reference_of(config))
    assert check.ok
    assert "relative distance" in check.text


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_one_step_too_many_is_beyond_the_tolerance(optimizer: str) -> None:
    config = small("ours", "fsdp2", optimizer)
    one_too_many = Reference(config)
    last_bad = max(config.bad_shards)
    for step in range(config.steps):
        if step == last_bad:
            one_too_many._accumulate(step)
            one_too_many._unscale()
            one_too_many.optimizer.step()
            one_too_many.optimizer.zero_grad()
        one_too_many.train_step(step)
    assert not parameters_match([one_too_many.finish()], reference_of(config)).ok


def test_growth_and_backoff_are_both_seen() -> None:
    scales = reference_of(small("ours", "fsdp2")).scales
    steps = list(pairwise(scales))
    assert any(after == 2 * before for before, after in steps)
    assert sum(after == before / 2 for before, after in steps) == 3


@pytest.mark.parametrize("steps", range(6, 60))
def test_three_steps_are_bad_and_not_on_one_rank_only(steps: int) -> None:
    bad = DemoConfig("ours", "fsdp2", "adamw", steps).bad_shards
    assert len(bad) == 3
    assert set(bad.values()) == {0, 1}
    assert 0 < min(bad) <= max(bad) < steps - 1


def test_the_text_is_real_and_its_batches_are_repeatable() -> None:
    text = python_topics()
    inputs, targets = text.batch(3, 1, 2, 8)
    assert inputs.shape == targets.shape == (2, 8)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(text.batch(3, 1, 2, 8)[0], inputs)
    assert not torch.equal(text.batch(3, 0, 2, 8)[0], inputs)
    assert "statement" in "".join(text.vocabulary[code] for code in text.codes[:50_000])


def test_the_model_does_not_look_ahead() -> None:
    model = CharTransformer(5, SMALL)
    torch.nn.init.normal_(model.positions)
    inputs = torch.zeros(1, 16, dtype=torch.int64)
    changed = inputs.clone()
    changed[0, 9] = 1
    seen: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda module, args, out: seen.append(out))
    for tokens in (inputs, changed):
        model(tokens, tokens)
    assert torch.equal(seen[0][:, :9], seen[1][:, :9])
    assert not torch.equal(seen[0][:, 9:], seen[1][:, 9:])
