"""Optimizers over all GPUs and the CPU at once do what they do on the CPU alone: random programs, run on both."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from helpers import parameters

from scaler_triton import GradScaler

pytestmark = pytest.mark.gpu

STEPS = 8
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
    "sgd-fused": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}
EXTRAS: list[dict[str, Any]] = [{}, {}, {"hysteresis": 2}, {"max_scale": 16.0}]


class Program:
    """Everything that is drawn comes from the seed: two runs differ by their devices only."""

    def __init__(self, seed: int, devices: list[str]) -> None:
        self.draw = random.Random(seed)
        extras = self.draw.choice(EXTRAS)
        self.scaler: Any = GradScaler(devices[0], init_scale=8.0, growth_interval=3, **extras)
        self.scaler.scale(torch.ones((), device=self.draw.choice([devices[0], devices[-2]])))  # where the scale is
        self.optimizers = [self.optimizer(devices) for _ in range(self.draw.randint(1, 3))]

    def optimizer(self, devices: list[str]) -> torch.optim.Optimizer:
        kind = self.draw.choice(list(OPTIMIZERS))
        dtypes = [torch.float32] if "fused" in kind else [torch.float32, torch.float64, torch.bfloat16]
        params = []
        for _ in range(self.draw.randint(1, 4)):
            shape, dtype = self.draw.choice([(5,), (3, 7), (), (129,), (0,)]), self.draw.choice(dtypes)
            params.append(torch.nn.Parameter(torch.ones(shape, dtype=dtype, device=self.draw.choice(devices))))
        return OPTIMIZERS[kind](params)

    def run(self) -> Iterator[list[Any]]:
        """Yield what each step left."""
        for _ in range(STEPS):
            self.backward()
            how = self.draw.choice(["step", "unscale_", "clip", "clip together"])
            order, norms = self.draw.choice([2.0, math.inf, 3.0]), []
            if how == "clip together":
                norms.append(float(self.scaler.clip_grad_norm_(self.optimizers, 1.0, order)))
            for optimizer in self.optimizers:
                if how == "clip":
                    norms.append(float(self.scaler.clip_grad_norm_(optimizer, 1.0)))
                elif how == "unscale_":
                    self.scaler.unscale_(optimizer)
                self.scaler.step(optimizer)
            skipped = [self.scaler.was_skipped(optimizer) for optimizer in self.optimizers]
            found = [self.flags(optimizer) for optimizer in self.optimizers]
            self.scaler.update()
            values = torch.cat([p.detach().double().cpu().reshape(-1)[:1] for p in self.parameters()]).tolist()
            yield [(skipped, found), self.scaler.get_scale(), asdict(self.scaler.stats()), norms, values]

    def backward(self) -> None:
        for parameter in self.parameters():
            scale = self.draw.choice([1.0, 2.0, -3.0]) * self.scaler.get_scale()
            parameter.grad = torch.full_like(parameter, scale)
            if self.draw.random() < 0.08 and parameter.numel():
                parameter.grad.view(-1)[0] = self.draw.choice([math.inf, math.nan])

    def flags(self, optimizer: torch.optim.Optimizer) -> set[float]:
        """Return the values on all devices, without letting the scaler know that somebody sees them."""
        return {flag.item() for flag in self.scaler._ours.steps.last(optimizer)["found_inf_per_device"].values()}

    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("seed", range(24))
def test_programs_over_all_devices(seed: int) -> None:
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    with torch.cuda.device(seed % len(gpus)):
        mixed = list(Program(seed, [*gpus, "cpu"]).run())
    alone = list(Program(seed, ["cpu"] * (len(gpus) + 1)).run())
    for step, (here, there) in enumerate(zip(mixed, alone, strict=True)):
        assert here[:3] == there[:3], step
        # The clip coefficient is rounded where the norm is, and bf16 parameters have few digits.
        assert here[3] == pytest.approx(there[3], rel=1e-5, nan_ok=True), step
        assert here[4] == pytest.approx(there[4], rel=1e-2, nan_ok=True), step


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("start", "end"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_parameters_move_to_another_device(start: str, end: str, when: str) -> None:
    """In mid-training, beside `unscale_`: every step is taken once, with the right gradients."""
    params = parameters([torch.zeros(3), torch.zeros(2, 4)], start)
    optimizer, scaler = torch.optim.SGD(params, lr=1.0, foreach=False), GradScaler("cuda", init_scale=4.0)
    for step in range(3):
        factor = scaler.scale(torch.ones((), device="cuda")).item()
        for param in params:
            param.grad = torch.full_like(param, 2.0 * factor)
        for moment in ("before", "after") if step == 1 else ():
            if moment == when:
                torch.nn.ParameterList(params).to(end)
            if moment == "before":
                scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert {param.detach().unique().item() for param in params} == {-2.0 * (step + 1)}
    assert {param.device.type for param in params} == {end}
