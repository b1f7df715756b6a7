"""Composer's own checkpoints and Trainer with our scaler, beside torch's.

As a program it trains with Composer's Trainer on the CPU, saves a checkpoint and prints what happened:
`python test_composer.py torch|ours FOLDER [--sam] [--load CHECKPOINT]`.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peer import imported, make_importable

NUMBERS: dict[str, Any] = {"init_scale": 64.0, "growth_interval": 3}


def batches() -> Any:
    """Return twelve batches, of which two overflow."""
    inputs = torch.randn(24, 2, generator=torch.Generator().manual_seed(1))
    inputs[[6, 15]] = math.inf
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, torch.ones(24, 1)), batch_size=2)


def main(arguments: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    make_importable()
    if arguments.which == "ours":
        import scaler_triton

        scaler_triton.patch_torch()
    from composer import Callback
    from composer.algorithms.sam import sam
    from composer.models import ComposerModel
    from composer.trainer import trainer as its

    # Composer wants a GPU for fp16 and builds scalers for "cuda": here they are its own classes for the CPU.
    its._validate_precision = lambda *_: None
    its.GradScaler = functools.partial(its.GradScaler, "cpu", **NUMBERS)
    its.ClosureGradScaler = sam.ClosureGradScaler = functools.partial(its.ClosureGradScaler, "cpu", **NUMBERS)

    class Line(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1, bias=False)
            torch.nn.init.constant_(self.layer.weight, 0.5)

        def forward(self, batch: Any) -> torch.Tensor:
            return self.layer(batch[0])

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return (outputs - batch[1]).square().mean()

    class Record(Callback):
        steps: tuple[Any, ...] = ()

        def batch_end(self, state: Any, logger: Any) -> None:
            self.steps += ((state.scaler.get_scale(), state.model.layer.weight.flatten().tolist()),)

    model, record = Line(), Record()
    trainer = its.Trainer(
        model=model,
        train_dataloader=batches(),
        max_duration="2ep" if arguments.load else "1ep",
        precision="amp_fp16",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        callbacks=[record],
        algorithms=[sam.SAM()] if arguments.sam else [],
        save_folder=arguments.folder,
        save_filename="{epoch}.pt",
        load_path=arguments.load,
        progress_bar=False,
        device="cpu",
    )
    trainer.fit()
    home = [cls.__module__.partition(".")[0] for cls in type(trainer.state.scaler).__mro__]
    print(json.dumps({"steps": record.steps, "home": home}))


def run(which: str, folder: Path, *options: str) -> list[Any]:
    """Train an epoch in a process of its own; return scale and weights after every step."""
    make_importable()
    imported("composer")
    command = [sys.executable, __file__, which, str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert ("scaler_triton" in found["home"]) == (which == "ours")
    assert len({scale for scale, _ in found["steps"]}) > 1
    return found["steps"]


@pytest.mark.heavy
@pytest.mark.parametrize(("options", "key"), [((), "GradScaler"), (("--sam",), "ClosureGradScaler")])
def test_its_trainer_trains_and_resumes_as_with_torchs_scaler(
    options: tuple[str, ...], key: str, tmp_path: Path
) -> None:
    """To the bit, patched by `patch_torch()`; each also from the other's checkpoint. With SAM it derives its own class."""
    ours, theirs = (run(which, tmp_path / which, *options) for which in ("ours", "torch"))
    assert ours == theirs
    saved = [
        torch.load(tmp_path / which / "1.pt", weights_only=False)["state"]["scaler"] for which in ("ours", "torch")
    ]
    assert saved[0] == saved[1]
    assert set(saved[0]) == {key}
    ours = run("ours", tmp_path / "second", *options, "--load", str(tmp_path / "torch" / "1.pt"))
    assert ours == run("torch", tmp_path / "third", *options, "--load", str(tmp_path / "ours" / "1.pt"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("which", choices=["torch", "ours"])
    parser.add_argument("folder")
    parser.add_argument("--sam", action="store_true")
    parser.add_argument("--load")
    main(parser.parse_args())
