"""`clip_grad_norm_`: unscale and clip in a pass that reads, one reduction, and a pass that writes.

    squares, flag = norm(batch) for every batch of every optimizer        reads; each shard counts once
    squares, flag, scales = sum over ranks                                one reduction
    g *= 1 / scale; g *= min(1, max_norm / (sqrt(squares) + 1e-6))        reads and writes; only unscaled if flag

Another norm, or that of some parameters only, takes passes of its own after unscaling.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from scaler_triton import gradients, passes, policy, torch_ops
from scaler_triton.check import (
    OUR_METHODS,
    Part,
    agree_on_norm,
    begin_anew,
    fail,
    flags_on,
    has_flag,
    measure,
    open_window,
    ranks_of,
    ranks_that_wait,
    replicas_in,
    require_scale,
    step_failed,
)
from scaler_triton.dispatch import stacklevel
from scaler_triton.flag import any_flag, fp32_on, report_failure
from scaler_triton.kernels.abi import OVERFLOWS
from scaler_triton.ranks import Ranks, group_ranks, mesh_ranks, replicas_of, several_ranks
from scaler_triton.step import CARRIED, READY, parameters_of, unwrap

if TYPE_CHECKING:
    from scaler_triton.grad_scaler import GradScaler

_UNSCALES_TOO = (
    " clip_grad_norm_ already unscales: call only one of them per step. If you leave a step out, call update() before "
    "the next batch."
)
_NOT_HELD = (
    "No optimizer holds any of `parameters`, no gradient clipping will occur. Were they taken before FSDP replaced "
    "the model's?"
)
# torch's message.
_NONFINITE = (
    "The total norm of order {} for gradients from `parameters` is non-finite, so it cannot be clipped. To disable "
    "this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
)


class Request(NamedTuple):
    """The checked arguments of `clip_grad_norm_`."""

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool
    chosen: set[int] | None  # the ids of the parameters to be clipped; None: all
    at_once: bool  # whether the pass that checks also gives the norm, in one reduction; equal on all ranks


def clip_grad_norm_(
    scaler: GradScaler,
    optimizers: Any,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    model: nn.Module | None,
    parameters: Iterable[Tensor] | Tensor | None,
) -> Tensor:
    """Do the work of `GradScaler.clip_grad_norm_`."""
    together = _checked_optimizers(optimizers)
    with torch.no_grad():
        chosen = None if parameters is None else _chosen_ids(parameters, together)
        bound, order = policy.check_number("max_norm", max_norm), policy.check_norm_type(norm_type, positive=True)
        if not isinstance(model, nn.Module | None):
            raise TypeError(f"model must be a module, got {type(model).__name__}")
        is_ours = {getattr(each, "__func__", None) for each in (scaler.unscale_, scaler._unscale_grads_)} <= OUR_METHODS
        at_once = chosen is None and order == 2.0 and is_ours
        request = Request(bound, order, error_if_nonfinite, chosen, at_once)
        if scaler._enabled:
            parts, ranks = _open(scaler, together, request, model)
            clip = _clip_at_once if at_once else _clip_by_passes
            norm, refused = clip(scaler, parts, ranks, request)
            scaler._ours.steps.unfinished = True
            for part in parts:
                part.step.clipped = True
        else:
            norm, refused = _clip_unscaled(scaler, parameters_of(*together), request, model)
        if refused:
            raise RuntimeError(_NONFINITE.format(order))
        return norm


def _open(
    scaler: GradScaler, optimizers: list[Any], request: Request, model: nn.Module | None
) -> tuple[list[Part], Ranks | None]:
    """Return the steps to be clipped, and the ranks that share their norm; an error is reported to these."""
    report = partial(_fail_together, scaler, optimizers, request)
    if scaler._scale is None or scaler._growth_tracker is None:
        require_scale(scaler, "clip_grad_norm_", optimizers, report)
    steps = [scaler._ours.steps.open(each) for each in optimizers]
    if scaler._ours.guard is not None:
        begin_anew(scaler, steps, report, by_check=request.chosen is None)
    for step in steps:
        step.require_unscalable(_UNSCALES_TOO, again=request.chosen is not None)
    try:
        for step in steps[:1] if request.at_once else steps:
            open_window(scaler, step)
        plans = [scaler._ours.steps.plan(step, each) for step, each in zip(steps, optimizers, strict=True)]
        ranks = ranks_of(scaler, *plans)
        replicas = [replicas_in(plan, ranks, model) for plan in plans]
    except ValueError:  # a wrong argument raises on all ranks
        raise
    except Exception:
        report()
        raise
    return list(map(Part, optimizers, steps, plans, replicas)), ranks


def _clip_at_once(scaler: GradScaler, parts: list[Part], ranks: Ranks | None, request: Request) -> tuple[Tensor, bool]:
    """Clip by the 2-norm of the checking pass; return it, and whether it must raise, so that nothing was clipped."""
    scale = scaler._scale
    with _failure_joins(scaler, parts, request):
        for part in parts:
            part.step.outcome = None
        totals = measure(scaler, parts, ranks)
    with _failure_skips(scaler, parts):
        agree_on_norm(scaler, parts, totals, ranks)
        refused = request.error_if_nonfinite and not math.isfinite(torch_ops.norm_of(totals).item())
        for part in parts:
            if ranks is not None:
                if refused:
                    part.flag.read_sums(totals)
            elif len(parts) > 1 and has_flag(scaler, part.flags, ranks):
                part.flag.share(totals[OVERFLOWS])
        if refused:
            totals[OVERFLOWS] = 1.0  # nothing is clipped then
        size = 0 if refused or ranks is None else len(ranks.ranks)
        norm: Tensor | None = None
        for part in parts:
            status = part.flag.status if size else None  # to be computed from the totals, by the first kernel or below
            for batch in part.batches:
                device = batch.layout.device
                here = device == totals.device
                local = totals if here else totals.to(device, non_blocking=device.type != "cpu")
                number = fp32_on(device, scale)
                got, wrote = passes.clip_batch_(batch, number, local, request.max_norm, status if here else None, size)
                norm, status = got if here else norm, None if wrote else status
            if status is not None:
                part.flag.read_sums(totals)
            part.step.checked(part.flag, flags_on(scaler, part.flag, part.flags, part.plan, ranks), divided=True)
    return torch_ops.norm_of(totals) if norm is None else norm, refused


def _clip_by_passes(
    scaler: GradScaler, parts: list[Part], ranks: Ranks | None, request: Request
) -> tuple[Tensor, bool]:
    """Unscale the optimizers one by one, then clip the chosen gradients by one norm; return as `_clip_at_once` does."""
    with _failure_joins(scaler, parts, request):
        ready = [part for part in parts if part.step.phase in (READY, CARRIED)]
        for part in ready:  # every gradient is validated before the first is written
            part.plan.collect(allow_fp16=scaler._ours.allow_fp16)
        for part in ready:
            scaler.unscale_(part.optimizer)
        flag = any_flag((f for part in parts for f in part.step["found_inf_per_device"].values()), scaler._scale.device)
        parameters = parameters_of(*(part.optimizer for part in parts))
        grads, counts = _local_gradients(parameters, chain(*(part.replicas for part in parts)), request.chosen)
        terms = _terms_of_norm(grads, counts, request.norm_type, flag)
    with _failure_skips(scaler, parts):
        norm, flag = _norm_of_terms(terms, request.norm_type, ranks)
        if len(parts) > 1 or ranks is not None:
            for part in parts:
                _take_flag(scaler, part, flag, ranks)
        return norm, _multiply_(grads, norm, flag, request)


def _clip_unscaled(
    scaler: GradScaler, parameters: Sequence[Tensor], request: Request, model: nn.Module | None
) -> tuple[Tensor, bool]:
    """Clip as torch does, for a disabled scaler; if it is sharded, or ranks hold shards, over all ranks."""
    group = scaler.process_group
    on_fsdp1 = any(map(gradients.is_fsdp1, parameters))
    together = (scaler._ours.sharded or group is not None or on_fsdp1) and several_ranks()
    # torch's norm is right only if this rank holds whole gradients.
    if not together and (on_fsdp1 or all(each is None for each in map(gradients.dtensor_spec, parameters))):
        clipped = [p for p in parameters if request.chosen is None or id(p) in request.chosen]
        options = request.max_norm, request.norm_type, request.error_if_nonfinite
        return torch.nn.utils.clip_grad_norm_(clipped, *options), False
    ranks = group_ranks(parameters, group) if together or group is not None else mesh_ranks(parameters)
    grads, counts = _local_gradients(parameters, replicas_of(parameters, ranks, model), request.chosen)
    home = parameters[0].device if len(parameters) else torch.device("cpu")
    flag = torch.zeros((), dtype=torch.float32, device=home)
    norm, _ = _norm_of_terms(_terms_of_norm(grads, counts, request.norm_type, flag), request.norm_type, ranks)
    return norm, _multiply_(grads, norm, flag, request)


def _take_flag(scaler: GradScaler, part: Part, shared: Tensor, ranks: Ranks | None) -> None:
    """Replace an optimizer's flag on every device by the flag of all that are clipped together."""
    step = part.step
    flag, flags = step.own_flag(scaler._ours.steps.exposed), step["found_inf_per_device"]
    if flag is not None:
        flag.share(shared)
        step["found_inf_per_device"] = flags_on(scaler, flag, flags, part.plan, ranks)
    else:
        step["found_inf_per_device"] = {device: shared.to(device, copy=True) for device in flags}


