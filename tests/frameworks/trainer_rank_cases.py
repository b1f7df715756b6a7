"""What two ranks run under the HF Trainer with FSDP1, on CPUs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate_cases
import cases
import test_hf_trainer as single
import torch
from transformers import Trainer, TrainingArguments

from scaler_triton.integrations.accelerate import use_scaler_triton

INIT_SCALE = 256.0
# Nothing is clipped: torch sums norms in fp32. With a fused optimizer torch's scaler splits the ranks at an overflow.
AS_TORCHS = {"optim": "adamw_torch", "max_grad_norm": 1e9}


class Overflowing(Trainer):  # type: ignore[misc]
    """A Trainer; in some steps this rank's shards overflow."""

    overflows: tuple[int, ...] = ()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run backward, and overflow after it."""
        loss = super().training_step(*args, **kwargs)
        if self.state.global_step in self.overflows:
            held = [cases.values_of(p.grad) for p in self.model.parameters() if p.grad is not None]
            next(values for values in held if values.numel()).view(-1)[0] = torch.inf
        return loss


class Sharded(Overflowing):
    """One with FSDP1, which the real one has on GPUs only."""

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, sharding as it would on GPUs."""
        super().create_accelerator_and_postprocess()
        accelerate_cases.shard(1, orig=True, whole=True)
        self.is_fsdp_enabled = True


@dataclass
class Report:
    """What a run left on one rank."""

    state: dict[str, Any]  # the scaler's
    rates: list[float]
    digests: list[str]  # of each parameter's local values
    overflows: tuple[int, int]  # updates and skips, of a scaler of ours


def train(rank: int, folder: Path, *, ours: bool = True, checkpoint: str | None = None, **options: Any) -> Report:
    """Train a fresh model, with an overflow on one rank in steps 1 and 4."""
    # transformers asks its own models by a name that it calls deprecated.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    with accelerate_cases.launched(rank), accelerate_cases.nothing_offloaded():
        arguments = TrainingArguments(str(folder), **single.DEFAULTS | options)
        model = single.new_model(seed=checkpoint is not None)  # a resumed run's own weights must not matter
        trainer = Sharded(model, arguments, train_dataset=single.samples())
        trainer.overflows = (1, 4) if rank == 1 else ()
        scaler = (use_scaler_triton if ours else accelerate_cases.use_torch)(trainer.accelerator)
        scaler.load_state_dict(scaler.state_dict() | {"scale": INIT_SCALE, "growth_interval": 2000})
        trainer.train(resume_from_checkpoint=checkpoint)
        return Report(
            scaler.state_dict(),
            single.logged(trainer, "learning_rate"),
            [cases.digest(parameter) for parameter in trainer.model.parameters()],
            (scaler.stats().updates, scaler.stats().skipped) if ours else (0, 0),
        )
