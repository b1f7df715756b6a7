"""How near do the passes over gradients, unscale, check, norm, clip and measure, come to a copy?

On a GPU each kernel alone, the device's time from a cold cache; on the CPU the public ops, on one thread. A copy reads
and writes all bytes once, as unscaling does; a check only reads, as the sum of one flat buffer does ("read").
"""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from perf.measure import Context, DeviceClock, Subject, host_clock, require
from perf.rows import Place, Row
from perf.subjects import DTYPES, Gradients, bits, lists
from scaler_triton import ops
from scaler_triton.core import torch_ops

FACTOR = 1 / 3  # no power of 2: products are rounded
OPS = "public ops, host"
PREPARED = ", prepared"
Passes = dict[str, Callable[[], Any]]


def measure(context: Context) -> Iterator[Row]:
    """Yield all rows."""
    for name, numels in lists(*context).items():
        for dtype_name, dtype in DTYPES.items():
            gradients = Gradients(numels, dtype, context.device)
            yield from measure_list(context, f"{name} {dtype_name}", gradients)
            del gradients
            gc.collect()
    for count in (1, 10) if context.quick else (1, 10, 500, 2000):
        yield from measure_list(context, f"{count} x 64 fp32", Gradients([64] * count, device=context.device), OPS)


def measure_list(context: Context, case: str, gradients: Gradients, part: str = "by lists") -> Iterator[Row]:
    """Check and time all passes over one list: on a GPU those of our kernels, unless the public ops are asked for."""
    flag = torch.zeros((), device=context.device)
    by_kernels = context.device == "cuda" and part != OPS
    ours, torchs = (kernels if by_kernels else public_ops)(gradients, flag), torch_passes(gradients)
    if part == OPS:
        ours |= prepared_ops(gradients, flag)
    clock = DeviceClock() if by_kernels else host_clock
    require_right(case, gradients, ours, flag)
    source = torch.zeros(-(-gradients.values.nbytes // 4), device=context.device)
    others = {"copy": partial(torch.empty_like(source).copy_, source), "read": source.sum}
    for metric, run in ours.items():
        name = metric.removesuffix(PREPARED)
        other = "read" if name in ("check", "norm", "measure") else "copy"
        runs = {"torch": torchs.get(name), "ours": run, other: others[other]}
        subjects = {who: Subject(each, gradients.restore) for who, each in runs.items() if each is not None}
        yield from Place("passes", part, case).times(metric, context.interleaved(subjects, 0.5, clock))


def public_ops(gradients: Gradients, flag: Tensor) -> Passes:
    """Return the public ops by the pass that they make; they set the flag."""
    grads, inverse = gradients.locals, torch.full((), FACTOR, device=gradients.values.device)
    return {
        "unscale": lambda: ops.unscale_(grads, inverse, flag),
        "check": lambda: ops.check_nonfinite(grads, flag),
        "norm": lambda: ops.grad_norm(grads, flag, inv_scale=inverse),
    }


def prepared_ops(gradients: Gradients, flag: Tensor) -> Passes:
    """Return the same of a list that is prepared."""
    prepared, inverse = ops.prepare(gradients.locals), torch.full((), FACTOR, device=gradients.values.device)
    return {
        f"unscale{PREPARED}": lambda: prepared.unscale_(inverse, flag),
        f"check{PREPARED}": lambda: prepared.check(flag),
        f"norm{PREPARED}": lambda: prepared.norm(flag, inv_scale=inverse),
    }


def kernels(gradients: Gradients, flag: Tensor) -> Passes:
    """Return our kernels by the pass that they make; they set the flag."""
    from scaler_triton.kernels import abi, clip, config, measure, norm, table, unscale

    device, grads = gradients.values.device, gradients.locals
    inverse, numels, tables = torch.full((), FACTOR, device=device), [grad.numel() for grad in grads], {}
    for mode in (*config.MODES, "measure"):
        shape = config.config_for(device, mode, grads[0].itemsize, numels)
        tables[mode] = table.GradTable(numels, grads[0].dtype, device, shape)
        tables[mode].set_addresses(tuple(grad.data_ptr() for grad in grads))
    totals = torch.zeros(abi.TOTALS, dtype=torch.float64, device=device)
    scale, length = torch.tensor([3.0, 0.0], device=device).unbind()
    measured = torch.zeros(abi.MEASURED, dtype=torch.float64, device=device)
    return {
        "unscale": lambda: unscale.launch_unscale(tables["unscale"], inverse, flag, inverse=True),
        "check": lambda: unscale.launch_check(tables["check"], flag),
        "norm": lambda: norm.launch_sum_of_squares(tables["norm"], scale, flag, totals),
        "clip": lambda: clip.launch_clip(tables["clip"], scale, totals, 1.0, length),
        "measure": lambda: measure.launch_measure(tables["measure"], measured) or measured,
    }


def torch_passes(gradients: Gradients) -> Passes:
    """Return what torch does in place of each pass; nothing of a dtype that its op refuses, as bf16 on a GPU."""
    device, grads = gradients.values.device, gradients.locals
    inverse, one, flag = (torch.full((), value, device=device) for value in (FACTOR, 1.0, 0.0))
    unscale = torch._amp_foreach_non_finite_check_and_unscale_
    try:
        unscale([grads[0].clone()], flag, one)
    except RuntimeError:
        return {}
    return {
        "unscale": lambda: unscale(grads, flag, inverse),
        "check": lambda: unscale(grads, flag, one),  # torch has no pass that only reads
        "norm": lambda: nn.utils.get_total_norm(grads),
        "clip": lambda: torch._foreach_mul_(grads, one),
    }


def require_right(case: str, gradients: Gradients, passes: Passes, flag: Tensor) -> None:
    """Raise WrongResult unless the passes compute what they must: products in fp32, rounded once, flags, the norm."""
    true = torch.linalg.vector_norm(gradients.values, dtype=torch.float64).item() * FACTOR
    for overflows in (True, False):
        for name in passes:
            if name in ("clip", "measure"):
                continue
            gradients.restore()
            if overflows:
                gradients.locals[-1][-1] = float("inf")
            factor = FACTOR if name.startswith("unscale") else 1.0
            expected = [(gradient.float() * factor).to(gradient.dtype) for gradient in gradients.locals]
            flag.zero_()
            norm = passes[name]()
            require(flag.item() == overflows, f"{case}: {name} sets the flag to {flag.item()}")
            for index, (right, ours) in enumerate(zip(expected, gradients.locals, strict=True)):
                require(torch.equal(bits(right), bits(ours)), f"{case}: {name} leaves another gradient {index}")
            if isinstance(norm, Tensor) and not overflows:
                require(abs(norm.item() - true) <= 1e-6 * true, f"{case}: the norm is {norm.item()}, not {true}")
    if "clip" in passes:  # by the totals that the last norm left
        passes["clip"]()
        left = torch.linalg.vector_norm(torch.cat(gradients.locals), dtype=torch.float64).item()
        require(abs(left - 1.0) < 0.01, f"{case}: clip leaves a norm of {left}")
    if "measure" in passes:  # its row is still cleared
        gradients.restore()
        found = passes["measure"]()
        torch_ops.measure(gradients.locals, want := torch.zeros_like(found))
        require(torch.equal(found, want), f"{case}: measured is {found.tolist()}, not {want.tolist()}")
