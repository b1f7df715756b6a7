"""`clip_grad_norm_`: unscale and clip in a pass that reads, one reduction, and a pass that writes.

    squares, flag = norm(batch) for every batch of every optimizer        reads; each shard counts once
    squares, flag, scales = sum over ranks                                one reduction
    g *= 1 / scale; g *= min(1, max_norm / (sqrt(squares) + 1e-6))        reads and writes; only unscaled if flag

Another norm, or that of some parameters only, takes passes of its own after unscaling.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from scaler_triton import policy
from scaler_triton.clipping import norm as passes
from scaler_triton.clipping import torch_ops
from scaler_triton.clipping.norm import replicas_in
from scaler_triton.clipping.replicas import replicas_of
from scaler_triton.core import failures, gradients
from scaler_triton.core.dispatch import stacklevel
from scaler_triton.core.flag import any_flag
from scaler_triton.core.look import Look
from scaler_triton.core.memory import fp32_on
from scaler_triton.core.message import read_sums, tell_failure, write
from scaler_triton.core.overrides import overrides
from scaler_triton.core.plan import Batch, GradPlan
from scaler_triton.core.ranks import Ranks, group_ranks, mesh_ranks, several_ranks
from scaler_triton.core.registry import unwrap
from scaler_triton.core.step import CARRIED, FOREIGN, READY, OptimizerStep, parameters_of
from scaler_triton.core.torch_ops import wide_dtype, wide_on
from scaler_triton.kernels.abi import FAILURE, OVERFLOWS

if TYPE_CHECKING:
    from scaler_triton.grad_scaler import GradScaler

_UNSCALES_TOO = (
    " clip_grad_norm_ already unscales: call only one of them per step. If you leave a step out, call update() before "
    "the next batch."
)
_LATE = " It is clip_grad_norm_ that unscales here: call it before step(), or call update() before the next batch."
_NOT_HELD = (
    "No optimizer holds any of `parameters`, no gradient clipping will occur. Were they taken before FSDP replaced "
    "the model's?"
)
_FOREIGN = (
    "an optimizer whose stage is {!r}, which is not torch's, cannot be clipped here: call unscale_, then "
    "torch.nn.utils.clip_grad_norm_"
)
_UNSCALING = ("unscale_", "_unscale_grads_")  # methods that subclasses may override
_FAILURE = 2.0**20  # what a rank that failed adds to the number of set flags
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
    optimizers = _checked_optimizers(optimizers)
    chosen = None if parameters is None else _chosen_ids(parameters, optimizers)
    bound = policy.check_number("max_norm", max_norm)
    order = policy.check_number("norm_type", math.inf if str(norm_type) == "inf" else norm_type)
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    is_ours = overrides(scaler).isdisjoint(_UNSCALING)
    at_once = chosen is None and order == 2.0 and is_ours and _squares_fit(scaler)
    request = Request(bound, order, error_if_nonfinite, chosen, at_once)
    clip = _clip_scaled if scaler._enabled else _clip_unscaled
    norm, refused = clip(scaler, optimizers, request, model)
    if refused:
        raise RuntimeError(_NONFINITE.format(order))
    return norm


def _squares_fit(scaler: GradScaler) -> bool:
    """Return whether gradients may be squared before they are unscaled: in fp32 that would overflow too early."""
    return not (scaler._enabled and scaler._ours.scales) or wide_dtype(torch.device(scaler._device)) is torch.float64


@dataclass(slots=True)
class _Part:
    """One of the optimizers that share a norm."""

    optimizer: Any
    step: OptimizerStep
    plan: GradPlan
    parameters: Sequence[Tensor]
    replicas: Sequence[int]  # how many ranks hold each parameter's shard
    flag: Any = None
    batches: Sequence[Batch] = ()


def _clip_scaled(
    scaler: GradScaler, optimizers: list[Any], request: Request, model: nn.Module | None
) -> tuple[Tensor, bool]:
    """Unscale and clip; return the norm, and whether it must raise, so that nothing was clipped."""
    tell_others = partial(_fail_together, scaler, optimizers, request)
    parts, peers = _open(scaler, optimizers, request, model, tell_others)
    checks, scale = scaler._ours.checks, scaler._scale
    try:
        if request.at_once:
            looks = scaler._ours.looks_with_norm(parts[0].step, scale, model)
            for part in parts:
                part.step.outcome = None
                part.flag = checks.flag_for(part.step, scale)
                given = part.plan, part.parameters, part.step, scale, part.flag, peers
                part.batches = checks.take_looks(looks, *given, sums_partial=True)
            message = None if peers is None else write([part.flag for part in parts], looks, scale)
        else:
            read = _unscale_and_read(scaler, parts, request)
    except Exception:  # the other ranks wait in the norm's reduction
        tell_others()
        raise
    try:
        if request.at_once:
            norm, refused = _clip_at_once(scaler, parts, looks, message, peers, request)
        else:
            norm, bad, refused = _clip_by_terms_(read, peers, request)
            for part in parts if len(parts) > 1 or peers is not None else ():
                _take_flag(scaler, part, bad, peers)
    except BaseException:  # gradients are half written
        for part in parts:
            failures.spend(checks, part.step, scale.device)
        raise
    finally:
        for part in parts if len(parts) > 1 else ():
            part.step.notes["clipped"] = [each.step for each in parts]
    checks.steps.unfinished = True
    return norm, refused


def _open(
    scaler: GradScaler,
    optimizers: list[Any],
    request: Request,
    model: nn.Module | None,
    tell_others: Callable[[], None],
) -> tuple[list[_Part], Ranks | None]:
    """Return the steps to be clipped, and the ranks that share their norm; an error is told to these."""
    ours = scaler._ours
    if scaler._scale is None or scaler._growth_tracker is None:
        ours.require_scale(scaler, "clip_grad_norm_", optimizers, tell_others)
    checks = ours.checks
    steps = [checks.steps.open(each) for each in optimizers]
    if request.chosen is None:
        ours.begin_check(scaler, steps)
    for step in steps:
        if step.phase is FOREIGN:
            raise RuntimeError(_FOREIGN.format(step["stage"]))
        step.require_unscalable(_UNSCALES_TOO, _LATE, again=request.chosen is not None)
    try:
        for step in steps:
            checks.looks_for(step, scaler._scale, divide=True)  # which may prepare something, on every rank
        home = scaler._scale.device
        planned = [checks.plan(step, each, home) for step, each in zip(steps, optimizers, strict=True)]
        plans, parameters = zip(*planned, strict=True)
        peers = checks.peers_of(plans[0], parameters_of(*optimizers), scaler.process_group, *plans[1:])
        replicas = [replicas_in(plan, held, peers, model) for plan, held in planned]
    except ValueError:  # a wrong argument raises on all ranks
        raise
    except Exception:
        tell_others()
        raise
    return list(map(_Part, optimizers, steps, plans, parameters, replicas)), peers


def _clip_at_once(
    scaler: GradScaler,
    parts: list[_Part],
    looks: Sequence[Look],
    message: Tensor | None,
    peers: Ranks | None,
    request: Request,
) -> tuple[Tensor, bool]:
    """Clip by the 2-norm of the pass that checked, of which `message` is; return as `_clip_scaled` does."""
    scale, checks, group = scaler._scale, scaler._ours.checks, scaler.process_group
    flags = [part.flag for part in parts]
    checks.agree(flags, looks, message, peers)
    totals = looks[-1].totals
    assert totals is not None
    refused = request.error_if_nonfinite and not math.isfinite(torch_ops.norm_of(totals).item())
    for part in parts:
        if peers is not None:
            if refused:
                read_sums(part.flag, totals)
        elif len(parts) > 1 and checks.has_flag(part.flag, peers, group):
            part.flag.share(totals[OVERFLOWS])
    if refused:
        totals[OVERFLOWS] = 1.0  # nothing is clipped then
    size = 0 if refused or peers is None else len(peers.ranks)
    norm: Tensor | None = None
    for part in parts:
        unwritten = part.flag.status if size else None  # until a kernel computes it from the totals, or `read_sums`
        for batch in part.batches:
            device = batch.layout.device
            here = device == totals.device
            local = totals if here else wide_on(device, totals, non_blocking=device.type != "cpu")
            number = fp32_on(device, scale)
            status = unwritten if here else None
            got, wrote = passes.clip_batch_(batch, number, local, request.max_norm, status, size)
            norm, unwritten = got if here else norm, None if wrote else unwritten
        if unwritten is not None:
            read_sums(part.flag, totals)
        flags_of_step = checks.flags_for(part.flag, part.plan, peers, group, summed=True)
        part.step.accept(part.flag, flags_of_step, divided=True)
        checks.flag_is_read_later(part.step, part.optimizer)
    return torch_ops.norm_of(totals) if norm is None else norm, refused


def _unscale_and_read(scaler: GradScaler, parts: list[_Part], request: Request) -> tuple[list[Tensor], Tensor]:
    """Unscale the optimizers one by one, then return the `_terms_of` the chosen gradients."""
    ready = [part for part in parts if part.step.phase in (READY, CARRIED)]
    for part in ready:  # every gradient is validated before the first is written
        part.plan.collect(part.parameters, allow_fp16=scaler._ours.checks.allow_fp16)
    for part in ready:
        scaler.unscale_(part.optimizer)
    flag = any_flag((f for part in parts for f in part.step["found_inf_per_device"].values()), scaler._scale.device)
    parameters = parameters_of(*(part.optimizer for part in parts))
    return _terms_of(parameters, chain(*(part.replicas for part in parts)), flag, request)


def _clip_unscaled(
    scaler: GradScaler, optimizers: list[Any], request: Request, model: nn.Module | None
) -> tuple[Tensor, bool]:
    """Clip as torch does, for a disabled scaler; if it is sharded, or ranks hold shards, over all ranks."""
    group, parameters = scaler.process_group, parameters_of(*optimizers)
    shared = scaler._ours.checks.sharded or group is not None or any(map(gradients.is_fsdp1, parameters))
    across_ranks = shared and several_ranks()
    # torch's norm is right only if this rank holds whole gradients.
    if not across_ranks and all(each is None for each in map(gradients.dtensor_spec, parameters)):
        clipped = [p for p in parameters if request.chosen is None or id(p) in request.chosen]
        options = request.max_norm, request.norm_type, request.error_if_nonfinite
        return torch.nn.utils.clip_grad_norm_(clipped, *options), False
    peers = group_ranks(parameters, group) if across_ranks or group is not None else mesh_ranks(parameters)
    flag = torch.zeros((), dtype=torch.float32, device=parameters[0].device if parameters else "cpu")
    read = _terms_of(parameters, replicas_of(parameters, peers, model), flag, request)
    norm, _, refused = _clip_by_terms_(read, peers, request)
    return norm, refused


def _take_flag(scaler: GradScaler, part: _Part, bad: Tensor, peers: Ranks | None) -> None:
    """Replace an optimizer's flag on every device by that of all that are clipped together, set if `bad` is not 0."""
    step, checks, group = part.step, scaler._ours.checks, scaler.process_group
    flag, flags = step.own_flag() if checks.steps.exposed else step.flag, step["found_inf_per_device"]
    if flag is not None and checks.has_flag(flag, peers, group):
        flag.share(bad)
        flag.status[FAILURE].clamp_(min=bad >= _FAILURE)
        step["found_inf_per_device"] = checks.flags_for(flag, part.plan, peers, group, summed=True)
    else:
        step["found_inf_per_device"] = {device: (bad != 0).float().to(device, copy=True) for device in flags}


