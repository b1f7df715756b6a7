"""What does a step's scaler cost the host: scale + step (less the optimizer's own) + update?

Alone, where one scaler's steps are all that runs; in training loops, where forward, backward and the optimizer run in
between and leave none of it in the caches; 500 parameters under FSDP2; and on a GPU machine gradients that are kept on
the CPU. Beside it, how many Python functions a step calls, a number without noise.
"""

import functools
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from perf import host_stub, subjects
from perf.measure import Context, Subject, Times, require
from perf.models import loop_cases
from perf.rows import Place, Row
from perf.subjects import Gradients, require_equal, scalers, sharded, still

NUMEL = 64  # so small that elements cost next to nothing
COUNTS = (1, 10, 50, 500, 2000)
BLOCK = 20  # steps in a row, alone
KINDS = {"plain": False, "fused": True}
SCALE = 4.0  # nothing overflows at it: a skipped step would be a short one
ALL = "scale + step + update"
METRICS = "scale", "step", "update", ALL


def measure(context: Context) -> Iterator[Row]:
    """Yield all rows; without a GPU also those of the GPU's path over the stub driver."""
    yield from calls()
    for kind in KINDS:
        yield from loops(context, kind)
        yield from alone(context, kind)
    yield from fsdp2(context)
    if context.device == "cpu":
        yield from host_stub.measure(context)
    else:
        yield from offloaded(context)


def alone(context: Context, kind: str, part: str = "alone", backend: Any = None, counts: Any = COUNTS) -> Iterator[Row]:
    """Time steps of an optimizer that does nothing, with new gradients in each step, many in a row with one scaler."""
    for count in counts[:2] if context.quick else counts:
        case = f"{count} x {NUMEL}, {kind}"
        gradients, fused = Gradients([NUMEL] * count, device=context.device), KINDS[kind]
        subjects = whole_steps(gradients, context.device, fused, backend)
        if backend is None:
            require_equal(case, gradients.parameters, context.device, fused)
        else:
            host_stub.require_launches(case, subjects)
        times = context.interleaved(subjects, 2.0, block=1 if context.quick else BLOCK)
        yield from Place("host", part, case).times(ALL, times)


def whole_steps(gradients: Gradients, device: str, fused: bool, backend: str | None = None) -> dict[str, Subject]:
    """Return both scalers' steps."""
    optimizer, loss = still(gradients.parameters, fused=fused), torch.ones((), device=device)

    def run(scaler: Any) -> None:
        scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()

    pair = scalers(device, backend=backend)
    return {name: Subject(partial(run, scaler), gradients.renew) for name, scaler in pair.items()}


class Loop:
    """A training loop whose scaler changes from step to step, so that none, torch's and ours meet the same moment."""

    def __init__(self, model: nn.Module, batch: Tensor, *, fused: bool) -> None:
        self.model, self.batch, self.device = model, batch, batch.device.type
        self.scalers = {"none": torch.amp.GradScaler(self.device, enabled=False), **scalers(self.device, scale=SCALE)}
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=fused)
        self._inside, own_step = 0.0, self.optimizer.step

        @functools.wraps(own_step)  # torch's scaler asks for its signature in each step
        def timed_step() -> None:
            begin = time.perf_counter()
            own_step()
            self._inside += time.perf_counter() - begin

        self.optimizer.step = timed_step  # type: ignore[method-assign]

    def loss(self) -> Tensor:
        """Return a new loss."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device, dtype=torch.float16, enabled=self.device == "cuda"):
            return self.model(self.batch).float().square().mean()

    def seconds(self, scaler: Any) -> list[float]:
        """Do a step; return how long scale, step without the optimizer's own, and update took, and all of them."""
        loss, clock = self.loss(), time.perf_counter
        marks = [clock()]
        loss = scaler.scale(loss)
        marks.append(clock())
        loss.backward()
        self._inside = 0.0
        marks.append(clock())
        scaler.step(self.optimizer)
        marks.append(clock())
        scaler.update()
        marks.append(clock())
        phases = marks[1] - marks[0], marks[3] - marks[2] - self._inside, marks[4] - marks[3]
        return [*phases, sum(phases)]

    def times(self, context: Context, block: int) -> dict[str, Times]:
        """Return times by metric: medians of blocks of steps with one scaler, block by block in turn."""
        times: dict[str, Times] = {metric: {name: [] for name in self.scalers} for metric in METRICS}
        for scaler in [*self.scalers.values()] * 3:
            self.seconds(scaler)
        for order in context.rounds([*self.scalers], 5.0):
            for name in order:
                if self.device == "cuda":
                    torch.cuda.synchronize()
                steps = [self.seconds(self.scalers[name]) for _ in range(block)]
                for metric, values in zip(METRICS, zip(*steps, strict=True), strict=True):
                    times[metric][name].append(statistics.median(values))
        return times


