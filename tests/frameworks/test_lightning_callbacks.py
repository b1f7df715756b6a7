"""Lightning's callbacks: schedulers and averages wait for the step, and metrics reach whatever the Trainer logs to."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from helpers import STRICT
from torch import Tensor, nn

from scaler_triton import GradScaler, StepGuard
from scaler_triton.integrations import lightning

NAMES = [name for name in ("lightning.pytorch", "pytorch_lightning") if find_spec(name.partition(".")[0])]
if not NAMES:
    pytest.skip("needs Lightning", allow_module_level=True)

SPACES = pytest.mark.parametrize("name", NAMES)
QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
ORDER = "Detected call of `lr_scheduler.step"


def trainer_of(name: str, scaler: Any = None, **options: Any) -> Any:
    """A Trainer whose scaler begins 24 halvings above what its module's gradients allow, or with another scaler."""
    cls = import_module(name).Trainer
    if isinstance(scaler, StepGuard):
        plugin = lightning.step_guard_precision(cls, scaler, device="cpu")
    else:
        plugin = lightning.mixed_precision(cls, scaler or GradScaler("cpu", 2.0**24), device="cpu")
    return cls(**{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **QUIET, "plugins": plugin, **options})


def module_of(name: str, fused: bool = False, steps: int = 32, **methods: Any) -> Any:
    """A module with gradients of 40,000, which overflow in fp16 at any scale of 2 or more; a scheduler a step and one
    an epoch."""

    class Module(import_module(name).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1, bias=False)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.net(batch).float().sum() * 40_000

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([torch.ones(1, 1)] * steps, batch_size=None)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=2.0**-20, fused=fused)
            linear = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=100)
            constant = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
            self.schedulers = linear, constant
            each = [{"scheduler": linear, "interval": "step"}, {"scheduler": constant, "interval": "epoch"}]
            return [optimizer], each

    return type("Module", (Module,), methods)()


