"""W&B, offline, and MLflow, on local files, get a scaler's and a guard's metrics: by hand, and by callbacks."""

import os
from pathlib import Path
from typing import Any

import pytest
from peer import imported, printed_by

imported("wandb")
imported("mlflow")

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

# What each program begins with: a scaler that has skipped a step, and a guard that has judged some norms.
BEGIN = """
import json, os, sys, warnings
warnings.simplefilter("ignore")  # what they warn of themselves
import torch
from peer import make_importable
make_importable()
from scaler_triton import GradScaler, StepGuard
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
scaler, guard = GradScaler("cpu", 8.0), StepGuard("cpu", spike_sigma=3.0, window=2)
def step(each, number):
    each.scale(torch.ones(()))
    parameter.grad = torch.tensor([number])
    each.step(optimizer)
    each.update()
def metrics_after(step_number):
    step(scaler, float("inf") if step_number == 2 else 8.0)
    step(guard, 1.0 + step_number)
    return {**scaler.metrics(), **guard.metrics()}
"""
WANDB = """
import wandb
with wandb.init(mode="offline", dir=sys.argv[1]) as run:
    for number in range(4):
        wandb.log(metrics_after(number), step=number)
    wandb.log({}, step=4)  # else the last is on its way
    print(json.dumps(dict(run.summary)))
"""
MLFLOW = """
import mlflow
mlflow.set_tracking_uri("file://" + sys.argv[1] + "/mlruns")
with mlflow.start_run() as run:
    for number in range(4):
        mlflow.log_metrics(metrics_after(number), step=number)
print(json.dumps(mlflow.MlflowClient().get_run(run.info.run_id).data.metrics))
"""
TRAINER = """
import mlflow, wandb
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from scaler_triton.integrations.accelerate import use_scaler_triton
from scaler_triton.integrations.trainer import LogScaler
mlflow.set_tracking_uri("file://" + sys.argv[1] + "/mlruns")
config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (64, 16))]
arguments = TrainingArguments(sys.argv[1], fp16=True, use_cpu=True, max_steps=4, logging_steps=1,
                              report_to=["wandb", "mlflow"], disable_tqdm=True, save_strategy="no")
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows)
use_scaler_triton(trainer.accelerator, init_scale=8.0)
trainer.add_callback(LogScaler(trainer))
trainer.train()
by_mlflow = mlflow.MlflowClient().search_runs(["0"])[0].data.metrics
print(json.dumps([dict(wandb.run.summary), by_mlflow]))
"""
LIGHTNING = """
import mlflow, wandb
import lightning.pytorch as pl
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from scaler_triton.integrations.lightning import LogScaler, mixed_precision
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
    def training_step(self, batch, index):
        return self.net(batch).float().sum()
    def train_dataloader(self):
        return torch.utils.data.DataLoader([torch.ones(1, 1)] * 4, batch_size=None)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
of_mlflow = MLFlowLogger(tracking_uri="file://" + sys.argv[1] + "/mlruns")
of_wandb = WandbLogger(offline=True, save_dir=sys.argv[1])
trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, log_every_n_steps=1, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, logger=[of_mlflow, of_wandb], callbacks=[LogScaler()],
    plugins=mixed_precision(pl.Trainer, GradScaler("cpu", 8.0), device="cpu"))
trainer.fit(Module())
print(json.dumps([dict(of_wandb.experiment.summary), of_mlflow.experiment.get_run(of_mlflow.run_id).data.metrics]))
"""


SCALER = {"scale": 4, "updates": 4, "skipped": 1, "skip_share": 0.25, "skipped_in_a_row": 0}
SCALER |= {"spikes": 0, "growths": 0, "backoffs": 1}
GUARD = {"updates": 4, "skipped": 0, "skip_share": 0, "skipped_in_a_row": 0, "spikes": 0, "norm": 4}
GOOD = {**SCALER, "scale": 8, "skipped": 0, "skip_share": 0, "backoffs": 0}  # where nothing overflows


def run(program: str, folder: Path) -> Any:
    """Run a program in a folder of its own; nothing is sent anywhere."""
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(folder), "HF_HUB_OFFLINE": "1"}
    quiet |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    quiet |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), str(ROOT), os.environ.get("PYTHONPATH")]))}
    return printed_by("-c", BEGIN + program, str(folder), **quiet)


def named(found: dict[str, Any], prefix: str) -> dict[str, float]:
    """Return the numbers with a prefix, without it."""
    return {name.removeprefix(prefix): number for name, number in found.items() if name.startswith(prefix)}


@pytest.mark.heavy
@pytest.mark.parametrize("program", [WANDB, MLFLOW], ids=["wandb", "mlflow"])
def test_what_metrics_returns_is_logged_by_one_line(program: str, tmp_path: Path) -> None:
    found = run(program, tmp_path)
    assert named(found, "scaler/") == SCALER
    guards = named(found, "guard/")
    assert guards.pop("limit") == pytest.approx(2.5 + 3.0 * 0.5**0.5)  # of the two norms before, 2 and 3
    assert guards == GUARD


@pytest.mark.heavy
@pytest.mark.parametrize(("program", "prefix"), [(TRAINER, "train/scaler/"), (LIGHTNING, "scaler/")], ids=["hf", "pl"])
def test_a_callbacks_metrics_reach_both(program: str, prefix: str, tmp_path: Path) -> None:
    by_wandb, by_mlflow = run(program, tmp_path)
    assert named(by_wandb, prefix) == GOOD  # transformers names what W&B gets
    assert named(by_mlflow, "scaler/") == GOOD
