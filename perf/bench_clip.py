"""What do unscaling and clipping in one call cost beside torch's two?

On the CPU the time of the call; on a GPU the device's work, and what the call keeps the host.
"""

import gc
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from perf.bench_host import clip
from perf.measure import Clock, Context, DeviceClock, Subject, host_clock, interleaved, require
from perf.rows import Place, Row
from perf.subjects import SCALE, Gradients, Still, gpt2, scalers

# How far a norm may be from fp64's. torch's own is summed in fp32, where a long sum may lose a percent, and rounded
# to the gradients' dtype.
TOLERANCES = {"torch": 2e-2, "ours": 1e-5}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COPIES = 5  # of all gradients: values, gradients, parameters, what a check needs


def measure(context: Context) -> Iterator[Row]:
    """Yield all rows."""
    clocks: dict[str, Clock] = {"unscale + clip": host_clock}
    if context.device == "cuda":
        clocks = {"unscale + clip, device": DeviceClock(), "unscale + clip, host": host_clock}
    for name, numels in lists(context).items():
        for dtype in DTYPES if context.device == "cpu" else ("fp32",):  # torch has no bf16 on a GPU
            case = f"{name} {dtype}"
            gradients = Gradients(numels, DTYPES[dtype], context.device)
            require_right(case, gradients, context.device)
            subjects = clipping(gradients, context.device)
            for metric, clock in clocks.items():
                times = interleaved(subjects, context.rounds(1.5), clock=clock)
                yield from Place("clip", "by lists", case).times(metric, times)
            del gradients, subjects
            gc.collect()


def lists(context: Context) -> dict[str, list[int]]:
    """Return the elements of the gradients, by the list's name."""
    few = {"10 x 64": [64] * 10}
    if context.quick:
        return few
    few["500 x 64"] = [64] * 500
    if context.device == "cpu":
        return few | {"2000 x 1k": [1000] * 2000, "GPT-2 124M, 1 of 8 shards": gpt2(8)}
    count = min(200, torch.cuda.mem_get_info()[0] // (COPIES * 4 * 5_000_000))  # 1e9 elements where they fit
    return few | {"GPT-2 124M": gpt2(), f"{count} x 5M": [5_000_000] * count}


def clipping(gradients: Gradients, device: str) -> Mapping[str, Subject]:
    """Return both scalers' turn, which clips to half of the norm."""
    optimizer, limit = Still(gradients.parameters), 0.5 * norm_of(gradients.values)
    return {
        name: Subject(partial(clip, scaler, optimizer, limit), gradients.restore, scaler.update)
        for name, scaler in scalers(device).items()
    }


def norm_of(scaled: Tensor) -> float:
    """Return the norm of scaled gradients, once unscaled, in fp64."""
    return torch.linalg.vector_norm(scaled, dtype=torch.float64).item() / SCALE


def require_right(case: str, gradients: Gradients, device: str) -> None:
    """Raise WrongResult unless both scalers clip as they must, leave what need not be clipped, and skip an overflow.

    They cannot leave the same bits, as torch rounds the norm to the gradients' dtype: each is held against fp64.
    """
    true = norm_of(gradients.values)
    for share, overflows in ((0.5, False), (2.0, False), (0.5, True)):
        for name, scaler in scalers(device).items():
            what = f"{case}: {name}, to {share} of the norm{', of an infinity' * overflows}"
            gradients.restore()
            if overflows:
                gradients.locals[-1][-1] = float("inf")
            optimizer = Still(gradients.parameters)
            norm = clip(scaler, optimizer, share * true)
            if overflows:
                require(not norm.isfinite(), f"{what}: the norm is {norm.item()}")
            else:
                require(abs(norm.item() - true) <= TOLERANCES[name] * true, f"{what}: the norm is {norm.item()}")
                coefficient = min(1.0, share * true / (norm.item() + 1e-6))
                for mine, scaled in zip(gradients.locals, gradients.pieces(), strict=True):
                    expected, limits = scaled.double() / SCALE * coefficient, torch.finfo(mine.dtype)
                    off = (mine.double() - expected).abs() > 3 * limits.eps * expected.abs() + limits.tiny
                    require(not off.any(), f"{what}: gradients differ")
            scaler.step(optimizer)
            scaler.update()
            require(optimizer.steps == (not overflows), f"{what}: {optimizer.steps} steps")
            require(scaler.get_scale() == SCALE / (1 + overflows), f"{what}: the scale is {scaler.get_scale()}")
