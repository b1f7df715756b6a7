"""Training loops as people write them leave the same scales, gradients and parameters as with torch's, to the bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_cases import fresh_compiler
from helpers import Place, assert_same, places
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scaler_triton import GradScaler

PLACES = pytest.mark.parametrize("place", places(), ids=str)
STEPS, BAD_STEPS = 6, (1, 4)
# After each step: 1 and 4 overflow, and two good ones in a row double.
SCALES = [8.0, 4.0, 4.0, 8.0, 4.0, 4.0]

Train = Callable[[Any, str], list[Tensor]]


def assert_as_torch(train: Train, place: Place) -> None:
    """Run `train` with torch's scaler and ours; all it returns is equal, and the first of it are the scales."""
    settings = {"init_scale": 8.0, "growth_interval": 2}
    results = []
    for scaler in (
        torch.amp.GradScaler(place.device, **settings),
        GradScaler(place.device, backend=place.backend, **settings),
    ):
        torch.manual_seed(0)
        results.append(train(scaler, place.device))
    theirs, ours = results
    assert [scale.item() for scale in ours[: len(SCALES)]] == SCALES
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other)
    assert not torch.equal(ours[len(SCALES)], ours[-1])  # it did train


class Trace:
    """What a run leaves: scales in front, then trackers, gradients and parameters of every step."""

    def __init__(self, scaler: Any, *modules: nn.Module) -> None:
        self.scaler, self.modules = scaler, modules
        self.scales: list[Tensor] = []
        self.rest: list[Tensor] = [values(modules[-1])]

    def add(self) -> None:
        """Take in the state after a step."""
        self.scales.append(self.scaler._scale.clone())
        self.rest.append(self.scaler._growth_tracker.double())
        parameters = [p for module in self.modules for p in module.parameters()]
        self.rest += [p.grad.clone() for p in parameters if p.grad is not None]
        self.rest += [values(module) for module in self.modules]

    def all(self) -> list[Tensor]:
        """Return everything; the last is the last module's parameters."""
        return self.scales + self.rest


def values(module: nn.Module) -> Tensor:
    """Return a module's parameters in one tensor, copied."""
    return torch.cat([p.detach().flatten().clone() for p in module.parameters()])


def network(device: str, out: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, out)).to(device)


def batch(device: str) -> Tensor:
    return torch.randn(4, 5, device=device)


def spoiled(loss: Tensor, step: int) -> Tensor:
    """Return the loss, infinite where the gradients have to overflow."""
    return loss * math.inf if step in BAD_STEPS else loss


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, **options)


