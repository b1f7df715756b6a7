"""What does a step's scaler cost the host: scale + step (less the optimizer's own) + update?

Alone, where the scaler's code is all that runs; in training loops, where forward, backward and the optimizer run in
between and leave none of it in the caches; and 500 parameters under FSDP2. Beside it the public ops, and how many Python
functions a step calls, a number without noise.
"""

import functools
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from perf import host_stub
from perf.measure import Context, Subject, interleaved, no_collection, require
from perf.models import loop_cases
from perf.rows import Place, Row
from perf.subjects import Gradients, Still, one_rank, require_equal, resting_adamw, scalers, sharded, unscale_then_step
from scaler_triton import ops

NUMEL = 64  # so small that elements cost next to nothing
COUNTS = (1, 10, 50, 500, 2000)
KINDS = {"plain": False, "fused": True}
FSDP2 = 500
LOOP_SCALE = 4.0  # nothing overflows at it: a skipped step would be a short one
MAX_NORM = 1.0
ALL = "scale + step + update"

Phases = Mapping[str, list[float]]


def measure(context: Context) -> Iterator[Row]:
    """Yield all rows; without a GPU also those of the GPU's path over the stub driver."""
    yield from calls()
    for kind in KINDS:
        yield from loops(context, kind)
        yield from alone(context, kind)
    yield from fsdp2(context)
    yield from public_ops(context)
    if context.device == "cpu":
        yield from host_stub.measure(context)


def alone(
    context: Context, kind: str, part: str = "alone", backend: str | None = None, counts: Sequence[int] = COUNTS
) -> Iterator[Row]:
    """Time steps of an optimizer that does nothing, with new gradients in each step."""
    for count in counts[:2] if context.quick else counts:
        case = f"{count} gradients, {kind}"
        gradients = Gradients([NUMEL] * count, device=context.device)
        if backend is None:
            require_equal(case, gradients.parameters, context.device, fused=KINDS[kind])
        optimizer = resting_adamw(gradients.parameters, fused=KINDS[kind])
        subjects = whole_steps(gradients, context.device, optimizer, backend)
        if backend is not None:
            host_stub.require_launches(case, subjects)
        yield from Place("host", part, case).times(ALL, interleaved(subjects, context.rounds(1.0)))


def whole_steps(gradients: Gradients, device: str, optimizer: Any, backend: str | None = None) -> dict[str, Subject]:
    """Return both scalers' steps."""
    loss = torch.ones((), device=device)

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
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=fused)
        none = torch.amp.GradScaler(self.device, enabled=False)
        self.scalers: dict[str, Any] = {"none": none, **scalers(self.device, scale=LOOP_SCALE)}
        self._inside, own_step = 0.0, self.optimizer.step

        @functools.wraps(own_step)  # torch's scaler asks for its signature in each step
        def timed_step() -> None:
            begin = time.perf_counter()
            own_step()
            self._inside += time.perf_counter() - begin

        self.optimizer.step = timed_step  # type: ignore[method-assign]

    def backward(self, scaler: Any) -> float:
        """Take new gradients; return how long `scale` took."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device, dtype=torch.float16, enabled=self.device == "cuda"):
            loss = self.model(self.batch).float().square().mean()
        begin = time.perf_counter()
        loss = scaler.scale(loss)
        seconds = time.perf_counter() - begin
        loss.backward()
        return seconds

    def seconds(self, scaler: Any) -> tuple[float, float, float]:
        """Do a whole step; return how long scale, step without the optimizer's own, and update took."""
        scale = self.backward(scaler)
        self._inside = 0.0
        begin = time.perf_counter()
        scaler.step(self.optimizer)
        middle = time.perf_counter()
        scaler.update()
        return scale, middle - begin - self._inside, time.perf_counter() - middle

    def times(self, context: Context, block: int) -> dict[str, Phases]:
        """Return seconds by phase and scaler: medians of blocks of steps with one scaler, block by block in turn."""
        metrics = ("scale", "step", "update", ALL)
        times: dict[str, dict[str, list[float]]] = {metric: {name: [] for name in self.scalers} for metric in metrics}
        for _ in range(3):
            for scaler in self.scalers.values():
                self.seconds(scaler)
        for order in context.rounds(5.0).orders([*self.scalers]):
            for name in order:
                if self.device == "cuda":
                    torch.cuda.synchronize()
                steps = [self.seconds(self.scalers[name]) for _ in range(block)]
                medians = [statistics.median(phase) for phase in zip(*steps, strict=True)]
                for metric, value in zip(metrics, (*medians, sum(medians)), strict=True):
                    times[metric][name].append(value)
        return times


