"""Gradients unscaled and clipped by both scalers, perhaps with a step: held against fp64, then ready to be timed."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perf.check import require
from perf.grads import Gradients, Still, local
from perf.measure import Subject
from perf.models import adamw
from perf.scalers import SCALE, flags, scalers

CLIP, STEP, DEFERRED = "unscale + clip", "unscale + clip + fused AdamW", "unscale + clip + fused AdamW, deferred"
METRICS = (CLIP, STEP, DEFERRED)

# How far a norm may be from fp64's. torch's own is summed in fp32, where a long sum may lose a percent, and rounded
# to the gradients' dtype.
OURS_NORM = 1e-5
TORCHS_NORM = {torch.float32: 1e-2, torch.bfloat16: 2e-2}


def clip(scaler: Any, optimizer: Any, max_norm: float) -> Tensor:
    """Clip as users of torch do."""
    scaler.unscale_(optimizer)
    return torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm)


def clip_at_once(scaler: Any, optimizer: Any, max_norm: float, **options: Any) -> Tensor:
    """Clip as users of ours do."""
    norm: Tensor = scaler.clip_grad_norm_(optimizer, max_norm, **options)
    return norm


class Counted(Still):
    """An optimizer whose steps do nothing but are counted."""

    steps = 0

    def step(self, *args: Any) -> None:
        """Count."""
        self.steps += 1


class Clipping:
    """Both scalers' turn at one optimizer's gradients.

    Args:
        gradients: the optimizer's.
        metric: one of `METRICS`.
        optimizer, pair: the optimizer and both scalers; default: new ones, fused AdamW where the metric has it.
        before: gives what puts the gradients in place for a subject; default: they get their values back.
        share: `max_norm` as a share of the norm: 0.5 clips, 2.0 does not.
    """

    def __init__(
        self,
        gradients: Gradients,
        metric: str = CLIP,
        *,
        optimizer: Any = None,
        pair: dict[str, Any] | None = None,
        before: Callable[[str], None] | None = None,
        share: float = 0.5,
    ) -> None:
        self.gradients, self.metric = gradients, metric
        self.scalers = pair or scalers(gradients.values.device.type)
        self.optimizer = optimizer or (Counted(gradients.parameters) if metric == CLIP else stepping(gradients))
        self.max_norm = share * norm_of(gradients.pieces())
        self.norms: dict[str, Tensor] = {}
        self._before = before or (lambda name: gradients.restore())

    def subjects(self) -> dict[str, Subject]:
        """Return what is timed; `update` is not."""
        return {
            name: Subject(partial(self._run, name, scaler), partial(self._before, name), scaler.update)
            for name, scaler in self.scalers.items()
        }

    def _run(self, name: str, scaler: Any) -> None:
        if name == "torch":
            self.norms[name] = clip(scaler, self.optimizer, self.max_norm)
        else:
            options = {"defer": True} if self.metric == DEFERRED else {}
            self.norms[name] = clip_at_once(scaler, self.optimizer, self.max_norm, **options)
        if self.metric != CLIP:
            scaler.step(self.optimizer)


def stepping(gradients: Gradients) -> torch.optim.AdamW:
    """Return a fused AdamW for parameters that begin at 0."""
    with torch.no_grad():
        torch._foreach_zero_([local(parameter) for parameter in gradients.parameters])
    return adamw(gradients.parameters, fused=True)


def norm_of(scaled: Sequence[Tensor]) -> float:
    """Return the norm that scaled gradients have once they are unscaled, in fp64."""
    squares = [torch.linalg.vector_norm(piece, dtype=torch.float64).square() for piece in scaled]
    return math.sqrt(torch.stack(squares).sum().item()) / SCALE


def require_right(case: str, build: Callable[[float], Clipping]) -> None:
    """Raise WrongResult unless norm, gradients, flag and step of both scalers are right.

    Gradients are clipped, then left, then hold an infinity: then the step must be skipped. torch and ours cannot leave
    the same bits, as torch rounds the norm: each is held against fp64.

    Args:
        case: for the message.
        build: gives a new `Clipping` for a `share`.
    """
    for what, share, spoilt in (("clipped", 0.5, False), ("left", 2.0, False), ("overflow", 0.5, True)):
        for name in ("torch", "ours"):
            clipping = build(share)
            with clipping.gradients.spoilt(spoilt):
                _check_turn(f"{case}, {clipping.metric}, {what}: {name}", clipping, name)


def _check_turn(case: str, clipping: Clipping, name: str) -> None:
    scaler, optimizer, subject = clipping.scalers[name], clipping.optimizer, clipping.subjects()[name]
    subject.before()
    scaled = clipping.gradients.pieces(only_present=True)
    finite = all(bool(piece.isfinite().all()) for piece in scaled)
    subject.run()
    if clipping.metric == CLIP:
        scaler.step(optimizer)
    found = [flag.item() for flag in flags(scaler, optimizer)]
    require(found == [0.0 if finite else 1.0], f"{case}: flags {found}")
    norm = whole(clipping.norms[name])
    if finite:
        _check_finite(case, clipping, norm, scaled, OURS_NORM if name == "ours" else TORCHS_NORM[scaled[0].dtype])
    else:
        require(not norm.isfinite(), f"{case}: the norm is {norm.item()}")
    _check_step(case, clipping, finite)
    subject.after()
    scale = SCALE if finite else SCALE / 2
    require(scaler.get_scale() == scale, f"{case}: the scale is {scaler.get_scale()}")


def _check_finite(case: str, clipping: Clipping, norm: Tensor, scaled: Sequence[Tensor], tolerance: float) -> None:
    true = norm_of(scaled)
    require(abs(norm.item() - true) <= tolerance * true, f"{case}: the norm is {norm.item()}, not {true}")
    coefficient = torch.clamp(clipping.max_norm / (norm + 1e-6), max=1.0).double()
    for index, (piece, mine) in enumerate(zip(scaled, clipping.gradients.present(), strict=True)):
        expected = piece.double() * (1.0 / SCALE) * coefficient
        _require_close(f"{case}: gradient {index}", mine, expected)


def _check_step(case: str, clipping: Clipping, finite: bool) -> None:
    """Require that a step was taken if gradients were finite; AdamW's first moment tells with which gradients."""
    optimizer, parameters = clipping.optimizer, clipping.gradients.parameters
    if clipping.metric == CLIP:
        require(optimizer.steps == int(finite), f"{case}: {optimizer.steps} steps")
    elif not finite:
        require(not any(local(p).any() for p in parameters), f"{case}: a step that had to be skipped")
    else:
        moved = [parameter for parameter in parameters if parameter.grad is not None]
        for index, (parameter, mine) in enumerate(zip(moved, clipping.gradients.present(), strict=True)):
            require(local(parameter).any(), f"{case}: parameter {index} has not moved")
            moment = local(optimizer.state[parameter]["exp_avg"])
            _require_close(f"{case}: moment {index}", moment, 0.1 * mine.double(), 8)


def _require_close(what: str, found: Tensor, expected: Tensor, ulps: int = 2) -> None:
    """Allow for what a few products in the dtype of `found` round away."""
    limits = torch.finfo(found.dtype)
    off = (found.double() - expected).abs() > ulps * limits.eps * expected.abs() + limits.tiny
    require(not off.any(), f"{what} differs: {found[off][:4].tolist()}, not {expected[off][:4].tolist()}")


def whole(norm: Any) -> Tensor:
    """Return a norm that may be a DTensor as a tensor."""
    result: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return result