@contextmanager
def _failure_joins(scaler: GradScaler, parts: list[Part], request: Request) -> Iterator[None]:
    """After an error before the norm's reduction, join that reduction, as the other ranks wait there."""
    try:
        yield
    except Exception:
        _fail_together(scaler, [part.optimizer for part in parts], request)
        raise


@contextmanager
def _failure_skips(scaler: GradScaler, parts: Sequence[Part]) -> Iterator[None]:
    """After an error, which leaves gradients half written, skip their steps."""
    try:
        yield
    except BaseException:
        for part in parts:
            step_failed(scaler, part.step)
            part.step.clipped = True
        raise


def _fail_together(scaler: GradScaler, optimizers: list[Any], request: Request) -> None:
    """After an error skip the steps, and join the reductions of checks and norm in which the other ranks wait."""
    ranks = ranks_that_wait(scaler, optimizers)
    if ranks is None:
        return
    steps = [scaler._ours.steps.open(each) for each in optimizers]
    with suppress(Exception):  # here and below: the caller is raising already, and the others wait
        for step, optimizer in zip(steps, optimizers, strict=True):
            if not request.at_once and step.phase in (READY, CARRIED):
                fail(scaler, step, optimizer)
    with suppress(Exception):
        chosen = request.chosen
        gradients.reduce_(each for each in parameters_of(*optimizers) if chosen is None or id(each) in chosen)
    with suppress(Exception):
        for step in steps:
            step.clipped = True
            step_failed(scaler, step)
    with suppress(Exception):
        device = scaler._scale.device
        if request.at_once:
            report_failure(ranks, device, by_norm=True, measures=scaler._ours.steps.measures)
            return
        values = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64, device=device)
        (ranks.maximum_ if request.norm_type == math.inf else ranks.sum_)(values)