def loops(context: Context, kind: str) -> Iterator[Row]:
    """Time the scaler's phases in training loops."""
    for name, (model, batch) in loop_cases(context.device, context.quick).items():
        case = f"{name}, {kind}"
        loop = Loop(model, batch, fused=KINDS[kind])
        loop.backward(loop.scalers["torch"])
        parameters = list(model.parameters())
        require_equal(case, parameters, context.device, fused=False)  # the bits of unscaling, then of the check
        require_equal(case, parameters, context.device, fused=KINDS[kind])
        place = Place("host", "in a training loop", case)
        with no_collection():
            times = loop.times(context, block=2 if len(parameters) > 100 and context.device == "cpu" else 6)
        for scaler in list(loop.scalers.values())[1:]:
            require(scaler.get_scale() == LOOP_SCALE, f"{case}: a step was skipped")
        for metric, seconds in times.items():
            yield from place.times(metric, seconds)


def fsdp2(context: Context, part: str = "under FSDP2", backend: str | None = None) -> Iterator[Row]:
    """Time unscaling and clipping of DTensors on a mesh of one rank, which communicates with no other."""
    count = 10 if context.quick else FSDP2
    with one_rank(context.device) as mesh:
        gradients = Gradients([NUMEL] * count, device=context.device, wrap=sharded(mesh))
        optimizer = Still(gradients.parameters)
        case = f"{count} DTensors"
        if backend is None:
            require_equal(case, gradients.parameters, context.device, unscale_then_step, fused=False)
        for metric, call in {"unscale_": lambda scaler: scaler.unscale_(optimizer), "unscale + clip": clip}.items():
            pair = scalers(context.device, backend=backend)
            runs = {
                name: partial(clip, scaler, optimizer) if call is clip else partial(call, scaler)
                for name, scaler in pair.items()
            }
            subjects = {name: Subject(run, gradients.renew, pair[name].update) for name, run in runs.items()}
            if backend is not None:
                host_stub.require_launches(f"{case}, {metric}", subjects)
            yield from Place("host", part, case).times(metric, interleaved(subjects, context.rounds(2.0)))


def clip(scaler: Any, optimizer: Any, max_norm: float = MAX_NORM) -> Tensor:
    """Unscale and clip as users of this scaler do: in one call where it has that, else in two."""
    if hasattr(scaler, "clip_grad_norm_"):
        norm: Tensor = scaler.clip_grad_norm_(optimizer, max_norm)
        return norm
    scaler.unscale_(optimizer)
    return nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm)


def public_ops(context: Context) -> Iterator[Row]:
    """Time `ops.unscale_` on lists beside the op of torch's that does the same."""
    for count in COUNTS[:2] if context.quick else COUNTS:
        case = f"{count} tensors"
        gradients = Gradients([NUMEL] * count, device=context.device)
        inverse, flag = torch.full((), 1 / 3, device=context.device), torch.zeros((), device=context.device)
        runs = {
            "torch": lambda: torch._amp_foreach_non_finite_check_and_unscale_(gradients.locals, flag, inverse),
            "ours": lambda: ops.unscale_(gradients.locals, inverse, flag),
        }
        results = []
        for run in runs.values():
            gradients.restore()
            run()
            results.append([*(each.clone() for each in gradients.locals), flag.clone()])
        require(all(map(torch.equal, *results)), f"{case}: ops.unscale_ differs from torch's op")
        subjects = {name: Subject(run, gradients.restore) for name, run in runs.items()}
        yield from Place("host", "public ops", case).times("ops.unscale_", interleaved(subjects, context.rounds(0.5)))


def calls() -> Iterator[Row]:
    """Count the Python functions that a steady step of 10 gradients on the CPU calls."""
    for kind in KINDS:
        gradients = Gradients([NUMEL] * 10)
        counted = {}
        optimizer = Still(gradients.parameters, fused=KINDS[kind])
        for name, subject in whole_steps(gradients, "cpu", optimizer).items():
            for _ in range(5):
                subject.run()
            counted[name] = calls_of(subject.run)
        yield from Place("host", "Python calls of a step", f"10 gradients, {kind}").counts("calls", counted)


def calls_of(run: Any) -> int:
    """Return how many Python functions a call calls, without itself."""
    seen = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        seen += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen - 1
