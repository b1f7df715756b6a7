"""A program: the HF Trainer's `fsdp="full_shard"`, in one process on a GPU, with our scaler.

    python trainer_on_gpu.py FSDP_VERSION FOLDER

It raises what is not as it should be. Needs this folder, the ranks' tests and the package on the path.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import cases
import test_hf_trainer as single
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from accelerate_cases import forget
from trainer_rank_cases import INIT_SCALE, Overflowing
from transformers import TrainingArguments

from scaler_triton import GradScaler, ShardedGradScaler
from scaler_triton.integrations.accelerate import use_scaler_triton

BAD_STEPS, STEPS = (1, 4), single.STEPS
SCALERS = {1: ShardedGradScaler, 2: GradScaler}


def new_trainer(version: int, folder: str, seed: int) -> tuple[Any, Any]:
    """Make a Trainer and its scaler; only the process group stays from one to the next."""
    forget()
    sharding = {"fsdp": "full_shard", "fsdp_config": {"version": version}}
    saving = {"save_strategy": "steps", "save_steps": 3}
    arguments = TrainingArguments(folder, **single.DEFAULTS | {"use_cpu": False} | sharding | saving)
    trainer = Overflowing(single.new_model(seed), arguments, train_dataset=single.samples())
    trainer.overflows = BAD_STEPS
    return trainer, use_scaler_triton(trainer.accelerator, init_scale=INIT_SCALE)


def check_kind(trainer: Any, scaler: Any, version: int) -> None:
    """See that this was FSDP on a GPU, with the scaler that it needs."""
    accelerator = trainer.accelerator
    assert accelerator.distributed_type == DistributedType.FSDP, accelerator.distributed_type
    assert accelerator.is_fsdp2 is (version == 2)
    assert dist.get_world_size() == 1
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"cuda"}
    assert type(scaler) is SCALERS[version], type(scaler)
    assert trainer.optimizer.scaler is scaler


def left(trainer: Any, scaler: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the scaler's state and the learning rates."""
    return scaler.state_dict(), single.logged(trainer, "learning_rate")


def assert_near(one: Any, other: Any) -> None:
    """See that weights are those of the same run: attention's backward need not be the same every time on a GPU."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    for mine, theirs in pairs:
        # No weight moves farther than by the learning rate, 5e-5 at most, in each of three steps.
        torch.testing.assert_close(cases.values_of(mine), cases.values_of(theirs), rtol=0, atol=1e-4)


def main(version: int, folder: str) -> None:
    """Train, and go on in another Trainer from the middle."""
    trainer, scaler = new_trainer(version, folder, seed=0)
    with mock.patch.object(scaler, "clip_grad_norm_", wraps=scaler.clip_grad_norm_) as clip:
        trainer.train()
    check_kind(trainer, scaler, version)
    assert [(call.args[1], call.kwargs["parameters"]) for call in clip.call_args_list] == [(1.0, None)] * STEPS
    assert (scaler.stats().updates, scaler.stats().skipped) == (STEPS, 2), scaler.stats()
    assert scaler.get_scale() == INIT_SCALE / 4
    rates, wanted = single.logged(trainer, "learning_rate"), [5e-5 * (1 - n / STEPS) for n in (0, 1, 1, 2, 3, 3)]
    assert all(abs(rate - other) < 1e-12 for rate, other in zip(rates, wanted, strict=True)), rates
    resumed, other = new_trainer(version, folder, seed=1)  # its own weights must not matter
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    assert left(resumed, other) == left(trainer, scaler)
    assert_near(resumed, trainer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
