"""What is trained in one process, and that the tolerance lies between rounding and one step too many."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")

from scaler_triton.demo.model import ModelSize
from scaler_triton.demo.show import judge
from scaler_triton.demo.train import Config, Trace, new_model, train, train_alone, train_rank

SINGLE = Config("ours", "single", "adamw", 24, 1, size=ModelSize(layers=2, width=16, heads=2, context=16))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Have this process sum in the order of a rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def reference_of(config: Config) -> Trace:
    """Return what the single process goes through."""
    return train_alone(0, replace(config, scaler="torch"))


def failures(trace: Trace, config: Config) -> list[str]:
    """Return the checks that fail."""
    return [text for ok, text in judge([trace], reference_of(config)) if not ok]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "sgd"])
@pytest.mark.parametrize("scaler", ["ours", "torch"])
def test_one_process_passes(scaler: str, optimizer: str) -> None:
    config = replace(SINGLE, scaler=scaler, optimizer=optimizer)
    assert failures(train_rank(0, config), config) == []


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_tolerance_lies_between_noise_in_the_last_bits_and_one_step_too_many(optimizer: str) -> None:
    config = replace(SINGLE, optimizer=optimizer, ranks=2)
    last_bad, reference = max(config.bad_shards), reference_of(config)
    assert {b / a for a, b in pairwise(reference.scales)} == {0.5, 1.0, 2.0}

    class Noisy(torch.amp.GradScaler):
        def step(self, optimizer: torch.optim.Optimizer, *args: Any) -> float | None:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad.mul_(1 + 1e-7 * torch.randn(parameter.shape))
            return super().step(optimizer, *args)

    class OneTooMany(torch.amp.GradScaler):
        steps = 0

        def step(self, optimizer: torch.optim.Optimizer, *args: Any) -> float | None:
            for parameter in optimizer.param_groups[0]["params"] if self.steps == last_bad else ():
                parameter.grad.nan_to_num_(posinf=0.0)
            self.steps += 1
            return super().step(optimizer, *args)

    noisy, one_too_many = (train(config, new_model(0, config), each, range(2)) for each in (Noisy, OneTooMany))
    assert failures(noisy, config) == []
    assert any("relative distance" in text for _, text in judge([noisy], reference))
    assert any("parameters do NOT match" in text for text in failures(one_too_many, config))


@pytest.mark.parametrize("steps", [*range(6, 60), 128])
def test_three_steps_are_bad_and_not_on_one_rank_only(steps: int) -> None:
    bad = Config("ours", "fsdp2", "adamw", steps).bad_shards
    assert len(bad) == 3
    assert set(bad.values()) == {0, 1}
    assert 0 < min(bad) <= max(bad) < steps - 1