def _local_gradients(
    parameters: Iterable[Tensor], replicas: Iterable[int], chosen: Container[int] | None
) -> tuple[list[Tensor], list[int]]:
    """Return this rank's shards of the chosen gradients, first reduced where needed, and how many ranks hold each."""
    grads, counts = [], []
    for parameter, count in zip(parameters, replicas, strict=True):
        if parameter.grad is None or (chosen is not None and id(parameter) not in chosen):
            continue
        gradients.reduce_([parameter])
        local = gradients.local_tensor(parameter.grad)
        grads.append(local._values() if local.layout is torch.sparse_coo else local)
        if gradients.is_dtensor(parameter) and gradients.is_dtensor(parameter.grad):
            count = count * gradients.num_shards(parameter) // gradients.num_shards(parameter.grad)
        counts.append(count)
    return grads, counts


def _terms_of_norm(grads: Sequence[Tensor], counts: Sequence[int], order: float, flag: Tensor) -> Tensor:
    """Return this rank's contribution to `_norm_of_terms`, fp64, [3], on the device of the flag (fp32, `()`)."""
    norms, weights = [torch.zeros((), dtype=torch.float64, device=flag.device)], [1.0]
    for grad, count in zip(grads, counts, strict=True):
        if grad.numel():
            norms.append(torch.linalg.vector_norm(grad, order, dtype=torch.float64).to(flag.device))
            weights.append(1.0 / count)
    if order == math.inf:
        term = torch.stack(norms).amax()
    else:
        term = torch.stack(torch._foreach_mul(torch._foreach_pow(norms, order), weights)).sum()
    is_nan = term.isnan()  # in a number of its own, as a MAX reduction may drop NaN
    return torch.stack([torch.where(is_nan, 0.0, term), is_nan.double(), flag.double()])


