"""Trains with Composer's Trainer on the CPU, by torch's scaler or by ours, saves a checkpoint, prints what happened.

Run by `python composer_run.py torch|ours FOLDER [--sam] [--load CHECKPOINT]`.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import warnings
from typing import Any

import torch
from composer_parts import line, make_importable

warnings.simplefilter("ignore")


def batches() -> Any:
    """Return twelve batches, of which two overflow."""
    inputs = torch.randn(24, 2, generator=torch.Generator().manual_seed(1))
    inputs[[6, 15]] = math.inf
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, torch.ones(24, 1)), batch_size=2)


def main(arguments: argparse.Namespace) -> None:
    make_importable()
    if arguments.which == "ours":
        import scaler_triton

        scaler_triton.patch_torch()
    from composer import Callback
    from composer.algorithms.sam import sam
    from composer.trainer import trainer as its

    # Composer wants a GPU for fp16 and builds scalers for "cuda": here they are its own classes for the CPU.
    its._validate_precision = lambda *_: None
    numbers: dict[str, Any] = {"init_scale": 64.0, "growth_interval": 3}
    its.GradScaler = functools.partial(its.GradScaler, "cpu", **numbers)
    its.ClosureGradScaler = sam.ClosureGradScaler = functools.partial(its.ClosureGradScaler, "cpu", **numbers)

    class Record(Callback):
        steps: tuple[Any, ...] = ()

        def batch_end(self, state: Any, logger: Any) -> None:
            self.steps += ((state.scaler.get_scale(), state.model.layer.weight.flatten().tolist()),)

    model, record = line(), Record()
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("which", choices=["torch", "ours"])
    parser.add_argument("folder")
    parser.add_argument("--sam", action="store_true")
    parser.add_argument("--load")
    main(parser.parse_args())