def _fail_together(scaler: GradScaler, optimizers: list[Any], request: Request) -> None:
    """After an error skip the steps, and join the reductions of checks and norm in which the other ranks wait."""
    ours, checks, group = scaler._ours, scaler._ours.checks, scaler.process_group
    peers = ours.ranks_that_wait(scaler, optimizers)
    if peers is None:
        return
    steps, device = [checks.steps.open(each) for each in optimizers], scaler._scale.device
    with suppress(Exception):  # here and below: the caller is raising already, and the others wait
        for step, optimizer in zip(steps, optimizers, strict=True):
            if not request.at_once and step.phase in (READY, CARRIED):
                failures.fail(checks, step, optimizer, device, group)
    with suppress(Exception):
        chosen = request.chosen
        gradients.reduce_(each for each in parameters_of(*optimizers) if chosen is None or id(each) in chosen)
    with suppress(Exception):
        for step in steps:
            failures.spend(checks, step, device)
    with suppress(Exception):
        if request.at_once:
            tell_failure(peers, device, checks.n_sums or 0)
        else:
            values = torch.tensor([0.0, 1.0, _FAILURE], dtype=wide_dtype(device), device=device)
            peers.reduce_(values, "MAX" if request.norm_type == math.inf else "SUM")


@torch.no_grad()
def _terms_of(
    parameters: Iterable[Tensor], replicas: Iterable[int], flag: Tensor, request: Request
) -> tuple[list[Tensor], Tensor]:
    """Return this rank's shards of the chosen gradients, first reduced where needed, and what it adds to their norm.

    The terms are fp64, [3], on the device of the flag (fp32, `()`), fp32 if that has no fp64; `replicas` says how many
    ranks hold each parameter.
    """
    order, grads, wide = request.norm_type, [], wide_dtype(flag.device)
    norms, weights = [torch.zeros((), dtype=wide, device=flag.device)], [1.0]
    for parameter, count in zip(parameters, replicas, strict=True):
        if parameter.grad is None or (request.chosen is not None and id(parameter) not in request.chosen):
            continue
        gradients.reduce_([parameter])
        local = gradients.local_tensor(parameter.grad)
        local = local._values() if local.layout is torch.sparse_coo else local
        grads.append(local)
        if gradients.is_dtensor(parameter) and gradients.is_dtensor(parameter.grad):
            count = count * gradients.num_shards(parameter) // gradients.num_shards(parameter.grad)
        if local.numel():
            norm = torch.linalg.vector_norm(local, order, dtype=wide_dtype(local.device))
            norms.append(wide_on(flag.device, norm))
            weights.append(1.0 / count)
    if order == math.inf:
        term = torch.stack(norms).amax()
    else:
        term = torch.stack(torch._foreach_mul(torch._foreach_pow(norms, order), weights)).sum()
    is_nan = term.isnan()  # in a number of its own, as a MAX reduction may drop NaN
    return grads, torch.stack([torch.where(is_nan, 0.0, term), is_nan.to(wide), flag.to(wide)])


@torch.no_grad()
def _clip_by_terms_(
    read: tuple[list[Tensor], Tensor], peers: Ranks | None, request: Request
) -> tuple[Tensor, Tensor, bool]:
    """Clip by what `_terms_of` returned on all ranks; return the norm, the flags' sum, and whether the norm is refused.

    One reduction gives norm and flags, each shard counted once:
    (sum over ranks and shards of abs(g) ** order / replicas) ** (1 / order), for inf the largest abs(g)
    """
    (grads, terms), order = read, request.norm_type
    if peers is not None:
        peers.reduce_(terms, "MAX" if order == math.inf else "SUM")
    term, is_nan, bad = terms
    norm = term if order == math.inf else term ** (1.0 / order)
    norm = torch.where(is_nan != 0, math.nan, norm).float()
    if request.error_if_nonfinite and not math.isfinite(norm.item()):
        return norm, bad, True
    coefficient = torch_ops.coefficient(bad, norm, request.max_norm)
    for device in dict.fromkeys(grad.device for grad in grads):
        torch._foreach_mul_([grad for grad in grads if grad.device == device], coefficient.to(device))
    return norm, bad, False


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
