"""What is trained in one process."""

from dataclasses import replace

import pytest

from scaler_triton.demo.model import ModelSize
from scaler_triton.demo.show import judge
from scaler_triton.demo.train import Config, train_alone, train_rank

SINGLE = Config("ours", "single", "adamw", 24, 1, size=ModelSize(layers=2, width=16, heads=2, context=16))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "sgd"])
@pytest.mark.parametrize("scaler", ["ours", "torch"])
def test_one_process_passes_every_check(scaler: str, optimizer: str) -> None:
    config = replace(SINGLE, scaler=scaler, optimizer=optimizer)
    reference = train_alone(0, replace(config, scaler="torch"))
    assert all(ok for ok, _ in judge([train_rank(0, config)], reference))
