"""Random programs of Lightning's Trainer with our plugin, beside a loop by hand with the specification's scaler."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_profile import Chunk, chunks
from grads import agreed, together
from hypothesis import event
from hypothesis import strategies as st
from jobs import WARNINGS
from specification import Specification, is_ready
from torch import Tensor, nn

pytest.importorskip("lightning")

import lightning.pytorch as pl

from scaler_triton import GradScaler
from scaler_triton.integrations.lightning import mixed_precision

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}:{category}") for message, category in WARNINGS]
# The first step was skipped.
pytestmark += [pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step... before:UserWarning")]
QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)

RATE, DECAY = 0.1, 0.75
BITES, BITES_NOT = 0.05, 1e9  # bounds of a norm; the second one clips by 1 exactly
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=RATE, momentum=0.5, foreach=False),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=RATE, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=RATE, fused=True),
    # Without momentum: torch's is garbage when the first step is skipped (differences, 14).
    "sgd-fused": lambda params: torch.optim.SGD(params, lr=RATE, fused=True),
}
KINDS = ["good", "good", "good", "infinite loss", "inf in the first gradient", "nan in the last gradient"]


@dataclass(frozen=True)
class Program:
    optimizer: str
    order: str  # "automatic", or by hand: "one" optimizer; two "in turn", a backward each; two after one, "together"
    clip: tuple[str, float] | None
    accumulated: int
    init_scale: float
    batches: tuple[str, ...]  # what happens at each
    cut: int  # after so many batches the run is saved and resumed; 0: never
    again: bool  # two together: whether the second is clipped once more, between the steps

    @property
    def parts(self) -> list[list[tuple[Tensor, str]]]:
        """The batches until the run is saved, and from then on."""
        draws = [torch.Generator().manual_seed(step) for step in range(len(self.batches))]
        data = list(zip([torch.randn(4, 5, generator=draw) for draw in draws], self.batches, strict=True))
        return [part for part in (data[: self.cut], data[self.cut :]) if part]


@st.composite
def programs(draw: Any) -> Program:
    order = draw(st.sampled_from(["automatic", "one", "in turn", "together"]))
    kinds = [*KINDS, "none"] if order == "automatic" else KINDS
    return Program(
        draw(st.sampled_from(sorted(OPTIMIZERS))),
        order,
        draw(st.sampled_from([None, ("norm", BITES), ("norm", BITES_NOT), ("value", 0.02)])),
        draw(st.sampled_from([1, 1, 2, 3])),
        draw(st.sampled_from([8.0, 2.0**16])),  # the second one overflows by itself
        tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=7))),
        draw(st.integers(0, 6)),
        draw(st.booleans()),
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 2))
        self.kind = "good"
        self.layers[0].weight.register_hook(lambda g: g * math.inf if "first" in self.kind else g)
        self.layers[-1].bias.register_hook(lambda g: g * math.nan if "last" in self.kind else g)

    def forward(self, batch: Tensor) -> Tensor:
        return self.layers(batch)

    def loss(self, output: Tensor, target: float) -> Tensor:
        loss = (output.float() - target).square().mean()
        return loss * math.inf if self.kind == "infinite loss" else loss

    def new_optimizers(self, program: Program) -> tuple[list[Any], list[Any]]:
        """Make one optimizer or one for each layer, and their schedulers."""
        parts = [self.layers[0], self.layers[-1]] if program.order in ("in turn", "together") else [self]
        optimizers = [OPTIMIZERS[program.optimizer](part.parameters()) for part in parts]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, DECAY) for each in optimizers]


@dataclass
class Trace:
    """What a run leaves, batch by batch, and what its hooks and clippings saw."""

    losses: list[str] = field(default_factory=list)
    batches: list[tuple[Any, ...]] = field(default_factory=list)
    unscaled: list[str] = field(default_factory=list)  # a gradient as a hook sees it before the step
    norms: list[float] = field(default_factory=list)  # as the scaler returned them

    def add(self, scaler: Any, optimizers: list[Any], net: Net) -> None:
        weights = nn.utils.parameters_to_vector(net.parameters()).detach()
        assert weights.isfinite().all()
        rates = [each.param_groups[0]["lr"] for each in optimizers]
        steps = [float(state.get("step", 0)) for each in optimizers for state in each.state.values()]  # as AdamW counts
        state = scaler.state_dict()  # which an update that waits for other optimizers is in
        self.batches.append((state["scale"], state["_growth_tracker"], rates, steps, weights.tolist()))

    def see(self, net: Net) -> None:
        gradient = net.layers[0].weight.grad
        self.unscaled.append("" if gradient is None else str(gradient.tolist()))

    def assert_same(self, other: Trace) -> None:
        assert (self.losses, self.batches, self.unscaled) == (other.losses, other.batches, other.unscaled)


class Loop:
    """A loop of one's own over a program; subclasses know how its steps are called."""

    def __init__(self, program: Program, net: Net, trace: Trace, optimizers: list[Any], schedulers: list[Any]) -> None:
        self.program, self.net, self.trace = program, net, trace
        self.optimizers, self.schedulers = optimizers, schedulers

    def batch(self, index: int, batch: Tensor, kind: str, last: bool = False) -> None:
        self.net.kind = kind
        begins, ends = index % self.program.accumulated == 0, last or (index + 1) % self.program.accumulated == 0
        sharing = [self.optimizers] if self.program.order == "together" else [[each] for each in self.optimizers]
        for which, optimizers in enumerate(sharing):  # a backward
            for optimizer in optimizers if begins else ():
                optimizer.zero_grad()
            if kind != "none":
                loss = self.loss(batch, float(which))
                self.trace.losses.append(str(loss.item()))
                self.backward(loss)
            if ends:
                self.finish(*optimizers)
        for scheduler in self.schedulers if ends else ():
            scheduler.step()

    def loss(self, batch: Tensor, target: float) -> Tensor:
        return self.net.loss(self.net(batch), target)

    def finish(self, one: Any, *others: Any) -> None:
        """Clip and step optimizers, then update once."""
        for optimizer in (one, *others):
            self.clip(optimizer)
        self.step(one)
        for optimizer in others:
            if self.program.again:
                self.clip(optimizer)
            self.step(optimizer)
        self.update()


