"""Random programs of a training in Lightning, and what they do: a loop by hand with torch's scaler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning_cases as cases
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

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
    """A training, as long as there are batches."""

    optimizer: str
    order: str  # "automatic", or by hand: "one" optimizer; two "in turn", a backward each; two after one, "together"
    clip: tuple[str, float] | None
    accumulated: int
    init_scale: float
    batches: tuple[str, ...]  # what happens at each
    cut: int  # after so many batches the run is saved and resumed; 0: never
    toggles: bool  # two in turn: whether only one's parameters require gradients
    again: bool  # two together: whether the second is clipped once more, between the steps

    @property
    def fused(self) -> bool:
        return self.optimizer.endswith("fused")

    @property
    def parts(self) -> list[slice]:
        """The batches until the run is saved, and from then on."""
        ends = [0, self.cut, len(self.batches)] if 0 < self.cut < len(self.batches) else [0, len(self.batches)]
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    @property
    def is_refused(self) -> bool:
        """Whether Lightning's own plugin raises."""
        return self.fused and self.clip is not None

    @property
    def is_lightnings(self) -> bool:
        """Whether Lightning's own plugin with torch's scaler does the same to the bit.

        By hand it clips gradients that are still scaled. torch sums a norm in fp32, we in fp64. And where the first
        training step returns None, torch's clipping by value fails for want of any gradient.
        """
        if self.clip is None:
            return True
        differs = self.clip == ("norm", BITES) or (self.clip[0] == "value" and "none" in self.batches)
        return self.order == "automatic" and not self.fused and not differs

    def data(self, part: slice) -> list[tuple[Tensor, str]]:
        inputs = cases.batches(bad=(), steps=len(self.batches))
        return list(zip(inputs, self.batches, strict=True))[part]


@st.composite
def programs(draw: Any, orders: list[str]) -> Program:
    order = draw(st.sampled_from(orders))
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
        draw(st.booleans()),
    )


class Net(nn.Module):
    """Two layers whose losses and gradients overflow when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = cases.network()
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
    scales: list[tuple[float, int]] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)  # as AdamW counts them
    weights: list[list[float]] = field(default_factory=list)
    unscaled: list[str] = field(default_factory=list)  # a gradient as a hook sees it before the step
    norms: list[float] = field(default_factory=list)  # as the scaler told them

    def add(self, scaler: Any, optimizers: list[Any], net: Net) -> None:
        self.scales.append((scaler.get_scale(), scaler._get_growth_tracker()))
        self.rates.append([each.param_groups[0]["lr"] for each in optimizers])
        self.steps.append([float(s.get("step", 0)) for each in optimizers for s in each.state.values()])
        self.weights.append(cases.values(net).tolist())
        assert all(map(math.isfinite, self.weights[-1]))

    def see(self, net: Net) -> None:
        gradient = net.layers[0].weight.grad
        self.unscaled.append("" if gradient is None else str(gradient.tolist()))

    def assert_same(self, other: Trace, *, hooks: bool) -> None:
        assert self.losses == other.losses
        assert self.scales == other.scales
        assert self.rates == other.rates
        assert self.steps == other.steps
        assert self.weights == other.weights
        if hooks:
            assert self.unscaled == other.unscaled


class Loop:
    """A loop of one's own over a program; subclasses know how its steps are called."""

    program: Program
    net: Net
    optimizers: list[Any]
    schedulers: list[Any]
    trace: Trace

    def batch(self, index: int, batch: Tensor, kind: str) -> None:
        self.net.kind = kind
        begins, ends = index % self.program.accumulated == 0, (index + 1) % self.program.accumulated == 0
        if self.program.order == "together":
            self._together(batch, begins, ends)
        else:
            self._in_turn(batch, begins, ends)
        if ends:
            for scheduler in self.schedulers:
                scheduler.step()

    def _in_turn(self, batch: Tensor, begins: bool, ends: bool) -> None:
        for which, optimizer in enumerate(self.optimizers):
            with self.toggled(which) if self.program.toggles else nullcontext():
                if begins:
                    optimizer.zero_grad()
                self._backward(batch, float(which))
                if ends:
                    self.clip(optimizer)
                    self.step(optimizer)

    def _together(self, batch: Tensor, begins: bool, ends: bool) -> None:
        one, other = self.optimizers
        if begins:
            one.zero_grad()
            other.zero_grad()
        self._backward(batch, 0.0)
        if ends:
            self.clip(one)
            self.clip(other)
            self.step(one)
            if self.program.again:
                self.clip(other)
            self.step(other)

    def _backward(self, batch: Tensor, target: float) -> None:
        with self.autocast():
            loss = self.net.loss(self.forward(batch), target)
        self.trace.losses.append(str(loss.item()))
        self.backward(loss)

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()  # a framework sees to it

    @contextmanager
    def toggled(self, which: int) -> Iterator[None]:
        """Let only one optimizer's parameters require gradients."""
        others = [p for n, each in enumerate(self.optimizers) if n != which for p in each.param_groups[0]["params"]]
        for parameter in others:
            parameter.requires_grad_(False)
        yield
        for parameter in others:
            parameter.requires_grad_(True)

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch)

    def backward(self, loss: Tensor) -> None:
        raise NotImplementedError

    def clip(self, optimizer: Any) -> None:
        raise NotImplementedError

    def step(self, optimizer: Any) -> None:
        raise NotImplementedError


