"""Random programs of Lightning's Trainer and Fabric with our plugin, beside a loop by hand with torch's scaler."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fuzz_profile import Chunk, chunks, settings_for
from hypothesis import event, given, seed
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("lightning")

import lightning_cases as cases
from lightning_programs import ByHand, Loop, Net, Program, Trace, new_scaler, programs

from scaler_triton import GradScaler
from scaler_triton.integrations.lightning import mixed_precision

pytestmark = [
    *(pytest.mark.filterwarnings(known) for known in cases.KNOWN_WARNINGS),
    pytest.mark.filterwarnings("ignore:.training_step. returned .None.:UserWarning"),  # some do
    # The first step was skipped.
    pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step... before .optimizer.step.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Nothing here is large enough for more, which would only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def norms_told(scaler: Any, trace: Trace) -> Iterator[None]:
    """Keep the norms that a scaler of ours tells."""
    clip = scaler.clip_grad_norm_

    def told(*args: Any, **kwargs: Any) -> Tensor:
        norm = clip(*args, **kwargs)
        trace.norms.append(norm.item())
        return norm

    with mock.patch.object(scaler, "clip_grad_norm_", told):
        yield


def train(program: Program, savers: tuple[str, ...]) -> Trace:
    """Train by the Trainer: its parts by our plugin, or by "lightning"'s own with torch's scaler."""
    space, trace = cases.namespace("lightning"), Trace()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.ckpt"
        for number, (part, saver) in enumerate(zip(program.parts, savers, strict=False)):
            if saver == "ours":
                plugin = mixed_precision(space.Trainer, new_scaler(GradScaler, program), device="cpu")
            else:
                scaler = new_scaler(torch.amp.GradScaler, program)
                plugin = space.trainer_plugins.MixedPrecision("16-mixed", "cpu", scaler)
            trainer = space.Trainer(
                plugins=plugin,
                accelerator="cpu",
                devices=1,
                max_epochs=number + 1,
                **(clipping(program) if program.order == "automatic" else {}),
                **cases.QUIET,
            )
            module = module_of(space.pl, program, program.data(part), trace)
            with norms_told(plugin.scaler, trace) if saver == "ours" else nullcontext():
                trainer.fit(module, ckpt_path=path if number else None)
            trainer.save_checkpoint(path)
    return trace


def clipping(program: Program) -> dict[str, Any]:
    """Return what the Trainer is told of clipping and accumulation."""
    algorithm, bound = program.clip or (None, None)
    return {
        "gradient_clip_val": bound,
        "gradient_clip_algorithm": algorithm,
        "accumulate_grad_batches": program.accumulated,
    }


def module_of(pl: Any, program: Program, data: list[tuple[Tensor, str]], trace: Trace) -> Any:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = program.order == "automatic"
            self.net = Net()

        def training_step(self, both: tuple[Tensor, str], index: int) -> Tensor | None:
            batch, self.net.kind = both
            if not self.automatic_optimization:
                ManualLoop(self, program, trace).batch(index, *both)
                return None
            if self.net.kind == "none":
                return None
            loss = self.net.loss(self.net(batch), 0.0)
            trace.losses.append(str(loss.item()))
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.automatic_optimization:
                trace.see(self.net)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            trace.add(self.trainer.scaler, self.trainer.optimizers, self.net)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(data, batch_size=None)

        def configure_optimizers(self) -> Any:
            optimizers, schedulers = self.net.new_optimizers(program)
            return optimizers, [{"scheduler": each, "interval": "step"} for each in schedulers]

    return Module()


class ManualLoop(Loop):
    """Lightning's manual optimization."""

    def __init__(self, module: Any, program: Program, trace: Trace) -> None:
        self.program, self.trace, self.module, self.net = program, trace, module, module.net
        optimizers, schedulers = module.optimizers(), module.lr_schedulers()
        self.optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        self.schedulers = schedulers if isinstance(schedulers, list) else [schedulers]

    @contextmanager
    def toggled(self, which: int) -> Iterator[None]:
        self.module.toggle_optimizer(self.optimizers[which])
        yield
        self.module.untoggle_optimizer(self.optimizers[which])

    def backward(self, loss: Tensor) -> None:
        self.module.manual_backward(loss)

    def clip(self, optimizer: Any) -> None:
        if self.program.clip is not None:
            algorithm, bound = self.program.clip
            self.module.clip_gradients(optimizer, bound, algorithm)

    def step(self, optimizer: Any) -> None:
        optimizer.step()


