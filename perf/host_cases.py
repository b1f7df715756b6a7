"""What the scaler costs the host: cases of many small gradients, and how one of them is measured."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from perf.check import require_same
from perf.grads import Gradients, Still
from perf.measure import Effort, Subject, interleaved, one_thread
from perf.rows import Row, time_rows
from perf.scalers import flags, scalers, state
from perf.solo import sharded

NUMEL = 64  # so small that elements cost next to nothing
COUNTS = (10, 50, 100, 500, 1000, 2000)
EXPERTS, EXPERT_WEIGHTS = 64, 3
LORA_TRAINABLE, LORA_FROZEN = 448, 4000
GENERATOR, DISCRIMINATOR = 702, 12  # of Real-ESRGAN: basicsr's RRDBNet and UNetDiscriminatorSN


@dataclass(frozen=True)
class Case:
    """Many gradients and how they come.

    Args:
        what: their number, or what has them.
        kind: "plain" or "DTensor".
        coming: "same addresses", "new addresses" or "come and go".
        path: "cpu", "cuda" or "stub": the GPU's path over a driver that computes nothing.
        count: how many gradients.
        frozen: how many more parameters the optimizer has, which never get one.
        second: how many of the gradients belong to a second optimizer.
    """

    what: str
    kind: str
    coming: str
    path: str
    count: int
    frozen: int = 0
    second: int = 0

    @property
    def name(self) -> str:
        """What the CSV calls it."""
        return f"{self.what} {self.kind}, {self.coming}, {self.path}"


def cases(path: str, counts: Sequence[int] = COUNTS) -> list[Case]:
    """Return all cases of a path."""
    kinds, moving = ("plain", "DTensor"), ("same addresses", "new addresses")
    every = [Case(str(n), kind, coming, path, n) for n in counts for kind in kinds for coming in moving]
    every += [Case("MoE", kind, "come and go", path, EXPERTS * EXPERT_WEIGHTS) for kind in kinds]
    every += [Case("LoRA", "plain", "same addresses", path, LORA_TRAINABLE, LORA_FROZEN)]
    return [*every, Case("GAN", "plain", "new addresses", path, GENERATOR + DISCRIMINATOR, second=DISCRIMINATOR)]


def split(every: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    """Return the cases without DTensors, to be measured without a process group, and those with."""
    return [case for case in every if case.kind == "plain"], [case for case in every if case.kind == "DTensor"]


def unscale(scaler: Any, bench: "Bench") -> None:
    """Unscale, as before clipping."""
    for optimizer in bench.optimizers:
        scaler.unscale_(optimizer)


def whole(scaler: Any, bench: "Bench") -> None:
    """All that a step asks of the scaler."""
    for optimizer in bench.optimizers:
        scaler.scale(bench.loss)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()


def forget(scaler: Any, bench: "Bench") -> None:
    """End a step that only unscaled."""
    scaler.update()


Call = Callable[[Any, "Bench"], None]
CALLS: dict[str, tuple[Call, Call]] = {
    "unscale_": (unscale, forget),
    "scale + unscale_ + step + update": (whole, lambda scaler, bench: None),
}


class Bench:
    """A case with a loss, gradients, optimizers that do nothing and both scalers."""

    def __init__(self, case: Case, mesh: DeviceMesh | None) -> None:
        self.case = case
        self.device = "cuda" if case.path == "cuda" else "cpu"
        options = {} if mesh is None else {"wrap": sharded(mesh)}
        self.gradients = Gradients([NUMEL] * case.count, device=self.device, **options)
        parameters, first_count = self.gradients.parameters, case.count - case.second
        first = parameters[:first_count] + _frozen(case.frozen, self.device)
        second = parameters[first_count:]
        self.optimizers = [Still(parameters) for parameters in (first, second) if parameters]
        self.loss = torch.ones((), device=self.device)
        self.scalers = scalers(self.device, backend="triton" if case.path == "stub" else None)
        self._draws = {name: random.Random(0) for name in self.scalers}

    def subjects(self, metric: str) -> dict[str, Subject]:
        """Return what to time for a metric of `CALLS`."""
        return {name: self._subject(name, *CALLS[metric]) for name in self.scalers}

    def result(self, name: str) -> list[Tensor]:
        """Return what a scaler left: the gradients, its flags, scale and tracker."""
        scaler = self.scalers[name]
        found = [flag.reshape(()) for optimizer in self.optimizers for flag in flags(scaler, optimizer)]
        return [*self.gradients.locals, *found, *state(scaler)]

    def _subject(self, name: str, call: Call, after: Call) -> Subject:
        scaler = self.scalers[name]
        return Subject(lambda: call(scaler, self), lambda: self.prepare(name), lambda: after(scaler, self))

    def prepare(self, name: str) -> None:
        """Put the gradients in place for a scaler's next step."""
        if self.case.coming == "new addresses":
            self.gradients.renew()
        else:
            self.gradients.restore()
        if self.case.coming == "come and go":  # each scaler sees the same sequence of choices
            chosen = {*self._draws[name].sample(range(EXPERTS), EXPERTS // 2)}
            self.gradients.choose(i for i in range(self.case.count) if i // EXPERT_WEIGHTS in chosen)
        if self.device == "cuda":
            torch.cuda.synchronize()


def _frozen(count: int, device: str) -> list[Tensor]:
    return [torch.nn.Parameter(torch.empty(1, device=device), requires_grad=False) for _ in range(count)]


def check(case: Case, mesh: DeviceMesh | None) -> None:
    """Raise WrongResult unless both scalers leave the same bits, of finite gradients and of an infinite one."""
    for metric in CALLS:
        for spoilt in (False, True):
            bench = Bench(case, mesh)
            with bench.gradients.spoilt(spoilt):
                require_same(f"{case.name}, {metric}", bench.subjects(metric), bench.result)


def measure(
    case: Case, mesh: DeviceMesh | None, effort: Effort, verify: Callable[[Case, DeviceMesh | None], None] = check
) -> Iterator[Row]:
    """Check a case, then time it; rows of the times and of their ratios."""
    with one_thread():
        verify(case, mesh)
    for metric in CALLS:
        with one_thread():
            times = interleaved(Bench(case, mesh).subjects(metric), effort, warmup=5)
        yield from time_rows("host", case.name, metric, times)
