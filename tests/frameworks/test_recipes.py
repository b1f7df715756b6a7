"""The recipes of the documentation and the blocks of the frameworks' pages run, and do what the pages say."""

import os
import re
import subprocess
import sys
import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import STRICT, started
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from scaler_triton import GradScaler

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RANKS = 1 if torch.cuda.is_available() else 2  # NCCL takes one rank a GPU
SKIPS = [f"rank {rank}, step 10: {who} skipped" for rank in range(RANKS) for who in ("actor", "critic")]
ANOMALY = ["the loss was 1.", "Function 'PowBackward0' returned nan values"]
GUARDED = ["step 20: ", "  NaN  ", "step 30: ", "spike: norm "]

# recipe and arguments -> the ranks that torchrun starts, 0 for none; the package that it needs; what it says; leaves
RECIPES: dict[str, tuple[int, str, list[str], set[str]]] = {
    "step.py": (0, "torch", ["step 30 was skipped", "0.weight   Inf"], set()),
    "save_bad_batch.py": (0, "torch", ["step 20: ", "  NaN  ", *ANOMALY], {"bad-20-0.pt"}),
    "wait_for_step.py": (0, "torch", ["40 batches, 37 averaged; lr 0.008150"], set()),
    "with_accelerate.py": (0, "accelerate", ["step 3 was skipped", "updates=64, "], {"checkpoint"}),
    "trainer.py": (0, "transformers", ["ScalerStats(updates=20, "], {"counting"}),
    "with_lightning.py": (0, "lightning", ["70 of 80 averaged; lr 0.005625", "The last skip"], set()),
    "with_fabric.py": (0, "lightning", ["The last skip"], set()),
    "verl_style.py": (RANKS, "torch", SKIPS, set()),
    "dinov2_style.py": (RANKS, "torch", ["step 39: backbone "], set()),
    "trainer_metrics.py": (0, "transformers", ["scaler/bits", " gradients are zero, "], {"counting"}),
    "compile.py aot_eager": (0, "torch", ["scale 1024.0\n"], set()),
    "guard.py": (0, "torch", GUARDED, set()),
    "guard.py ddp": (RANKS, "torch", GUARDED, set()),
    "guard.py fsdp2": (RANKS, "torch", GUARDED, set()),
    "fp16_spikes.py": (
        0,
        "torch",
        ["step 20, scaler: ", "step 30, guard: ", "spike: norm ", "39 judged, 1 spike"],
        set(),
    ),
    "guard_accelerate.py": (0, "accelerate", GUARDED, set()),
    "guard_trainer.py": (0, "transformers", ["  NaN  ", "updates=32, skipped=1"], {"guarded"}),
    "guard_lightning.py": (0, "lightning", GUARDED, set()),
    "torchtitan_style.py": (RANKS, "torch", [*GUARDED, "balanced 38 times, 1280 tokens in all"], set()),
}
# Another of the same kind is run each time, these with `make test-frameworks`.
HEAVY = {"with_fabric.py", "dinov2_style.py", "trainer_metrics.py", "guard.py ddp", "guard_lightning.py"}
# Beginnings of what others warn of: the Trainer and its data loader, Lightning's advice, torch about both and itself.
IGNORED = [
    "'pin_memory' argument is set as true but no accelerator is found",
    "The 'train_dataloader' does not have many workers",
    "`isinstance(treespec, LeafSpec)` is deprecated",
    "`torch.jit.script_method` is",
    "`torch.cpu.amp.autocast(args...)` is deprecated",
    "`is_gradient_checkpointing` is deprecated",
    "Guards may run slower on Python 3.13.0",
    "Anomaly Detection has been enabled",
    "Error detected in PowBackward0",
]


