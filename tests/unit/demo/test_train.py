"""What is trained in one process, and which shards of a batch are bad."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")

from scaler_triton.demo.model import ModelSize
from scaler_triton.demo.show import judge
from scaler_triton.demo.train import Config, Trace, train_alone, train_rank

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


@pytest.mark.parametrize("steps", [*range(6, 60), 128])
def test_three_steps_are_bad_and_not_on_one_rank_only(steps: int) -> None:
    bad = Config("ours", "fsdp2", "adamw", steps).bad_shards
    assert len(bad) == 3
    assert set(bad.values()) == {0, 1}
    assert 0 < min(bad) <= max(bad) < steps - 1