class ByHand(Loop):
    """The model: the specification's scaler, no framework, no checkpoint in between.

    The norms that our scaler returned must be right; their last bits are taken from it.
    """

    def __init__(self, program: Program, returned: list[float]) -> None:
        net = Net()
        super().__init__(program, net, Trace(), *net.new_optimizers(program))
        self.returned = iter(returned)
        self.scaler = Specification(device="cpu", init_scale=program.init_scale, growth_interval=2)
        for data in program.parts:
            for index, (batch, kind) in enumerate(data, 1):
                self.batch(index - 1, batch, kind, last=program.order == "automatic" and index == len(data))
                self.trace.add(self.scaler, self.optimizers, self.net)

    def loss(self, batch: Tensor, target: float) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return super().loss(batch, target)

    def finish(self, one: Any, *others: Any) -> None:
        if self.program.order == "automatic":  # hooks see the gradients, also where there was no backward
            if self.net.kind != "none":
                self._unscale(one)
            self.trace.see(self.net)
        if self.net.kind != "none":
            super().finish(one, *others)

    def backward(self, loss: Tensor) -> None:
        if self.program.order == "automatic":
            loss = loss / self.program.accumulated  # as Lightning does
        self.scaler.scale(loss).backward()

    def step(self, optimizer: Any) -> None:
        self.scaler.step(optimizer)

    def update(self) -> None:
        self.scaler.update()

    def clip(self, optimizer: Any) -> None:
        if self.program.clip is None:
            return
        algorithm, bound = self.program.clip
        self._unscale(optimizer)
        parameters = optimizer.param_groups[0]["params"]
        if algorithm == "value":
            nn.utils.clip_grad_value_(parameters, bound)
        else:
            norm = agreed(together(parameters).norm(), [torch.tensor(next(self.returned))], True)
            if norm.isfinite():
                nn.utils.clip_grads_with_norm_(parameters, bound, norm)

    def _unscale(self, optimizer: Any) -> None:
        state = self.scaler._per_optimizer_states[id(optimizer)]
        if is_ready(state) and id(optimizer) not in self.scaler._carried:  # by the update before, unscaled
            self.scaler.unscale_(optimizer)


