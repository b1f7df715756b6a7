"""A training loop whose scaler changes from step to step, so that none, torch's and ours meet the same moment."""

import functools
import operator
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from perf.check import require, require_same
from perf.grads import Still, local
from perf.measure import Effort, Subject, rotations
from perf.scalers import scalers, unscale_here

SCALE = 4.0  # nothing overflows at it: a skipped step would be a short one
MAX_NORM = 1.0  # of a clipped step
BLOCK = 5  # steps in a row with one scaler: the host runs ahead of the GPU as it does in training

Times = dict[str, dict[str, list[float]]]


class Loop:
    """One model and optimizer, trained in fp16 autocast.

    Args:
        model: returns its loss.
        optimizer: of its parameters, or of some.
        batch: what the model takes.
        clip: unscale and clip before the step.
    """

    def __init__(self, model: nn.Module, optimizer: Any, batch: Sequence[Tensor], *, clip: bool = False) -> None:
        self.model, self.optimizer, self.batch, self.clip = model, optimizer, batch, clip
        self.device = batch[0].device.type
        self.scalers = {"none": torch.amp.GradScaler(self.device, enabled=False), **scalers(self.device, scale=SCALE)}
        self._in_optimizer = 0.0
        optimizer.step = self._told_apart(optimizer.step)  # no hooks: an optimizer with hooks is lent copies

    def backward(self, scaler: Any) -> None:
        """Take a new loss and its gradients."""
        self.optimizer.zero_grad()
        with record_function("forward"), torch.autocast(self.device, dtype=torch.float16):
            loss = self.model(*self.batch)
        with record_function("scaler"):
            loss = scaler.scale(loss)
        with record_function("backward"):
            loss.backward()

    def finish(self, scaler: Any) -> None:
        """Do the rest of the step: unscale and clip if asked for, step, update."""
        with record_function("scaler"):
            if self.clip:
                self._clip(scaler)
            scaler.step(self.optimizer)
            scaler.update()

    def step(self, scaler: Any) -> None:
        """Do one whole step."""
        self.backward(scaler)
        self.finish(scaler)

    def finish_seconds(self, scaler: Any) -> tuple[float, float]:
        """Do `finish`; return how long it kept the host, and how long without the optimizer's own step."""
        self._in_optimizer = 0.0
        begin = time.perf_counter()
        self.finish(scaler)
        seconds = time.perf_counter() - begin
        return seconds, seconds - self._in_optimizer

    def _clip(self, scaler: Any) -> None:
        """Clip as users of this scaler do: in one call where it has that, else in two."""
        if hasattr(scaler, "clip_grad_norm_"):
            scaler.clip_grad_norm_(self.optimizer, MAX_NORM)
        else:
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def _told_apart(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return an optimizer's step that marks its phase and adds up its time."""

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            with record_function("optimizer"):
                begin = time.perf_counter()
                result = step(*args, **kwargs)
                self._in_optimizer += time.perf_counter() - begin
            return result

        return run


def repeated_addresses(loop: Loop, steps: int) -> list[float]:
    """Return for each step which share of the gradients lies where it lay in the step before."""
    scaler, shares, before = loop.scalers["ours"], [], None
    for _ in range(steps + 1):
        loop.backward(scaler)
        # No list of gradients: it would keep them alive, and the next ones elsewhere.
        parameters = [p for group in loop.optimizer.param_groups for p in group["params"]]
        here = [local(p.grad).data_ptr() for p in parameters if p.grad is not None]
        loop.finish(scaler)
        if before is not None:
            shares.append(sum(map(operator.eq, before, here)) / len(here))
        before = here
    return shares


def timed_steps(loop: Loop, effort: Effort) -> Times:
    """Return seconds by metric and scaler: of a step, from backward's end to the next forward, of the host.

    Who asks a parameter for its gradient first has torch make the Python object: without a scaler the optimizer does.
    """
    times: Times = {}
    for scaler in loop.scalers.values():
        _block(loop, scaler)
    for order in rotations(list(loop.scalers), effort):
        for name in order:
            for metric, values in _block(loop, loop.scalers[name]).items():
                times.setdefault(metric, {name: [] for name in loop.scalers})[name] += values
    return times


def _block(loop: Loop, scaler: Any) -> dict[str, list[float]]:
    starts, ends, finishes = [], [], []  # of steps, of backward passes, of `finish`
    loop.step(scaler)
    for _ in range(BLOCK):
        starts.append(_mark(loop.device))
        loop.backward(scaler)
        ends.append(_mark(loop.device))
        finishes.append(loop.finish_seconds(scaler))
    starts.append(_mark(loop.device))
    if loop.device == "cuda":
        torch.cuda.synchronize()
    steps = [_between(*pair) for pair in pairwise(starts)]
    tails = [_between(*pair) for pair in zip(ends, starts[1:], strict=True)]
    both, host = map(list, zip(*finishes, strict=True))
    return {"step": steps, "backward to forward": tails, "host": host, "host, optimizer too": both}


def _mark(device: str) -> Any:
    """Return this moment, on the GPU's own clock where there is one."""
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Any, second: Any) -> float:
    if isinstance(first, float):
        return float(second - first)
    return float(first.elapsed_time(second)) * 1e-3


def require_no_skips(case: str, loop: Loop) -> None:
    """Raise WrongResult if a scaler backed off: its steps did less than the others'."""
    for name, scaler in loop.scalers.items():
        require(
            not scaler.is_enabled() or scaler.get_scale() == SCALE,
            f"{case}: {name} skipped a step of the model that all of them train, its scale is {scaler.get_scale()}",
        )


def require_equal_unscaling(case: str, loop: Loop) -> None:
    """Raise WrongResult unless both scalers turn the model's own gradients into the same bits.

    Whole steps cannot be compared: a GPU adds some gradients up in no fixed order.
    """
    loop.backward(loop.scalers["torch"])
    parameters = [p for group in loop.optimizer.param_groups for p in group["params"] if p.grad is not None]
    gradients = [local(p.grad) for p in parameters]
    before = [gradient.clone() for gradient in gradients]
    optimizer = Still(parameters)

    def subject(scaler: Any) -> Subject:
        flag = torch.zeros_like(scaler._scale)
        return Subject(lambda: unscale_here(scaler, optimizer, flag), lambda: torch._foreach_copy_(gradients, before))

    # Gradients that are not where the scale is, torch's op may divide by a scale still on its way (pytorch#176429).
    believed = scalers(gradients[0].device.type, scale=SCALE)["torch"]
    require_same(case, {"torch": subject(believed), "ours": subject(loop.scalers["ours"])}, lambda name: gradients)
    loop.optimizer.zero_grad()
