"""The Python blocks of the frameworks' pages run as they are shown."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from page_blocks import TEXTS, frameworks, run
from torch import Tensor, nn

pytestmark = [
    # These tests find out whether another version works.
    pytest.mark.filterwarnings("ignore:.* is installed. scaler_triton was tested with:UserWarning"),
    # Each says what it will not do, or could do with another package.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning"),
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX` has been removed:UserWarning"),
    # transformers asks its own models by a name that it calls deprecated.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
# page -> what holds when its blocks have run
AFTER = {
    "docs/accelerate.md": "'scaler_triton.grad_scaler' == type(accelerator.scaler).__module__",
    "docs/lightning.md": "'scaler_triton.sharded' == type(trainer.scaler).__module__"
    " and 'scaler_triton.grad_scaler' == type(fabric.strategy.precision.scaler).__module__",
    "docs/trainer.md": "trainer.state.global_step == trainer.accelerator.scaler.stats().updates == 3",
}


class Net(nn.Module):
    """A model such as the Trainer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.layer(x).float(), labels)}


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a GPU, or Lightning thinks so: before training starts it does nothing with one."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


BEFORE = {
    "docs/accelerate.md": "first_accelerator",
    "docs/lightning.md": "a_gpu",
    "docs/trainer.md": "first_accelerator",
}


@pytest.mark.native
@pytest.mark.parametrize("page", [page for page in TEXTS if frameworks(page)])
def test_a_pages_blocks_run(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for package in frameworks(page):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    request.getfixturevalue(BEFORE[page])
    request.getfixturevalue("monkeypatch").chdir(tmp_path)  # the Trainer leaves files
    names: dict[str, Any] = {"model": Net(), "data": [{"x": torch.ones(4), "labels": torch.ones(2)}] * 8}
    run(page, names)
    assert eval(AFTER[page], names)