def _norm_of_terms(terms: Tensor, order: float, ranks: Ranks | None) -> tuple[Tensor, Tensor]:
    """Return the norm of all ranks' gradients, each shard counted once, and their flag, by one reduction and no wait.

    (sum over ranks and shards of abs(g) ** order / replicas) ** (1 / order), for inf the largest abs(g)
    """
    if ranks is not None:
        (ranks.maximum_ if order == math.inf else ranks.sum_)(terms)
    term, is_nan, flag = terms
    norm = term if order == math.inf else term ** (1.0 / order)
    return torch.where(is_nan != 0, math.nan, norm).float(), (flag != 0).float()


def _multiply_(grads: Sequence[Tensor], norm: Tensor, flag: Tensor, request: Request) -> bool:
    """Multiply gradients of any devices by the clip coefficient, as torch does; return True if the norm is refused."""
    if request.error_if_nonfinite and not math.isfinite(norm.item()):
        return True
    coefficient = torch_ops.coefficient(flag, norm, request.max_norm)
    for device in dict.fromkeys(grad.device for grad in grads):
        torch._foreach_mul_([grad for grad in grads if grad.device == device], coefficient.to(device))
    return False


def _checked_optimizers(optimizers: Any) -> list[Any]:
    """Return one optimizer or several as a list; raise if there is none, one comes twice, or one is no optimizer."""
    if hasattr(optimizers, "param_groups"):
        return [optimizers]
    several = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for each in several:
        if not hasattr(each, "param_groups"):
            hint = "; to clip some parameters only, pass parameters=" if isinstance(each, Tensor) else ""
            raise TypeError(f"optimizers must be an optimizer or several of them, got {type(each).__name__}{hint}")
    if len({id(unwrap(each)) for each in several}) != len(several) or not several:
        raise ValueError(f"optimizers must be one or more, none of them twice, got {len(several)}")
    return several


def _chosen_ids(parameters: Iterable[Tensor] | Tensor, optimizers: Sequence[Any]) -> set[int]:
    if isinstance(parameters, nn.Module):
        raise TypeError(f"parameters must be tensors, such as those of {type(parameters).__name__}.parameters()")
    several = isinstance(parameters, Iterable) and not isinstance(parameters, Tensor)
    chosen: list[Any] = list(parameters) if several else [parameters]
    for each in chosen:
        if not isinstance(each, Tensor):  # such as the pairs of named_parameters()
            raise TypeError(f"parameters must be tensors, got {type(each).__name__}")
    if not chosen and isinstance(parameters, GeneratorType):  # probably consumed before
        warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=stacklevel())
    ids = {id(each) for each in chosen}
    trained = any(each.requires_grad for each in chosen)  # a frozen one may be in no optimizer
    if trained and ids.isdisjoint(map(id, parameters_of(*optimizers))):
        warnings.warn(_NOT_HELD, stacklevel=stacklevel())
    return ids
