"""What the tests of torch.compile share: a training run, compiled in parts or whole, and what Dynamo did meanwhile."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from helpers import Place
from torch import Tensor, nn
from torch._dynamo.utils import counters

from scaler_triton import GradScaler

STEPS, WARM_UP, BAD_STEPS = 8, 3, (1, 5)
# 1 and 5 overflow, and two good ones in a row double: one overflow while compiling, one after.
SCALES = [8.0, 4.0, 4.0, 8.0, 8.0, 4.0, 4.0, 8.0]

# SGD's factors are powers of two: torch 2.11 compiles `add_(grad, alpha=-lr)` into two roundings, eager has one.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.125, momentum=0.5),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}
Step = Callable[[Tensor, Tensor], Tensor]


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Compiled code of other tests neither helps nor counts towards limits."""
    torch.compiler.reset()
    counters.clear()
    try:
        yield
    finally:
        torch.compiler.reset()
        counters.clear()


@contextmanager
def nothing_new() -> Iterator[None]:
    """Assert that what runs within is compiled already: no frame, no graph and no second version of one."""
    before = {name: dict(counters[name]) for name in ("frames", "stats", "graph_break")}
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    assert {name: dict(counters[name]) for name in before} == before


class Net(nn.Module):
    """Two layers, the first one's bias frozen."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7, device=device), nn.Linear(7, 2, device=device)
        self.up.bias.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply the layers."""
        return self.down(torch.tanh(self.up(inputs)))


def run(step: Step, net: nn.Module, scaler: Any) -> list[Tensor]:
    """Take STEPS steps, the later ones with nothing left to compile; return scales, then losses and parameters."""
    scales, rest = [], []
    device = str(next(net.parameters()).device)
    draw = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        inputs = torch.randn(4, 5, generator=draw).to(device)
        factor = torch.tensor(math.inf if number in BAD_STEPS else 1.0, device=device)
        with nullcontext() if number < WARM_UP else nothing_new():
            rest.append(step(inputs, factor))
        scales.append(scaler._scale.clone())
        rest += [parameter.detach().clone() for parameter in net.parameters()]
    assert [scale.item() for scale in scales] == SCALES
    assert not torch.equal(rest[1], rest[-len(list(net.parameters()))])  # it did train
    return scales + rest


def fresh_net(device: str) -> Net:
    """Return the same one every time."""
    torch.manual_seed(0)
    return Net(device)


SETTINGS = {"init_scale": 8.0, "growth_interval": 2}  # for SCALES


def ours(place: Place) -> GradScaler:
    """Make a scaler of ours."""
    return GradScaler(place.device, backend=place.backend, **SETTINGS)


def theirs(place: Place) -> torch.amp.GradScaler:
    """Make a scaler of torch's."""
    return torch.amp.GradScaler(place.device, **SETTINGS)


def in_parts(place: Place, name: str, clip: str, new_scaler: Any) -> list[Tensor]:
    """Train with the loss and the optimizer's step compiled, and the scaler between."""
    net = fresh_net(place.device)
    optimizer = OPTIMIZERS[name](net.parameters())
    how = {"backend": "aot_eager"}
    loss_of = torch.compile(lambda inputs, factor: net(inputs).square().mean() * factor, fullgraph=True, **how)
    optimizer.step = torch.compile(optimizer.step, **how)  # type: ignore[method-assign]
    scaler = new_scaler(place)
    return run(whole_step(net, optimizer, scaler, clip, loss_of), net, scaler)


def whole_step(net: nn.Module, optimizer: Any, scaler: Any, clip: str = "", loss_of: Any = None) -> Step:
    """Return a step that clips by torch's function or by the scaler's, or not at all."""

    def step(inputs: Tensor, factor: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(inputs).square().mean() * factor if loss_of is None else loss_of(inputs, factor)
        scaler.scale(loss).backward()
        if clip == "torch":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        elif clip == "ours":
            scaler.clip_grad_norm_(optimizer, 0.05)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step
