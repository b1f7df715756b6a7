"""What does a guard cost in a bf16 step that clips, beside a check by hand?

    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)      guard.clip_grad_norm_(optimizer, 1.0)
    if torch.isfinite(norm):                                    guard.step(optimizer)
        optimizer.step()

The host's time, with an optimizer that does nothing. On a GPU the check by hand waits for the norm, and so does a guard
for an optimizer that is not fused; for a fused one nothing waits.
"""

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from perf.bench_clip import TOLERANCES, norm_of, require_clipped
from perf.bench_host import KINDS, NUMEL
from perf.measure import Context, Subject, require
from perf.rows import Place, Row
from perf.subjects import Gradients, lists, still
from scaler_triton import StepGuard

NOT_FINITE, SPIKES = "skip what is not finite", "skip spikes, too"
SIGMAS = {NOT_FINITE: None, SPIKES: 6.0}
WINDOW = 128


class ByHand:
    """The check that users write, with a guard's methods."""

    def clip_grad_norm_(self, optimizer: Any, max_norm: float) -> torch.Tensor:
        """Clip all gradients by their norm, and return it."""
        self.norm = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm)
        return self.norm

    def step(self, optimizer: Any) -> None:
        """Step if the norm is finite."""
        if torch.isfinite(self.norm):
            optimizer.step()


def measure(context: Context) -> Iterator[Row]:
    """Yield all rows."""
    few = {f"{count} x {NUMEL}": [NUMEL] * count for count in ([] if context.quick else (10, 100, 500))}
    models = {name: numels for name, numels in lists(*context).items() if context.quick or name.startswith("GPT-2")}
    for name, numels in (few | models).items():
        gradients = Gradients(numels, torch.bfloat16, context.device)
        require_right(f"{name} bf16", gradients, context.device)
        for kind, fused in KINDS.items():
            yield from steps(context, f"{name} bf16, {kind}", gradients, fused)
        del gradients
        gc.collect()


def steps(context: Context, case: str, gradients: Gradients, fused: bool) -> Iterator[Row]:
    """Time steps by hand and with guards, with `update()` and, as it may be left out, without."""
    optimizer, max_norm = still(gradients.parameters, fused=fused), 0.5 * norm_of(gradients.values, 1.0)

    def run(guard: Any, updates: bool) -> None:
        guard.clip_grad_norm_(optimizer, max_norm)
        guard.step(optimizer)
        if updates:
            guard.update()

    def before() -> None:
        gradients.restore()
        if context.device == "cuda":
            torch.cuda.synchronize()

    subjects = {"torch": Subject(partial(run, ByHand(), False), before)}
    for metric, sigma in SIGMAS.items():
        for updates in (False, True):
            guard = StepGuard(context.device, spike_sigma=sigma, window=WINDOW)
            subjects[f"{metric}{', update()' * updates}"] = Subject(partial(run, guard, updates), before)
    times = context.interleaved(subjects, 1.5)
    for metric in [*subjects][1:]:
        yield from Place("guard", "by lists", case).times(metric, {"torch": times["torch"], "ours": times[metric]})


def require_right(case: str, gradients: Gradients, device: str) -> None:
    """Raise WrongResult unless all clip as they must, skip NaN, and only who looks for spikes skips one."""
    true = norm_of(gradients.values, 1.0)
    guards = {metric: StepGuard(device, spike_sigma=sigma, window=2) for metric, sigma in SIGMAS.items()}
    for name, guard in {"by hand": ByHand(), **guards}.items():
        for fused in KINDS.values():
            optimizer = still(gradients.parameters, fused=fused)
            for kind in ("usual", "usual", "NaN", "usual", "spike"):
                what = f"{case}: {name}, {kind}"
                gradients.restore()
                if kind == "NaN":
                    gradients.locals[-1][-1] = float("nan")
                if kind == "spike":
                    torch._foreach_mul_(gradients.locals, 4.0)
                norm, taken = guard.clip_grad_norm_(optimizer, 0.5 * true).item(), optimizer.steps
                if kind == "usual":
                    tolerance = TOLERANCES["torch" if name == "by hand" else "ours"]
                    require(abs(norm - true) <= tolerance * true, f"{what}: the norm is {norm}, not {true}")
                    require_clipped(what, gradients, norm, 0.5 * true, 1.0)
                guard.step(optimizer)
                skips = kind == "NaN" or (kind == "spike" and name == SPIKES)
                by_itself = fused and name != "by hand"  # it is called each time
                found = not guard.was_skipped(optimizer) if by_itself else optimizer.steps > taken
                require(found is not skips, f"{what}: the step is {'taken' if found else 'skipped'}")
