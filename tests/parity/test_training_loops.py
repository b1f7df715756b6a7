"""Training loops as people write them leave the same scales, gradients and parameters as with torch's, to the bit."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import PLACES, Place
from test_foreign_code import Run, Table, assert_ends_as_with_torch
from torch import Tensor, nn

STEPS, BAD_STEPS = 6, (1, 4)
SCALES = [8.0, 4.0, 4.0, 8.0, 4.0, 4.0]  # after each step: 1 and 4 overflow, and two good ones in a row double
row = Table()


def network(run: Run) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 2)).to(run.device)


def batch(run: Run) -> Tensor:
    return torch.randn(4, 5, device=run.device)


def spoiled(loss: Tensor, step: int) -> Tensor:
    """Return the loss, infinite where the gradients have to overflow."""
    return loss * math.inf if step in BAD_STEPS else loss


def train(run: Run, model: nn.Module, optimizer: Any, losses: Any = None, clip: float = 0.0) -> None:
    """Train; each of the `losses(scaler)` is scaled, and its gradients are added up."""
    scaler, scales = run.scaler(), []
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(STEPS):
        terms = [model(batch(run)).square().mean()] if losses is None else losses(scaler)
        for number, term in enumerate(terms):
            scaler.scale(spoiled(term, step) if number == 0 else term).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        run.look(scaler, [*model.parameters()])
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert scales == SCALES
    assert not all(map(torch.equal, before, model.parameters()))  # it did train


@row(0.0, 0.01)
def gradient_accumulation(run: Run, variant: float) -> None:
    """The first of three micro-batches overflows, the scale stays until the last."""
    model = network(run)

    def losses(scaler: Any) -> Iterator[Tensor]:
        return (model(batch(run)).square().mean() / 3 for _ in range(3))

    train(run, model, torch.optim.AdamW(model.parameters(), lr=0.1), losses, clip=variant)


def optimizers_of_torch() -> list[tuple[Any, dict[str, Any]]]:
    """All of this torch, but for LBFGS, which needs a closure, and one for sparse gradients only."""
    found = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    others = (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
    return [(each, {}) for each in found if issubclass(each, torch.optim.Optimizer) and each not in others]


@row(
    *optimizers_of_torch(),
    (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    (torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
)
def optimizers(run: Run, variant: Any) -> None:
    cls, options = variant
    model = network(run)
    matrices = [p for p in model.parameters() if p.dim() == 2]  # Muon takes no others
    train(run, model, cls(matrices, lr=0.05, **options))


@row(False, True)
def a_gradient_penalty(run: Run, variant: bool) -> None:
    """Torch's AMP example: scaled gradients with a graph, unscaled by hand, their norm in the loss."""
    model = network(run)

    def losses(scaler: Any) -> list[Tensor]:
        with torch.autocast(run.device, dtype=torch.float16, enabled=variant):
            loss = model(batch(run)).float().square().mean()
        grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
        norm = torch.stack([(grad / scaler.get_scale()).square().sum() for grad in grads]).sum().sqrt()
        return [loss + norm]

    train(run, model, torch.optim.AdamW(model.parameters(), lr=0.1), losses)


@PLACES
@pytest.mark.parametrize("loop", row.rows)
def test_ends_as_with_torch(loop: Callable[[Run], None], place: Place) -> None:
    assert_ends_as_with_torch(loop, place)


@pytest.mark.gpu
# torch asks whether that is meant where nothing is captured.
@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True:UserWarning")
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_a_capturable_optimizer_ends_as_with_torch(options: dict[str, bool]) -> None:
    def loop(run: Run) -> None:
        model = network(run)
        train(run, model, torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True, **options))

    assert_ends_as_with_torch(loop, Place("cuda", "triton"))