def plain_loop(
    scaler: Any, model: Any, optimizer: Any, device: str, forward: Callable[[Any, Tensor], Tensor] | None = None
) -> list[Tensor]:
    """Train as everybody does."""
    trace = Trace(scaler, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        output = model(batch(device)) if forward is None else forward(model, batch(device))
        scaler.scale(spoiled(output.square().mean(), step)).backward()
        scaler.step(optimizer)
        scaler.update()
        trace.add()
    return trace.all()


@PLACES
@pytest.mark.parametrize("clip", [False, True])
def test_gradient_accumulation(place: Place, clip: bool) -> None:
    """The first of three micro-batches overflows, the scale stays until the last."""

    def train(scaler: Any, device: str) -> list[Tensor]:
        model = network(device)
        optimizer, trace = adamw(model), Trace(scaler, model)
        for step in range(STEPS):
            for micro in range(3):
                loss = model(batch(device)).square().mean() / 3
                scaler.scale(spoiled(loss, step) if micro == 0 else loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            trace.add()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return trace.all()

    assert_as_torch(train, place)


@PLACES
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(place: Place, reentrant: bool) -> None:
    def train(scaler: Any, device: str) -> list[Tensor]:
        model = network(device)

        def forward(model: Any, inputs: Tensor) -> Tensor:
            inputs.requires_grad_()
            return model[2](checkpoint(model[:2], inputs, use_reentrant=reentrant))

        return plain_loop(scaler, model, adamw(model), device, forward)

    assert_as_torch(train, place)


@PLACES
def test_frozen_parameters(place: Place) -> None:
    """Frozen ones are in the optimizer; the first layer thaws and another freezes half-way."""

    def train(scaler: Any, device: str) -> list[Tensor]:
        model = network(device)
        model[0].requires_grad_(False)
        steps = itertools.count()

        def forward(model: Any, inputs: Tensor) -> Tensor:
            if next(steps) == 3:
                model[0].requires_grad_(True)
                model[2].bias.requires_grad_(False)
            return model(inputs)

        return plain_loop(scaler, model, torch.optim.AdamW(model.parameters(), lr=0.1), device, forward)

    assert_as_torch(train, place)


@PLACES
@pytest.mark.parametrize("how", ["group", "append"])
def test_parameters_added_in_mid_training(place: Place, how: str) -> None:
    """From the third step on there is another layer, in a group of its own or appended to the first."""

    def train(scaler: Any, device: str) -> list[Tensor]:
        model, later = network(device), nn.Linear(2, 2).to(device)
        optimizer = adamw(model)
        whole, steps = nn.ModuleList([model, later]), itertools.count()

        def forward(whole: Any, inputs: Tensor) -> Tensor:
            if (step := next(steps)) == 2 and how == "group":
                optimizer.add_param_group({"params": later.parameters(), "lr": 0.01})
            elif step == 2:
                optimizer.param_groups[0]["params"].extend(later.parameters())
            return whole[1](whole[0](inputs)) if step >= 2 else whole[0](inputs)

        return plain_loop(scaler, whole, optimizer, device, forward)

    assert_as_torch(train, place)


VARIANTS = [
    (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    (torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adagrad, {"foreach": True}),
    (torch.optim.NAdam, {"foreach": True}),
]


@PLACES
@pytest.mark.parametrize(("optimizer_class", "options"), VARIANTS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_optimizers_for_each_and_fused(place: Place, optimizer_class: Any, options: dict[str, Any]) -> None:
    def train(scaler: Any, device: str) -> list[Tensor]:
        model = network(device)
        return plain_loop(scaler, model, optimizer_class(model.parameters(), lr=0.05, **options), device)

    assert_as_torch(train, place)


def optimizers_of_torch() -> list[type[torch.optim.Optimizer]]:
    """All of this torch, but for LBFGS, which needs a closure, and one for sparse gradients only."""
    found = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    others = (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
    return [each for each in found if issubclass(each, torch.optim.Optimizer) and each not in others]


@PLACES
@pytest.mark.parametrize("optimizer_class", optimizers_of_torch(), ids=lambda v: v.__name__)
def test_every_optimizer_of_torch(place: Place, optimizer_class: Any) -> None:
    def train(scaler: Any, device: str) -> list[Tensor]:
        model = network(device)
        matrices = [p for p in model.parameters() if p.dim() == 2]  # Muon takes no others
        return plain_loop(scaler, model, optimizer_class(matrices, lr=0.05), device)

    assert_as_torch(train, place)


# Torch's compiler meets deprecated parts of torch while it is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("place", [place for place in places() if str(place) != "cpu-triton"], ids=str)
@pytest.mark.parametrize(
    ("backend", "options"),
    [("eager", {"foreach": True}), ("aot_eager", {"capturable": True}), ("aot_eager", {"foreach": False})],
    ids=str,
)
def test_compiled_optimizer_step(place: Place, backend: str, options: dict[str, Any]) -> None:
    """`capturable` works on the CPU only when compiled."""
    with fresh_compiler():

        def train(scaler: Any, device: str) -> list[Tensor]:
            model = network(device)
            optimizer = adamw(model, **options)
            optimizer.step = torch.compile(optimizer.step, backend=backend)
            return plain_loop(scaler, model, optimizer, device)

        assert_as_torch(train, place)


@pytest.mark.gpu
# torch asks whether that is meant where nothing is captured.
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True:UserWarning")
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_capturable_optimizers(options: dict[str, Any]) -> None:
    def train(scaler: Any, device: str) -> list[Tensor]:
        model = network(device)
        return plain_loop(scaler, model, adamw(model, capturable=True, **options), device)

    assert_as_torch(train, Place("cuda", "triton"))


def descend(scaler: Any, optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)


@PLACES
@pytest.mark.parametrize("fused", [False, True])
def test_gan_loop(place: Place, fused: bool) -> None:
    """Two optimizers, two losses, one scaler; only the generator's loss overflows, both share the backoff."""

    def train(scaler: Any, device: str) -> list[Tensor]:
        generator, critic = network(device, 5), network(device, 1)
        optimizers = [adamw(critic, fused=fused), adamw(generator)]
        trace = Trace(scaler, generator, critic)
        for step in range(STEPS):
            fake = generator(batch(device))
            descend(scaler, optimizers[0], critic(fake.detach()).mean() - critic(batch(device)).mean())
            descend(scaler, optimizers[1], spoiled(-critic(fake).square().mean(), step))
            scaler.update()
            trace.add()
        return trace.all()

    assert_as_torch(train, place)


@PLACES
@pytest.mark.parametrize("bad", [0, 1])
def test_two_losses_share_parameters(place: Place, bad: int) -> None:
    """Torch's example of several losses: one backward after another into shared layers, two optimizers."""

    def train(scaler: Any, device: str) -> list[Tensor]:
        trunk, heads = nn.Linear(5, 5).to(device), [network(device), network(device)]
        optimizers = [torch.optim.SGD([*trunk.parameters(), *heads[0].parameters()], lr=0.1), adamw(heads[1])]
        trace = Trace(scaler, trunk, *heads)
        for step in range(STEPS):
            hidden = trunk(batch(device))
            losses = [head(hidden).square().mean() for head in heads]
            losses[bad] = spoiled(losses[bad], step)
            scaler.scale(losses[0]).backward(retain_graph=True)
            scaler.scale(losses[1]).backward()
            scaler.unscale_(optimizers[0])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            trace.add()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return trace.all()

    assert_as_torch(train, place)


@PLACES
@pytest.mark.parametrize("half", [False, True])
def test_gradient_penalty(place: Place, half: bool) -> None:
    """Torch's AMP example: scaled gradients with a graph, unscaled by hand, their norm in the loss."""

    def train(scaler: Any, device: str) -> list[Tensor]:
        model = network(device)
        optimizer, trace = adamw(model), Trace(scaler, model)
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.float16, enabled=half):
                loss = model(batch(device)).float().square().mean()
            grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
            norm = torch.stack([(grad / scaler.get_scale()).square().sum() for grad in grads]).sum().sqrt()
            scaler.scale(spoiled(loss + norm, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            trace.add()
        return trace.all()

    assert_as_torch(train, place)