class FabricLoop(Loop):
    """A loop of Fabric's, which ends and goes on from a checkpoint of its own."""

    def __init__(self, program: Program) -> None:
        self.program, self.trace = program, Trace()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.ckpt"
            for number, part in enumerate(program.parts):
                state = self._set_up()
                if number:
                    self.fabric.load(path, state)
                for index, (batch, kind) in enumerate(program.data(part)):
                    self.batch(index, batch, kind)
                    self.trace.add(self.scaler, self.optimizers, self.net)
                self.fabric.save(path, state)

    def _set_up(self) -> dict[str, Any]:
        """Make everything anew; return what goes into a checkpoint."""
        fabric_class = cases.namespace("lightning").Fabric
        self.scaler, self.net = new_scaler(GradScaler, self.program), Net()
        plugin = mixed_precision(fabric_class, self.scaler, device="cpu")
        self.fabric = fabric_class(accelerator="cpu", devices=1, plugins=plugin)
        optimizers, self.schedulers = self.net.new_optimizers(self.program)
        self.wrapped, *self.optimizers = self.fabric.setup(self.net, *optimizers)
        kept = {"net": [self.wrapped], "optimizer": self.optimizers, "scheduler": self.schedulers}
        numbered = {f"{name} {n}": one for name, several in kept.items() for n, one in enumerate(several)}
        return {**numbered, "scaler": self.scaler}

    def forward(self, batch: Tensor) -> Tensor:
        return self.wrapped(batch)

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def clip(self, optimizer: Any) -> None:
        if self.program.clip is None:
            return
        algorithm, bound = self.program.clip
        options = {"clip_val": bound} if algorithm == "value" else {"max_norm": bound, "error_if_nonfinite": False}
        self.fabric.clip_gradients(self.wrapped, optimizer, **options)

    def step(self, optimizer: Any) -> None:
        optimizer.step()


def by_trainer(program: Program, savers: tuple[str, str]) -> None:
    event(program.order)
    mine = train(program, savers if program.is_lightnings else ("ours", "ours"))
    model = ByHand(program, mine.norms if savers == ("ours", "ours") or not program.is_lightnings else None)
    # Lightning's own leaves a fused optimizer's gradients scaled for hooks.
    mine.assert_same(model.trace, hooks=savers == ("ours", "ours") or not program.fused)
    if program.is_lightnings:
        mine.assert_same(train(program, ("lightning", "lightning")), hooks=not program.fused)
    elif program.is_refused and program.order == "automatic":
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            train(program, ("lightning", "lightning"))


def by_fabric(program: Program) -> None:
    FabricLoop(program).trace.assert_same(ByHand(program, None).trace, hooks=False)


BY_HAND = ["one", "in turn", "together"]
SAVERS = [("ours", "ours"), ("ours", "ours"), ("ours", "lightning"), ("lightning", "ours")]


@pytest.mark.parametrize("chunk", chunks(in_ci=70, share=0.1), ids=str)
def test_programs_of_a_trainer(chunk: Chunk) -> None:
    drawn = given(programs(["automatic", *BY_HAND]), st.sampled_from(SAVERS))(by_trainer)
    seed(chunk.seed)(settings_for(chunk.programs)(drawn))()


@pytest.mark.parametrize("chunk", chunks(in_ci=35, share=0.05), ids=str)
def test_programs_of_a_fabric(chunk: Chunk) -> None:
    seed(chunk.seed)(settings_for(chunk.programs)(given(programs(BY_HAND))(by_fabric)))()