def fit(trainer: Any, module: Any) -> list[str]:
    """Train; return what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    return [str(each.message) for each in caught]


def averaging(name: str, **methods: Any) -> Any:
    average = getattr(import_module(f"{name}.callbacks"), "WeightAveraging", None)
    if average is None:
        pytest.skip("this Lightning has no WeightAveraging")
    return type("Averaging", (average,), methods)()


@SPACES
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_schedulers_and_averages_wait_for_the_step(name: str, fused: bool) -> None:
    average = averaging(name)
    trainer, module = trainer_of(name, callbacks=[average, lightning.WaitForSkips()]), module_of(name, fused)
    warned = fit(trainer, module)
    assert (trainer.scaler.stats().skipped, trainer.scaler.stats().updates) == (24, 32)
    assert [each.last_epoch for each in module.schedulers] == [8, 1]
    assert average._average_model.n_averaged.item() == 8
    assert not any(ORDER in text for text in warned)
    assert "lr_scheduler_step" not in vars(module)
    assert "should_update" not in vars(average)


@SPACES
def test_without_it_they_do_not(name: str) -> None:
    """Where they do, Lightning has caught up."""
    average = averaging(name)
    trainer, module = trainer_of(name, callbacks=[average]), module_of(name)
    warned = fit(trainer, module)
    assert [each.last_epoch for each in module.schedulers] == [32, 1]
    assert average._average_model.n_averaged.item() == 32
    assert any(ORDER in text for text in warned)


def test_what_users_have_overridden_is_asked_after_the_step() -> None:
    name, seen = NAMES[0], []

    def lr_scheduler_step(self: Any, scheduler: Any, metric: Any) -> None:
        seen.append("scheduler" if scheduler is self.schedulers[0] else "epoch")
        scheduler.step()

    def should_update(self: Any, step_idx: Any = None, epoch_idx: Any = None) -> bool:
        seen.append((step_idx, epoch_idx))
        return epoch_idx is not None

    average = averaging(name, should_update=should_update)
    module = module_of(name, lr_scheduler_step=lr_scheduler_step)
    fit(trainer_of(name, callbacks=[lightning.WaitForSkips(), average]), module)
    steps = [entry for number in range(24, 32) for entry in ("scheduler", (number, None))]
    assert seen == [*steps[:-1], "epoch", steps[-1], (None, 0)]
    assert average._average_model.n_averaged.item() == 1


def test_a_batch_without_a_step_is_no_step() -> None:
    """One whose training step returns None, and those that accumulate; the last step before was a good one."""
    name = NAMES[0]

    def training_step(self: Any, batch: Tensor, index: int) -> Any:
        return None if index % 3 == 2 else self.net(batch).float().sum()

    average, module = averaging(name), module_of(name, steps=12, training_step=training_step)
    fit(trainer_of(name, GradScaler("cpu", 1.0), callbacks=[average, lightning.WaitForSkips()]), module)
    assert (module.schedulers[0].last_epoch, average._average_model.n_averaged.item()) == (8, 8)
    average, module = averaging(name), module_of(name, steps=12)
    options = {"accumulate_grad_batches": 3, "callbacks": [average, lightning.WaitForSkips()]}
    fit(trainer_of(name, GradScaler("cpu", 2.0**4), **options), module)  # 2 of 4 are skipped
    assert (module.schedulers[0].last_epoch, average._average_model.n_averaged.item()) == (2, 2)


def test_a_guards_steps_and_a_disabled_scalers() -> None:
    name = NAMES[0]

    def training_step(self: Any, batch: Tensor, index: int) -> Tensor:
        return self.net(batch).float().sum() * (float("nan") if index < 5 else 1.0)

    for scaler, stepped in ((StepGuard("cpu"), 3), (GradScaler("cpu", enabled=False), 8)):
        module = module_of(name, steps=8, training_step=training_step)
        fit(trainer_of(name, scaler, callbacks=[lightning.WaitForSkips()]), module)
        assert module.schedulers[0].last_epoch == stepped


def test_after_an_interrupted_run_it_holds_nothing() -> None:
    name, waits = NAMES[0], lightning.WaitForSkips()

    def interrupt(self: Any, optimizer: Any) -> None:
        raise ValueError("interrupted")

    module = module_of(name, on_before_optimizer_step=interrupt)
    own = module.lr_scheduler_step
    vars(module)["lr_scheduler_step"] = own  # of the module itself
    with pytest.raises(ValueError, match="interrupted"):
        trainer_of(name, callbacks=[waits]).fit(module)
    assert vars(module)["lr_scheduler_step"] is own
    assert waits._replaced == []


@pytest.mark.parametrize("callback", ["WaitForSkips", "LogScaler"])
def test_a_trainer_without_our_scaler_is_refused(callback: str) -> None:
    made = getattr(lightning, callback)()
    assert type(pickle.loads(pickle.dumps(made))) is type(made)
    cls = import_module(NAMES[0]).Trainer
    plugin = import_module(f"{NAMES[0]}.plugins").MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    for options, got in (({"plugins": plugin}, "GradScaler"), ({}, "none")):
        trainer = cls(accelerator="cpu", devices=1, max_epochs=1, callbacks=[made], **QUIET, **options)
        text = f"{callback} needs a scaler or a guard of scaler_triton, got {got}: Trainer"
        with pytest.raises(TypeError, match=text):
            trainer.fit(module_of(NAMES[0]))


@SPACES
@pytest.mark.parametrize("prefix", [None, "amp/"])
def test_metrics_are_logged_when_the_trainer_logs(name: str, prefix: str | None, tmp_path: Any) -> None:
    logger = import_module(f"{name}.loggers").CSVLogger(tmp_path, name="", version="")
    logs = lightning.LogScaler() if prefix is None else lightning.LogScaler(prefix)
    trainer = trainer_of(name, callbacks=[logs], logger=logger, log_every_n_steps=8)
    fit(trainer, module_of(name))
    head, *rows = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    column = {title: [float(row[head.index(title)]) for row in rows] for title in head if title != "epoch"}
    prefix = prefix or "scaler/"
    assert column["step"] == [7, 15, 23, 31]
    assert column[f"{prefix}skipped"] == column[f"{prefix}backoffs"] == [8, 16, 24, 24]
    assert column[f"{prefix}scale"] == [2.0**16, 2.0**8, 1.0, 1.0]
    assert column[f"{prefix}skipped_in_a_row"] == [8, 16, 24, 0]
    assert trainer.callback_metrics[f"{prefix}updates"] == 32


def test_a_guards_metrics_have_its_prefix(tmp_path: Any) -> None:
    logger = import_module(f"{NAMES[0]}.loggers").CSVLogger(tmp_path, name="", version="")
    guard = StepGuard("cpu", spike_sigma=6.0, window=4)
    fit(
        trainer_of(NAMES[0], guard, callbacks=[lightning.LogScaler()], logger=logger, log_every_n_steps=4),
        module_of(NAMES[0]),
    )
    head = (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"guard/norm", "guard/limit", "guard/skipped_in_a_row"} <= {*head}
    assert "guard/scale" not in head


def test_lightning_is_imported_only_for_its_callbacks() -> None:
    code = "import sys; from scaler_triton.integrations import lightning; print('lightning' in sys.modules, "
    code += "'pytorch_lightning' in sys.modules)"
    done = subprocess.run([sys.executable, *STRICT, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
    with pytest.raises(AttributeError, match="has no attribute 'WaitForNothing'"):
        lightning.WaitForNothing  # noqa: B018
