"""One list of gradients, unscaled or only checked by both scalers: checked for equal bits, then ready to be timed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perf.check import require_same
from perf.grads import Gradients, Still
from perf.measure import Subject
from perf.scalers import SCALE, flags, scalers, unscale_here

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Trial(NamedTuple):
    """Both scalers' turn at one list of gradients.

    Args:
        subjects: what is run, torch's first.
        flags: gives what a subject that has just run found.
        writes: whether gradients are unscaled, not only checked.
    """

    subjects: dict[str, Subject]
    flags: dict[str, Callable[[], list[Tensor]]]
    writes: bool


Build = Callable[[Gradients], Trial]


def unscaling(gradients: Gradients) -> Trial:
    """Return the scalers' unscaling."""
    optimizer = Still(gradients.parameters)
    found: dict[str, list[Tensor]] = {}
    trial = Trial({}, {}, writes=True)

    def add(name: str, scaler: Any) -> None:
        cleared = torch.zeros((), device=scaler._scale.device)

        def before() -> None:
            gradients.restore()
            cleared.zero_()

        def run() -> None:
            found[name] = list(unscale_here(scaler, optimizer, cleared).values())

        trial.subjects[name] = Subject(run, before)
        trial.flags[name] = lambda: found[name]

    for name, scaler in scalers(gradients.values.device.type).items():
        add(name, scaler)
    return trial


def checking(gradients: Gradients) -> Trial:
    """Return what the scalers do for an optimizer that unscales by itself."""
    optimizer = Still(gradients.parameters, fused=True)
    trial = Trial({}, {}, writes=False)

    def add(name: str, scaler: Any) -> None:
        trial.subjects[name] = Subject(lambda: scaler.step(optimizer), after=scaler.update)
        trial.flags[name] = lambda: flags(scaler, optimizer)

    for name, scaler in scalers(gradients.values.device.type).items():
        add(name, scaler)
    return trial


def require_equal(case: str, gradients: Gradients, build: Build, *, torch_serves: bool = True) -> None:
    """Raise WrongResult unless both scalers leave the same bits, of finite gradients and of an infinite one.

    Args:
        torch_serves: whether torch takes gradients of this dtype; else ours is held against the arithmetic.
    """
    for spoilt in (False, True):
        with gradients.spoilt(spoilt):
            gradients.restore()
            trial = build(gradients)
            if not torch_serves:
                _stand_in(gradients, trial)

            def result(name: str, trial: Trial = trial) -> list[Tensor]:
                return [*gradients.locals, *(flag.reshape(()) for flag in trial.flags[name]())]

            require_same(case, trial.subjects, result)
    gradients.restore()


def _stand_in(gradients: Gradients, trial: Trial) -> None:
    """Put the arithmetic where torch cannot be: a product in fp32, rounded once."""
    flag = torch.zeros((), device=gradients.values.device)

    def run() -> None:
        flag.fill_(not all(local.isfinite().all() for local in gradients.locals))
        for local in gradients.locals if trial.writes else []:
            local.copy_(local.float() * (1.0 / SCALE))

    trial.subjects["torch"] = Subject(run, trial.subjects["ours"].before)  # in its place: the first
    trial.flags["torch"] = lambda: [flag]
