"""A scaler and a model whose gradients are as said, for tests of what a report tells."""

from typing import Any

import pytest
import torch
from helpers import Place, places, started
from torch import nn

from scaler_triton import GradScaler

# torch's op on a GPU leaves no marks.
PLACES = pytest.mark.parametrize("place", [each for each in places() if each != Place("cuda", "torch")], ids=str)
CPU = torch.device("cpu")


class Run:
    """A scaler and a model of two layers, whose gradients are ones but for what is said."""

    def __init__(self, place: Place, fused: bool = False) -> None:
        self.place = place
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(place.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, fused=fused)
        self.scaler = started(GradScaler, place.device, init_scale=8.0, backend=place.backend)

    def give(self, **bad: list[float]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = torch.ones_like(parameter)
            for index, value in enumerate(bad.get("_" + name.replace(".", "_"), [])):
                parameter.grad.view(-1)[index] = value

    def step(self, how: str = "step", **bad: list[float]) -> None:
        self.give(**bad)
        if how == "clip":
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def found(self) -> list[tuple[str, str]]:
        return [(each.name, each.kinds) for each in self.scaler.overflow_report(self.model).bad]

    def plan(self) -> Any:
        return self.scaler._ours.steps.last(self.optimizer).plan
