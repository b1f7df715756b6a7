"""Trains with DeepSpeed's engine on the CPU, saves halfway and writes down the scales of the rest.

Run by `python deepspeed_run.py STAGE FOLDER`.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from pathlib import Path

import torch

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")

import deepspeed
from deepspeed.accelerator import get_accelerator

BEFORE, REST = (True, False, False, True, False, False), (False, False, True, True, True)


def main(stage: int, folder: Path) -> None:
    get_accelerator().is_fp16_supported = lambda: True  # it asks the machine; a layer this small runs on any
    its_backend = importlib.import_module("deepspeed.comm.torch")  # the attribute of that name is torch
    its_backend.build_shm_op = lambda: None  # one rank shares no memory: nothing is compiled
    model = torch.nn.Linear(3, 3, bias=False)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        config={
            "train_batch_size": 1,
            "fp16": {
                "enabled": True,
                "initial_scale_power": 6,
                "loss_scale_window": 2,
                "hysteresis": 2,
                "min_loss_scale": 1,
            },
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )

    def train(bad: bool) -> float:
        loss = engine(torch.ones(1, 3, dtype=torch.half)).sum()
        engine.backward(loss * math.inf if bad else loss)
        engine.step()
        return float(optimizer.loss_scale)

    for bad in BEFORE:
        train(bad)
    engine.save_checkpoint(str(folder))
    (folder / "rest.json").write_text(json.dumps([REST, [train(bad) for bad in REST]]))
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