class Remembering(torch.amp.GradScaler):
    """torch's scaler, but an update forgets of no other optimizer that its gradients are unscaled (differences, 18)."""

    def update(self, new_scale: Any = None) -> None:
        states = self._per_optimizer_states
        unscaled = {key: state for key, state in states.items() if state["stage"] is OptState.UNSCALED}
        super().update(new_scale)
        self._per_optimizer_states.update(unscaled)

    def is_unscaled(self, optimizer: Any) -> bool:
        return self._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED


class ByHand(Loop):
    """The model: torch's scaler, no framework, no checkpoint in between.

    Args:
        told: the norms that the scaler under test told, in order. They must be right; their last bits are taken from
            it. None: torch's clipping is what is called there, too.
    """

    def __init__(self, program: Program, told: list[float] | None) -> None:
        self.program, self.trace, self.net = program, Trace(), Net()
        self.told = None if told is None else iter(told)
        self.optimizers, self.schedulers = self.net.new_optimizers(program)
        self.scaler = Remembering("cpu", init_scale=program.init_scale, growth_interval=2)
        for part in program.parts:
            self._part(program.data(part))

    def _part(self, data: list[tuple[Tensor, str]]) -> None:
        for index, (batch, kind) in enumerate(data):
            if self.program.order == "automatic":
                ends = (index + 1) % self.program.accumulated == 0 or index + 1 == len(data)
                self._automatic(batch, kind, index % self.program.accumulated == 0, ends)
            else:
                self.batch(index, batch, kind)
            self.trace.add(self.scaler, self.optimizers, self.net)

    def _automatic(self, batch: Tensor, kind: str, begins: bool, ends: bool) -> None:
        """What Lightning does in each batch."""
        self.net.kind, (optimizer,) = kind, self.optimizers
        if begins:
            optimizer.zero_grad()
        if kind != "none":
            self._backward(batch, 0.0)
        if not ends:
            return
        if kind != "none":
            self._unscale(optimizer)
        self.trace.see(self.net)
        if kind != "none":
            self.clip(optimizer)
            self.step(optimizer)
        self.schedulers[0].step()

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.float16)

    def backward(self, loss: Tensor) -> None:
        if self.program.order == "automatic":
            loss = loss / self.program.accumulated  # as Lightning does
        self.scaler.scale(loss).backward()

    def step(self, optimizer: Any) -> None:
        self.scaler.step(optimizer)
        self.scaler.update()

    def clip(self, optimizer: Any) -> None:
        if self.program.clip is None:
            return
        algorithm, bound = self.program.clip
        self._unscale(optimizer)
        parameters = optimizer.param_groups[0]["params"]
        if algorithm == "value":
            nn.utils.clip_grad_value_(parameters, bound)
        elif self.told is None:
            nn.utils.clip_grad_norm_(parameters, bound)
        else:
            self._clip_by(next(self.told), parameters, bound)

    def _clip_by(self, told: float, parameters: list[Tensor], bound: float) -> None:
        norm = torch.linalg.vector_norm(torch.cat([p.grad.double().flatten() for p in parameters])).item()
        if math.isfinite(norm):
            assert math.isclose(told, norm, rel_tol=1e-6)  # its squares are summed in fp32, a few at a time
            nn.utils.clip_grads_with_norm_(parameters, bound, torch.tensor(told))
        else:
            assert not math.isfinite(told)

    def _unscale(self, optimizer: Any) -> None:
        if not self.scaler.is_unscaled(optimizer):
            self.scaler.unscale_(optimizer)


def new_scaler(cls: type, program: Program) -> Any:
    return cls("cpu", init_scale=program.init_scale, growth_interval=2)
