"""What do unscaling and clipping in one call cost beside torch's two?

On the CPU the time of the call; on a GPU the device's work, and what the call keeps the host.
"""

import gc
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from perf.bench_host import clip, end
from perf.measure import Context, DeviceClock, Subject, host_clock, require
from perf.rows import Place, Row
from perf.subjects import DTYPES, SCALE, Gradients, lists, scalers, still

# How far a norm may be from fp64's. torch's own is summed in fp32, where a long sum may lose a percent, and rounded
# to the gradients' dtype.
TOLERANCES = {"torch": 2e-2, "ours": 1e-5}


def measure(context: Context) -> Iterator[Row]:
    """Yield all rows."""
    on_gpu = context.device == "cuda"
    clocks = {"on the device": DeviceClock(), "on the host": host_clock} if on_gpu else {"by lists": host_clock}
    few = {f"{count} x 64": [64] * count for count in ([] if context.quick else (10, 500))}
    for name, numels in (few | lists(*context)).items():
        for dtype in ("fp32",) if on_gpu else ("fp32", "bf16"):  # torch has no bf16 on a GPU
            case, gradients = f"{name} {dtype}", Gradients(numels, DTYPES[dtype], context.device)
            require_right(case, gradients, context.device)
            optimizer = still(gradients.parameters)
            run = partial(clip, optimizer=optimizer, max_norm=0.5 * norm_of(gradients.values))
            subjects = {
                name: Subject(partial(run, scaler), gradients.restore, partial(end, scaler, optimizer))
                for name, scaler in scalers(context.device).items()
            }
            for part, clock in clocks.items():
                times = context.interleaved(subjects, 1.5, clock)
                yield from Place("clip", part, case).times("unscale + clip", times)
            del gradients, optimizer, run, subjects
            gc.collect()


def norm_of(scaled: Tensor, scale: float = SCALE) -> float:
    """Return the norm of scaled gradients, once unscaled, in fp64."""
    return torch.linalg.vector_norm(scaled, dtype=torch.float64).item() / scale


def require_clipped(what: str, gradients: Gradients, norm: float, max_norm: float, scale: float = SCALE) -> None:
    """Raise WrongResult unless the gradients were unscaled, and clipped by that norm."""
    factor = min(1.0, max_norm / (norm + 1e-6)) / scale
    for mine, before in zip(gradients.locals, gradients.pieces(), strict=True):
        expected, limits = before.double() * factor, torch.finfo(mine.dtype)
        off = (mine.double() - expected).abs() > 3 * limits.eps * expected.abs() + limits.tiny
        require(not off.any(), f"{what}: gradients differ")


def require_right(case: str, gradients: Gradients, device: str) -> None:
    """Raise WrongResult unless both scalers clip as they must, leave what need not be clipped, and skip an overflow.

    They cannot leave the same bits, as torch rounds the norm to the gradients' dtype: each is held against fp64.
    """
    true = norm_of(gradients.values)
    for share, overflows in ((0.5, False), (2.0, False), (0.5, True)):
        for name, scaler in scalers(device).items():
            what = f"{case}: {name}, to {share} of the norm{', an infinity' * overflows}"
            gradients.restore()
            if overflows:
                gradients.locals[-1][-1] = float("inf")
            optimizer = still(gradients.parameters)
            norm = clip(scaler, optimizer, share * true).item()
            if overflows:
                require(not abs(norm) < float("inf"), f"{what}: the norm is {norm}")
            else:
                require(abs(norm - true) <= TOLERANCES[name] * true, f"{what}: the norm is {norm}, not {true}")
                require_clipped(what, gradients, norm, share * true)
            scaler.step(optimizer)
            scaler.update()
            found = optimizer.steps, scaler.get_scale()
            require(found == (int(not overflows), SCALE / (1 + overflows)), f"{what}: steps and scale are {found}")
