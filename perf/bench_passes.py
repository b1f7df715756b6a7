"""How near do the passes over gradients, unscale, check, norm and clip, come to a copy?

On a GPU each kernel alone, the device's time from a cold cache; on the CPU the public ops, on one thread. A copy reads
and writes all bytes once, as unscaling does; a check only reads, as the sum of one flat buffer does ("read").
"""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from perf.measure import Context, DeviceClock, Subject, host_clock, interleaved, require
from perf.rows import Place, Row
from perf.subjects import Gradients, bits, gpt2
from scaler_triton import ops

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FACTOR = 1 / 3  # no power of 2: products are rounded
Passes = dict[str, Callable[[], Any]]


def measure(context: Context) -> Iterator[Row]:
    """Yield all rows."""
    clock = DeviceClock() if context.device == "cuda" else host_clock
    for name, numels in lists(context).items():
        for dtype_name, dtype in DTYPES.items():
            case = f"{name} {dtype_name}"
            gradients = Gradients(numels, dtype, context.device)
            ours, flag = our_passes(gradients)
            torchs = torch_passes(gradients) if torch_takes(gradients.locals[0]) else {}
            require_right(case, gradients, ours, flag)
            others = copies(gradients)
            for metric, run in ours.items():
                runs = {"torch": torchs[metric], "ours": run} if torchs else {"ours": run}
                runs |= {"read": others["read"]} if metric in ("check", "norm") else {"copy": others["copy"]}
                subjects = {subject: Subject(run, gradients.restore) for subject, run in runs.items()}
                times = interleaved(subjects, context.rounds(0.5), clock=clock, warmup=2)
                yield from Place("passes", "by lists", case).times(metric, times)
            del gradients, ours, torchs, others, runs, subjects, run
            gc.collect()


def lists(context: Context) -> dict[str, list[int]]:
    """Return the elements of the gradients: large spans, many small ones, and a model's mixture."""
    if context.quick:
        return {"10 x 64": [64] * 10}
    small = {"2000 x 1k": [1024] * 2000}
    if context.device == "cpu":
        return small | {"20 x 1M": [1_000_000] * 20, "GPT-2 124M, 1 of 8 shards": gpt2(8)}
    return small | {"150 x 830k": [829_440] * 150, "GPT-2 124M": gpt2(), "500 x 64k": [65_536] * 500}


def our_passes(gradients: Gradients) -> tuple[Passes, Tensor]:
    """Return our passes by name, and the flag that they set."""
    device, grads = gradients.values.device, gradients.locals
    inverse, flag = torch.full((), FACTOR, device=device), torch.zeros((), device=device)
    if device.type == "cpu":
        return {
            "unscale": lambda: ops.unscale_(grads, inverse, flag),
            "check": lambda: ops.check_nonfinite(grads, flag),
            "norm": lambda: ops.grad_norm(grads, flag, inv_scale=inverse),
        }, flag
    from scaler_triton.kernels import abi, clip, config, norm, table, unscale

    def table_for(mode: str) -> Any:
        numels = [grad.numel() for grad in grads]
        made = table.GradTable(numels, grads[0].dtype, device, config.config_for(device, mode, grads[0].itemsize, numels))
        made.set_addresses([grad.data_ptr() for grad in grads])
        return made

    tables = {mode: table_for(mode) for mode in config.MODES}
    totals, scale = torch.zeros(abi.TOTALS, dtype=torch.float64, device=device), torch.full((), 3.0, device=device)
    length = torch.zeros((), device=device)
    return {
        "unscale": lambda: unscale.launch_unscale(tables["unscale"], inverse, flag, inverse=True),
        "check": lambda: unscale.launch_check(tables["check"], flag),
        "norm": lambda: norm.launch_sum_of_squares(tables["norm"], inverse, flag, totals, inverse=True),
        "clip": lambda: clip.launch_clip(tables["clip"], scale, totals, 1.0, length),
    }, flag


def torch_passes(gradients: Gradients) -> Passes:
    """Return what torch's scaler, and its clipping behind `unscale_`, do in place of each pass."""
    device, grads = gradients.values.device, gradients.locals
    inverse, one, flag = (torch.full((), value, device=device) for value in (FACTOR, 1.0, 0.0))
    unscale = torch._amp_foreach_non_finite_check_and_unscale_
    return {
        "unscale": lambda: unscale(grads, flag, inverse),
        "check": lambda: unscale(grads, flag, one),  # torch has no pass that only reads
        "norm": lambda: nn.utils.get_total_norm(grads),
        "clip": lambda: torch._foreach_mul_(grads, one),
    }


def torch_takes(gradient: Tensor) -> bool:
    """Return whether torch's op has this dtype here: bf16 it has on no GPU."""
    flag, inverse = torch.zeros((), device=gradient.device), torch.ones((), device=gradient.device)
    try:
        torch._amp_foreach_non_finite_check_and_unscale_([gradient.clone()], flag, inverse)
    except RuntimeError:
        return False
    return True


def copies(gradients: Gradients) -> Passes:
    """Return a copy of one buffer as large as all gradients, and a pass that only reads it."""
    source = torch.zeros(-(-gradients.values.nbytes // 4), device=gradients.values.device)
    return {"copy": partial(torch.empty_like(source).copy_, source), "read": source.sum}


def require_right(case: str, gradients: Gradients, passes: Passes, flag: Tensor) -> None:
    """Raise WrongResult unless the passes compute what they must: products in fp32, rounded once, flags, the norm."""
    for overflows in (False, True):
        gradients.restore()
        if overflows:
            gradients.locals[-1][-1] = float("inf")
        for name in ("check", "norm", "unscale"):
            before = [gradient.clone() for gradient in gradients.locals]
            flag.zero_()
            found = passes[name]()
            require(flag.item() == overflows, f"{case}: {name} sets the flag to {flag.item()}")
            expected = [(g.float() * FACTOR).to(g.dtype) for g in before] if name == "unscale" else before
            for index, (right, mine) in enumerate(zip(expected, gradients.locals, strict=True)):
                require(torch.equal(bits(right), bits(mine)), f"{case}: {name} leaves another gradient {index}")
            if name == "norm" and isinstance(found, Tensor) and not overflows:
                true = torch.linalg.vector_norm(gradients.values, dtype=torch.float64).item() * FACTOR
                require(abs(found.item() - true) <= 1e-6 * true, f"{case}: the norm is {found.item()}, not {true}")
    gradients.restore()
    flag.zero_()
    if "clip" in passes:
        passes["norm"]()
        passes["clip"]()
        norm = torch.linalg.vector_norm(torch.cat(gradients.locals), dtype=torch.float64).item()
        require(abs(norm - 1.0) < 0.01, f"{case}: clip leaves a norm of {norm}")
    gradients.restore()
