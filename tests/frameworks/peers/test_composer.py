"""Composer's own checkpoints and Trainer with our scaler, beside torch's.

As a program it trains with Composer's Trainer on the CPU, saves a checkpoint and prints what happened:
`python test_composer.py torch|ours FOLDER plain|sam [CHECKPOINT]`.
"""

import functools
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peer import make_importable, printed_by

NUMBERS: dict[str, Any] = {"init_scale": 64.0, "growth_interval": 3}


def main(which: str, folder: str, algorithm: str, checkpoint: str | None = None) -> None:
    warnings.simplefilter("ignore")
    make_importable()
    if which == "ours":
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

    # Twelve batches, of which two overflow.
    inputs = torch.randn(24, 2, generator=torch.Generator().manual_seed(1))
    inputs[[6, 15]] = math.inf
    data = torch.utils.data.TensorDataset(inputs, torch.ones(24, 1))
    model, record = Line(), Record()
    trainer = its.Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=2),
        max_duration="2ep" if checkpoint else "1ep",
        precision="amp_fp16",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        callbacks=[record],
        algorithms=[sam.SAM()] if algorithm == "sam" else [],
        save_folder=folder,
        save_filename="{epoch}.pt",
        load_path=checkpoint,
        progress_bar=False,
        device="cpu",
    )
    trainer.fit()
    home = [cls.__module__.partition(".")[0] for cls in type(trainer.state.scaler).__mro__]
    print(json.dumps([record.steps, home]))


def run(which: str, folder: Path, *options: str) -> tuple[list[Any], dict[str, Any]]:
    """Train an epoch in a process of its own; return scale and weights after every step, and the scaler's state."""
    saved = folder / "1.pt"
    steps, home = printed_by(__file__, which, str(folder), *options)
    assert ("scaler_triton" in home) == (which == "ours")
    assert len({scale for scale, _ in steps}) > 1
    return steps, torch.load(saved, weights_only=False)["state"]["scaler"] if saved.exists() else {}


@pytest.mark.heavy
@pytest.mark.parametrize("algorithm", ["plain", "sam"])
def test_its_trainer_trains_and_resumes_as_with_torchs_scaler(algorithm: str, tmp_path: Path) -> None:
    """To the bit, patched by `patch_torch()`; each also from the other's checkpoint. For SAM it derives a class."""
    ours, theirs = (run(which, tmp_path / which, algorithm) for which in ("ours", "torch"))
    assert ours == theirs
    assert set(ours[1]) == {"ClosureGradScaler" if algorithm == "sam" else "GradScaler"}
    ours = run("ours", tmp_path / "second", algorithm, str(tmp_path / "torch" / "1.pt"))
    assert ours == run("torch", tmp_path / "third", algorithm, str(tmp_path / "ours" / "1.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