def loops(context: Context, kind: str) -> Iterator[Row]:
    """Time the scaler's phases in training loops."""
    for name, (model, batch) in loop_cases(context.device, context.quick).items():
        case, loop, parameters = f"{name}, {kind}", Loop(model, batch, fused=KINDS[kind]), [*model.parameters()]
        (SCALE * loop.loss()).backward()
        for fused in {False, KINDS[kind]}:  # the bits of unscaling, and what a check leaves
            require_equal(case, parameters, context.device, fused=fused)
        times = loop.times(context, block=3 if len(parameters) > 100 and context.device == "cpu" else 6)
        for name in ("torch", "ours"):
            require(loop.scalers[name].get_scale() == SCALE, f"{case}: {name} skipped a step")
        for metric, seconds in times.items():
            yield from Place("host", "in a training loop", case).times(metric, seconds)


def fsdp2(context: Context, part: str = "under FSDP2", backend: str | None = None) -> Iterator[Row]:
    """Time unscaling and clipping of DTensors on a mesh of one rank, which communicates with no other."""
    count = 10 if context.quick else 500
    with sharded(1, context.device) as wrap:
        gradients = Gradients([NUMEL] * count, device=context.device, wrap=wrap)
        optimizer, case = still(gradients.parameters), f"{count} DTensors"
        if backend is None:
            require_equal(case, gradients.parameters, context.device, unscale=True)
        for metric, call in {"unscale_": lambda scaler, each: scaler.unscale_(each), "unscale + clip": clip}.items():
            subjects = {
                name: Subject(partial(call, scaler, optimizer), gradients.renew, partial(end, scaler, optimizer))
                for name, scaler in scalers(context.device, backend=backend).items()
            }
            if backend is not None:
                host_stub.require_launches(f"{case}, {metric}", subjects)
            yield from Place("host", part, case).times(metric, context.interleaved(subjects, 2.0))


def offloaded(context: Context) -> Iterator[Row]:
    """Time plain steps of gradients on the CPU, as parameter offloading leaves them; the scale is on the GPU.

    torch's are not checked: its CPU ops may read copies of the scale before they have arrived (difference 21).
    """
    for count in (10,) if context.quick else (10, 500):
        gradients = Gradients([NUMEL] * count)
        steps = whole_steps(gradients, context.device, False, None)
        steps["ours"].run()
        same = all(map(torch.equal, gradients.locals, (gradients.values / subjects.SCALE).split(NUMEL)))
        require(same, f"{count} on the CPU: other gradients than expected")
        times = context.interleaved(steps, 1.0)
        yield from Place("host", "offloaded to the CPU", f"{count} x {NUMEL}, plain").times(ALL, times)


def end(scaler: Any, optimizer: Any) -> None:
    """End a step that was unscaled as a training loop does."""
    scaler.step(optimizer)
    scaler.update()


def clip(scaler: Any, optimizer: Any, max_norm: float = 1.0) -> Tensor:
    """Unscale and clip as users of this scaler do: in one call where it has that, else in two."""
    if hasattr(scaler, "clip_grad_norm_"):
        return scaler.clip_grad_norm_(optimizer, max_norm)
    scaler.unscale_(optimizer)
    return nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm)


def calls() -> Iterator[Row]:
    """Count the Python functions that a steady step of 10 gradients on the CPU calls."""
    for kind, fused in KINDS.items():
        gradients, counted = Gradients([NUMEL] * 10), {}
        for name, subject in whole_steps(gradients, "cpu", fused).items():
            for _ in range(5):
                subject.run()
            counted[name] = calls_of(subject.run)
        yield from Place("host", "Python calls of a step", f"10 gradients, {kind}").counts("calls", counted)


def calls_of(run: Any) -> int:
    """Return how many Python functions a call calls, without itself."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        run()
    finally:
        sys.setprofile(None)
    return events.count("call") - 1