def run(name: str, folder: Path, ranks: int, *arguments: str, **variables: str) -> str:
    """Run a recipe in `folder` with warnings as errors; return its output."""
    filters = [option for known in IGNORED for option in ("-W", f"ignore:{known}")]
    if torch.cuda.is_available():  # other packages are there, and what they use may be deprecated
        filters += ["-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    fixed = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder.parent)}
    command = [sys.executable, *STRICT, *filters, *torchrun, str(DOCS / "recipes" / name), *arguments]
    environment, pipes = os.environ | fixed | variables, {"capture_output": True, "text": True}
    done = subprocess.run(command, cwd=folder, env=environment, timeout=240, check=False, **pipes)
    assert done.returncode == 0, done.stderr
    return re.sub(r"^\[Gloo\].*\n", "", done.stdout, flags=re.MULTILINE)  # with torch 2.10 it tells of its peers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in one that takes temporary files."""
    (tmp_path / "recipe").mkdir()
    return tmp_path / "recipe"


@pytest.mark.native
@pytest.mark.parametrize(
    "recipe", [pytest.param(each, marks=[pytest.mark.heavy] * (each in HEAVY)) for each in RECIPES]
)
def test_a_recipe_does_what_it_says(recipe: str, folder: Path) -> None:
    ranks, package, says, leaves = RECIPES[recipe]
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")
    name, *arguments = recipe.split()
    printed = run(name, folder, ranks, *arguments)
    assert [text for text in says if text not in printed] == []
    assert {path.name for path in folder.iterdir()} == leaves


def test_tensorboard_reads_what_was_logged(folder: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert " of headroom, " in run("log_metrics.py", folder, 0)
    read = events.EventAccumulator(str(folder / "runs")).Reload()
    of_the_scale = ["scale", "updates", "skipped", "skip_share", "skipped_in_a_row", "spikes", "growths", "backoffs"]
    measured = ["largest", "bits", "zeros", "subnormal"]
    assert read.Tags()["scalars"] == [f"scaler/{name}" for name in (*of_the_scale, *measured)]
    assert [(each.step, each.value) for each in read.Scalars("scaler/updates")] == [(n, n) for n in (10, 20, 30, 40)]


@pytest.mark.distributed
def test_a_checkpoint_goes_on_with_another_number_of_ranks(folder: Path) -> None:
    """Two ranks even where there is one GPU; then one, by torchrun's variables."""
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    assert run("checkpoint.py", folder, 2, str(folder), **on_cpu) == "3 updates, scale 512.0\n" * 2
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    assert run("checkpoint.py", folder, 0, str(folder), **on_cpu, **alone) == "6 updates, scale 2048.0\n"


def test_a_recipe_that_wants_a_folder_says_so() -> None:
    words = [sys.executable, DOCS / "recipes/checkpoint.py"]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "torchrun --nproc-per-node 4 checkpoint.py FOLDER" in done.stderr


# page -> what it needs, and what holds when its blocks have run
PAGES = {
    "accelerate.md": (
        "accelerate",
        "'scaler_triton.grad_scaler' == type(accelerator.scaler).__module__ and guarded.scaler is guard",
    ),
    "lightning.md": (
        "lightning",
        "[type(each).__name__ for each in (trainer.scaler, fabric.strategy.precision.scaler, guarded.scaler)]"
        " == ['ShardedGradScaler', 'GradScaler', 'StepGuard']",
    ),
    "log.md": (
        "lightning tensorboard",
        "[len(each) for each in logged] == [8] * 4 and issubclass(Logged, LightningModule)"
        " and 'LogScaler' in {type(each).__name__ for each in trainer.callbacks}",
    ),
    "schedulers.md": (
        "lightning",
        "(scheduler.last_epoch, average.n_averaged) == (1, 2)"
        " and 'WaitForSkips' in {type(each).__name__ for each in trainer.callbacks}",
    ),
    "t4-v100.md": ("transformers", "trainer.state.global_step == trainer.accelerator.scaler.stats().updates == 3"),
    "trainer.md": (
        "transformers",
        "trainer.state.global_step == trainer.accelerator.scaler.stats().updates == 3"
        " and guarded.accelerator.scaler is guard",
    ),
    "troubleshooting.md": (
        "lightning transformers",
        "accelerator.clip_grad_norm_.called and type(trainer.accelerator.scaler) is GradScaler"
        " and tuple(scaler.limits)[::3] == (1.0, 50)",
    ),
}


class Net(nn.Module):
    """A model such as the Trainer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.layer(x).float(), labels)}


def taken_for_granted(page: str) -> dict[str, Any]:
    """Return the names that blocks use without making them; a scaler has taken a step."""
    model, batch, logged = Net(), torch.full((2, 4), 0.01), []
    optimizer, scaler = torch.optim.AdamW(model.parameters()), GradScaler("cpu")

    def train(batch: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(batch, torch.ones(2, 2))["loss"]).backward()
        scaler.step(optimizer)
        scaler.update()

    train(batch)
    names = {"model": model, "optimizer": optimizer, "scaler": scaler, "train": train, "logged": logged}
    names |= {"scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer), "average": AveragedModel(model)}
    names |= {"loss": model(batch, torch.ones(2, 2))["loss"], "batches": [batch] * 2, "device": batch.device}
    names |= {"data": [{"x": torch.ones(4), "labels": torch.ones(2)}] * 8}
    names |= {"accelerator": mock.MagicMock(optimizer_step_was_skipped=False)}
    names |= {"container": optimizer, "manager": mock.MagicMock(), "state": mock.MagicMock()}
    if page in ("t4-v100.md", "troubleshooting.md"):
        from transformers import Trainer, TrainingArguments

        names["trainer"] = Trainer(model, TrainingArguments("out", fp16=True), train_dataset=names["data"])
    return names


def loggers(logged: list[Any]) -> dict[str, Any]:
    """Return stand-ins for loggers; tests/frameworks/peers has the real ones."""
    run = SimpleNamespace(log=lambda metrics, step: logged.append(metrics), finish=lambda: None)
    logs = {"start_run": nullcontext, "log_metrics": lambda metrics, step: logged.append(metrics)}
    return {"wandb": SimpleNamespace(init=lambda project: run), "mlflow": SimpleNamespace(**logs)}


@pytest.mark.native
@pytest.mark.parametrize("page", PAGES)
def test_a_pages_blocks_run(page: str, tmp_path: Path, request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    packages, holds = PAGES[page]
    for package in packages.split():
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    monkeypatch.chdir(tmp_path)  # the Trainer and TensorBoard leave files
    if "lightning" not in packages.split() or "transformers" in packages.split():
        request.getfixturevalue("first_accelerator")
    names = taken_for_granted(page)
    for name, logger in loggers(names["logged"]).items():
        monkeypatch.setitem(sys.modules, name, logger)
    if "lightning" in packages and not torch.cuda.is_available():
        # Lightning thinks so: before training starts it does nothing with one.
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    on_cpu = ", use_cpu=True" * (not torch.cuda.is_available())
    for block in re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL):
        if page == "accelerate.md":
            from test_accelerate import forget

            forget()  # each begins with an accelerator
        if page == "troubleshooting.md":
            names["scaler"] = started(GradScaler, "cpu")  # each is about another loop
            for parameter in names["model"].parameters():
                parameter.grad = torch.zeros_like(parameter)
        with warnings.catch_warnings():  # one says how to filter ours
            exec(compile(block.replace("bf16=True", f"bf16=True{on_cpu}"), page, "exec"), names)
    assert eval(holds, names)