class KeepingNorms(GradScaler):
    """Our scaler, which keeps the norms that it returned."""

    def __init__(self, program: Program, norms: list[float]) -> None:
        super().__init__("cpu", init_scale=program.init_scale, growth_interval=2)
        self.norms = norms

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Tensor:
        norm = super().clip_grad_norm_(*args, **kwargs)
        self.norms.append(norm.item())
        return norm


def train(program: Program) -> Trace:
    """Train its parts by the Trainer with our plugin, each from the checkpoint of the one before."""
    trace, (algorithm, bound) = Trace(), program.clip or (None, None)
    clipping = {"gradient_clip_val": bound, "gradient_clip_algorithm": algorithm}
    options = clipping | {"accumulate_grad_batches": program.accumulated} if program.order == "automatic" else {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.ckpt"
        for number, part in enumerate(program.parts):
            plugin = mixed_precision(pl.Trainer, KeepingNorms(program, trace.norms), device="cpu")
            place = {"accelerator": "cpu", "devices": 1, "max_epochs": number + 1, "plugins": plugin}
            trainer = pl.Trainer(**place, **options, **QUIET)
            trainer.fit(Module(program, part, trace), ckpt_path=path if number else None)
            trainer.save_checkpoint(path)
    return trace


class Module(pl.LightningModule):
    def __init__(self, program: Program, data: list[tuple[Tensor, str]], trace: Trace) -> None:
        super().__init__()
        self.program, self.data, self.trace, self.net = program, data, trace, Net()
        self.automatic_optimization = program.order == "automatic"

    def training_step(self, both: tuple[Tensor, str], index: int) -> Tensor | None:
        batch, self.net.kind = both
        if not self.automatic_optimization:
            ManualLoop(self).batch(index, *both)
            return None
        if self.net.kind == "none":
            return None
        loss = self.net.loss(self.net(batch), 0.0)
        self.trace.losses.append(str(loss.item()))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.automatic_optimization:
            self.trace.see(self.net)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.trace.add(self.trainer.scaler, self.trainer.optimizers, self.net)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.data, batch_size=None)

    def configure_optimizers(self) -> Any:
        optimizers, schedulers = self.net.new_optimizers(self.program)
        return optimizers, [{"scheduler": each, "interval": "step"} for each in schedulers]


class ManualLoop(Loop):
    def __init__(self, module: Module) -> None:
        both = (each if isinstance(each, list) else [each] for each in (module.optimizers(), module.lr_schedulers()))
        super().__init__(module.program, module.net, module.trace, *both)
        self.module = module

    def backward(self, loss: Tensor) -> None:
        self.module.manual_backward(loss)

    def clip(self, optimizer: Any) -> None:
        if self.program.clip is not None:
            algorithm, bound = self.program.clip
            self.module.clip_gradients(optimizer, bound, algorithm)

    def step(self, optimizer: Any) -> None:
        optimizer.step()
        torch.clear_autocast_cache()  # Lightning 2.5 keeps the weights that were cast before this step

    def update(self) -> None:
        """Leave it to the plugin."""


@pytest.mark.parametrize("chunk", chunks(in_ci=70, share=0.1), ids=str)
def test_programs_of_a_trainer(chunk: Chunk) -> None:
    def as_by_hand(program: Program) -> None:
        event(program.order)
        mine = train(program)
        mine.assert_same(ByHand(program, mine.norms).trace)

    chunk.run(as_by_hand, programs())
