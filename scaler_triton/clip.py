"""`clip_grad_norm_`: unscale and clip in a pass that reads, one reduction, and a pass that writes.

    squares, flag = norm(batch) for every batch of every optimizer        reads; each shard counts once
    squares, flag, scales = sum over ranks                                one reduction
    g *= 1 / scale; g *= min(1, max_norm / (sqrt(squares) + 1e-6))        reads and writes; only unscaled if flag

Another norm, or that of some parameters only, takes passes of its own after unscaling.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaler_triton import passes, policy, torch_ops
from scaler_triton.check import (
    fail,
    flags_on,
    is_replaced,
    new_flag,
    ranks_of,
    refuse_without_scale,
    step_failed,
)
from scaler_triton.dispatch import stacklevel
from scaler_triton.flag import Flag, Flags, any_flag, fp32_on, write_scales
from scaler_triton.gradients import (
    dtensor_spec,
    has_fsdp1,
    is_dtensor,
    is_fsdp1,
    is_unreduced,
    local_tensor,
    num_shards,
    reduced,
    sparse_values,
)  # fmt: skip
from scaler_triton.kernels.abi import OVERFLOWS, SCALES, SQUARES, TOTALS
from scaler_triton.plan import Batch, GradPlan, choose_backends
from scaler_triton.ranks import Ranks, default_group, group_ranks, mesh_ranks, several_ranks
from scaler_triton.step import CARRIED, CHECKED, READY, OptimizerStep, parameters_of, unwrap
from scaler_triton.text import one_line

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
    """A checked call: the arguments of `clip_grad_norm_`, and the ids of the parameters to be clipped; None: all."""

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool
    model: nn.Module | None
    chosen: set[int] | None


class Part(NamedTuple):
    """One of the optimizers that are clipped together; `replicas`: how many ranks hold each parameter's shard."""

    optimizer: Any
    step: OptimizerStep
    plan: GradPlan
    replicas: Sequence[int]


class Measured(NamedTuple):
    """What the pass that reads found for one optimizer: its flag, the flag of each device, and the batches' totals."""

    part: Part
    flag: Flag
    flags: Flags
    batches: list[Batch]
    totals: list[Tensor]


def clip_grad_norm_(
    scaler: GradScaler,
    optimizers: Any,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    model: nn.Module | None,
    parameters: Iterable[Tensor] | Tensor | None,
) -> Tensor:
    """`GradScaler.clip_grad_norm_`."""
    together = _checked_optimizers(optimizers)
    with torch.no_grad():
        request = _checked_request(max_norm, norm_type, error_if_nonfinite, model, parameters, together)
        if not scaler._enabled:
            return _clip_unscaled(_all_parameters(together), request, scaler.process_group, scaler._ours.sharded)
        # Both are known to all ranks: they make the same reductions.
        at_once = request.chosen is None and request.norm_type == 2.0 and not is_replaced(scaler, "_unscale_grads_")

        def report(optimizers: Sequence[Any], ranks: Ranks) -> None:
            _report_failure(scaler, optimizers, ranks, request, at_once)

        if scaler._scale is None or scaler._growth_tracker is None:
            refuse_without_scale(scaler, "clip_grad_norm_", together, report)
        steps = [scaler._ours.steps.open(each) for each in together]
        for step in steps:
            step.require_unscalable(_UNSCALES_TOO, again=request.chosen is not None)
        try:
            plans = [scaler._ours.steps.plan(step, each) for step, each in zip(steps, together, strict=True)]
            ranks = _joint_ranks(scaler, plans)
            replicas = [_replicas(plan, ranks, request.model) for plan in plans]
        except ValueError:  # a wrong argument, which raises on all ranks
            raise
        except Exception:
            with suppress(Exception):  # the first error matters more
                ranks = scaler._ours.membership.find(_all_parameters(together), scaler.process_group)
                if ranks is not None:
                    report(together, ranks)
            raise
        parts = [Part(*each) for each in zip(together, steps, plans, replicas, strict=True)]
        return (_clip_at_once if at_once else _clip_by_passes)(scaler, parts, ranks, request)


def _clip_at_once(scaler: GradScaler, parts: Sequence[Part], ranks: Ranks | None, request: Request) -> Tensor:
    """Clip by the 2-norm of all gradients, which the pass that checks them computes."""
    try:
        measured = [_measure(scaler, part) for part in parts]
        totals = _sum_of([total for each in measured for total in each.totals], scaler._scale.device)
        if ranks is not None and sum(len(each.batches) for each in measured) != 1:  # a single batch's totals have it
            write_scales(totals[SCALES:], scaler._scale)
    except Exception:
        if ranks is not None:
            _fail_together(scaler, [part.optimizer for part in parts], ranks)
        raise
    try:
        if ranks is not None:
            ranks.sum_(totals)
        refused = request.error_if_nonfinite and not math.isfinite(torch_ops.norm_of(totals).item())
        for each in measured:
            if ranks is not None:
                each.flag.agreed_by_sums(len(ranks.ranks))
            elif len(measured) > 1 and (each.flags or scaler._ours.sharded):
                each.flag.share(totals[OVERFLOWS])
        if refused and ranks is not None:
            for each in measured:
                each.flag.read_sums(totals)
        if refused:
            totals[OVERFLOWS] = 1.0  # nothing is clipped then
        norm = _unscale_and_clip(scaler, measured, totals, request.max_norm, 0 if refused else _size(ranks))
        for each in measured:
            part = each.part
            part.step.unscaled(each.flag, flags_on(scaler, each.flag, each.flags, part.plan, ranks))
            if not (
                each.flag.is_on_host
                or part.step.captured
                or getattr(part.optimizer, "_step_supports_amp_scaling", False)
            ):
                each.flag.start_copy()
    except BaseException:
        for part in parts:
            step_failed(scaler, part.step)
        raise
    if refused:
        raise RuntimeError(_NONFINITE.format(2.0))
    return norm


def _measure(scaler: GradScaler, part: Part) -> Measured:
    """Check one optimizer's gradients and sum their squares, each divided by the number of its replicas."""
    part.step.outcome, part.step.fresh, part.step.began = None, False, False
    part.plan.marks.resumed = {}
    flag = new_flag(scaler, part.step)
    flags: Flags = {}
    totals: list[Tensor] = []
    batches = part.plan.collect(allow_fp16=scaler._ours.sharded, summed=True)
    choose_backends(batches, part.plan.requested, clips=True)
    replicas = _replicas_of_gradients(part.plan, part.replicas)
    for batch in batches:
        layout, device = batch.layout, batch.layout.key.device
        if device not in flags:
            here = device == flag.device
            flags[device] = flag.found_inf if here else torch.zeros_like(flag.found_inf, device=device)
        found_inf = flags[device]
        if layout.clips != "torch":
            part.plan.marks.follow(layout, flag.device)
        total = passes.norm_batch(
            batch, fp32_on(device, scaler._scale), found_inf, _weights(batch, replicas), inverse=False
        )
        if layout.clips == "torch" and found_inf.is_cpu and layout.key.plain and found_inf.item():
            part.plan.marks.mark_on_host(batch)
        totals.append(total.to(flag.device))
    flag.add(flags.values())
    return Measured(part, flag, flags, batches, totals)


def _unscale_and_clip(
    scaler: GradScaler, measured: Sequence[Measured], totals: Tensor, max_norm: float, ranks: int
) -> Tensor:
    """Unscale and clip all gradients, and compute the flags from the totals of `ranks` ranks; return the norm."""
    norm: Tensor | None = None
    for each in measured:
        is_told = False
        for batch in each.batches:
            device = batch.layout.key.device
            scale, here = fp32_on(device, scaler._scale), device == totals.device
            local = totals if here else totals.to(device, non_blocking=device.type != "cpu")
            status = each.flag.status if here and not is_told else None
            got, wrote = passes.clip_batch_(batch, scale, local, max_norm, status, ranks)
            norm, is_told = got if here else norm, is_told or wrote
        if ranks and not is_told:
            each.flag.read_sums(totals)
    return torch_ops.norm_of(totals) if norm is None else norm


def _clip_by_passes(scaler: GradScaler, parts: Sequence[Part], ranks: Ranks | None, request: Request) -> Tensor:
    """Unscale the optimizers one by one, then clip the chosen gradients by one norm."""
    optimizers = [part.optimizer for part in parts]
    try:
        _unscale_each(scaler, parts, ranks)
        flag = any_flag((f for part in parts for f in part.step["found_inf_per_device"].values()), scaler._scale.device)
        replicas = chain(*(part.replicas for part in parts))
        grads, counts = _local_gradients(_all_parameters(optimizers), replicas, request.chosen)
        terms = _terms_of_norm(grads, counts, request.norm_type, flag)
    except Exception:
        if ranks is not None:
            _skip_together(scaler, optimizers, request.chosen)
            _report_unknown_norm(ranks, request, scaler._scale.device)
        raise
    try:
        norm, flag = _norm_of_terms(terms, request.norm_type, ranks)
        if len(parts) > 1 or ranks is not None:
            for part in parts:
                _take_flag(part.step, flag, scaler._ours.steps.exposed)
        refused = request.error_if_nonfinite and not math.isfinite(norm.item())
        if not refused:
            _multiply_(grads, torch_ops.coefficient(flag, norm, request.max_norm))
    except BaseException:
        for part in parts:
            step_failed(scaler, part.step)
        raise
    if refused:
        raise RuntimeError(_NONFINITE.format(request.norm_type))
    return norm


def _unscale_each(scaler: GradScaler, parts: Sequence[Part], ranks: Ranks | None) -> None:
    """Unscale those that are not yet; raise the first error only after the last: each one has a reduction."""
    first: Exception | None = None
    for part in parts:
        if part.step.phase not in (READY, CHECKED, CARRIED):
            continue
        try:
            scaler.unscale_(part.optimizer)
        except Exception as error:
            if ranks is None:
                raise
            first = first or error
    try:
        if first is not None:
            raise first
    finally:
        first = None  # else a reference cycle through this frame would keep gradients alive


def _take_flag(step: OptimizerStep, shared: Tensor, exposed: bool) -> None:
    """Replace an optimizer's flag by that of all that are clipped together, on every device."""
    flag, flags = step.own_flag(exposed), step["found_inf_per_device"]
    step.fresh = False
    if flag is not None:
        flag.share(shared)
        step["found_inf_per_device"] = flag.on_devices([*flags])
    elif flags:
        step["found_inf_per_device"] = {device: shared.to(device, copy=True) for device in flags}


def _clip_unscaled(parameters: Sequence[Tensor], request: Request, group: Any, sharded: bool) -> Tensor:
    """Clip as torch does, for a disabled scaler; where ranks hold shards, by the norm over all ranks.

    Args:
        parameters: all of the optimizers'; their gradients are written.
        group: the scaler's process group.
        sharded: the norm is over all ranks of the group, whatever the parameters are; None is the default group then.

    Returns: the norm, `()`, as torch's clipping does; fp32 if it is over several ranks.
    """
    max_norm, norm_type, error_if_nonfinite, model, chosen = request
    together = (sharded or group is not None) and several_ranks()
    on_fsdp1 = has_fsdp1(parameters)
    # torch's norm is right only if this rank holds whole gradients.
    whole = not several_ranks() if on_fsdp1 else all(dtensor_spec(parameter) is None for parameter in parameters)
    if not together and whole:
        clipped = [p for p in parameters if chosen is None or id(p) in chosen]
        return torch.nn.utils.clip_grad_norm_(clipped, max_norm, norm_type, error_if_nonfinite)
    by_group = together or group is not None or on_fsdp1
    ranks = group_ranks(parameters, group) if by_group else mesh_ranks(parameters)
    grads, counts = _local_gradients(parameters, replicas_of(parameters, ranks, model), chosen)
    home = parameters[0].device if len(parameters) else torch.device("cpu")
    flag = torch.zeros((), dtype=torch.float32, device=home)
    norm, _ = _norm_of_terms(_terms_of_norm(grads, counts, norm_type, flag), norm_type, ranks)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(_NONFINITE.format(norm_type))
    _multiply_(grads, torch_ops.coefficient(flag, norm, max_norm))
    return norm


def _report_failure(
    scaler: GradScaler, optimizers: Sequence[Any], ranks: Ranks, request: Request, at_once: bool
) -> None:
    """Join all reductions that the other ranks wait in: one, or one for each optimizer, and then the norm's."""
    if at_once:
        _fail_together(scaler, optimizers, ranks)
        return
    for optimizer in optimizers:
        step = scaler._ours.steps.open(optimizer)
        if step.phase in (READY, CHECKED, CARRIED):
            fail(scaler, step, optimizer, RuntimeError(), None)
    _skip_together(scaler, optimizers, request.chosen)
    _report_unknown_norm(ranks, request, scaler._scale.device)


def _fail_together(scaler: GradScaler, optimizers: Sequence[Any], ranks: Ranks) -> None:
    """Join the reduction that the other ranks wait in, with the failure set: gradients could not be checked."""
    try:
        _skip_together(scaler, optimizers, None)
    finally:  # even if that fails: they wait
        failed = torch.ones(TOTALS, dtype=torch.float64, device=scaler._scale.device)
        failed[SQUARES] = math.nan
        failed[SCALES:] = 0.0  # an update clears the failure, but scales are still compared then
        ranks.sum_(failed)


def _skip_together(scaler: GradScaler, optimizers: Sequence[Any], chosen: set[int] | None) -> None:
    """Skip all of them, after the reductions of Partial gradients that the other ranks wait in."""
    parameters = _all_parameters(optimizers)
    with suppress(Exception):  # the caller is raising already
        _local_gradients(parameters, [1] * len(parameters), chosen)
    for optimizer in optimizers:
        step_failed(scaler, scaler._ours.steps.open(optimizer))


def _report_unknown_norm(ranks: Ranks, request: Request, device: torch.device) -> None:
    """Join the norm's reduction, which gives NaN on all ranks, with the flag set."""
    numbers = [0.0, 1.0, 1.0] if request.norm_type == math.inf else [math.nan, 1.0]
    _norm_of_terms(torch.tensor(numbers, dtype=torch.float64, device=device), request.norm_type, ranks)


def _local_gradients(
    parameters: Iterable[Tensor], replicas: Iterable[int], chosen: Container[int] | None
) -> tuple[list[Tensor], list[int]]:
    """Return this rank's shards of the gradients, and how many ranks hold each.

    Args:
        parameters: their unreduced gradients are replaced by the sums, which takes a collective for a Partial one.
        replicas: for each parameter, how many of the ranks hold the same shard of it as this rank.
        chosen: the ids of the parameters that count; None: all.
    """
    grads, counts = [], []
    for parameter, count in zip(parameters, replicas, strict=True):
        if parameter.grad is None or (chosen is not None and id(parameter) not in chosen):
            continue
        if is_unreduced(parameter.grad):
            parameter.grad = reduced(parameter.grad)
        local = local_tensor(parameter.grad)
        grads.append(sparse_values(local) if local.layout is torch.sparse_coo else local)
        placed = is_dtensor(parameter) and is_dtensor(parameter.grad)
        counts.append(_replicas_of_gradient(count, parameter, num_shards(parameter.grad)) if placed else count)
    return grads, counts


def _terms_of_norm(grads: Sequence[Tensor], counts: Sequence[int], order: float, flag: Tensor) -> Tensor:
    """Return this rank's contribution to `_norm_of_terms`, fp64, [2] or [3], on the flag's device.

    Args:
        grads: floating point, of any devices; read.
        counts: for each, how many ranks hold it.
        order: > 0.
        flag: fp32, `()`, on the device where the norm is wanted; reduced together with it.
    """
    norms: dict[int, list[Tensor]] = defaultdict(list)
    for grad, count in zip(grads, counts, strict=True):
        if grad.numel():
            norms[count].append(torch.linalg.vector_norm(grad, order, dtype=torch.float64).to(flag.device))
    if order == math.inf:
        largest = _stacked([norm for of_a_count in norms.values() for norm in of_a_count], flag).amax()
        is_nan = largest.isnan()  # apart: a MAX reduction may drop NaN
        return torch.stack([torch.where(is_nan, 0.0, largest), is_nan.double(), flag.double()])
    shares = [(torch.stack(of_a_count) ** order).sum() / count for count, of_a_count in norms.items()]
    return torch.stack([_stacked(shares, flag).sum(), flag.double()])


def _norm_of_terms(terms: Tensor, order: float, ranks: Ranks | None) -> tuple[Tensor, Tensor]:
    """Return the norm of all ranks' gradients, each shard counted once: one reduction, no host wait.

        (sum over ranks and shards of abs(g) ** order / replicas) ** (1 / order), for inf the largest abs(g)

    Args:
        terms: this rank's, from `_terms_of_norm`; written.

    Returns: the norm, and 1.0 if the flag of any rank is set, else 0.0; both fp32, `()`.
    """
    if ranks is not None:
        (ranks.maximum_ if order == math.inf else ranks.sum_)(terms)
    if order == math.inf:
        return torch.where(terms[1] != 0, math.nan, terms[0]).float(), (terms[2] != 0).float()
    return (terms[0] ** (1.0 / order)).float(), (terms[1] != 0).float()


def _multiply_(grads: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiply gradients (of any devices, written) by a coefficient, fp32 `()`, as torch's clipping does."""
    for device in dict.fromkeys(grad.device for grad in grads):
        torch._foreach_mul_([grad for grad in grads if grad.device == device], coefficient.to(device))


def _stacked(numbers: Sequence[Tensor], flag: Tensor) -> Tensor:
    return torch.stack([*numbers]) if numbers else torch.zeros(1, dtype=torch.float64, device=flag.device)


def _sum_of(totals: list[Tensor], device: torch.device) -> Tensor:
    if len(totals) == 1:
        return totals[0]
    return torch.stack(totals).sum(0) if totals else torch.zeros(TOTALS, dtype=torch.float64, device=device)


def _size(ranks: Ranks | None) -> int:
    return 0 if ranks is None else len(ranks.ranks)


def _all_parameters(optimizers: Sequence[Any]) -> list[Tensor]:
    """Return the parameters of all optimizers, in order; shared ones come twice."""
    return [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]


def _joint_ranks(scaler: GradScaler, plans: Sequence[GradPlan]) -> Ranks | None:
    """Return the ranks that must agree on optimizers that share one reduction, kept in the first one's plan."""
    first = plans[0]
    if len(plans) == 1:
        needed = first.is_distributed or scaler._ours.sharded or scaler.process_group is not None
        return ranks_of(scaler, first) if needed else None
    key = (scaler.process_group, default_group(), *map(weakref.ref, plans))
    if first.joint_ranks is None or first.joint_ranks[0] != key:
        parameters = [parameter for plan in plans for parameter in plan.parameters]
        first.joint_ranks = key, scaler._ours.membership.find(parameters, scaler.process_group)
    return first.joint_ranks[1]


def _replicas(plan: GradPlan, ranks: Ranks | None, model: nn.Module | None) -> list[int]:
    """`replicas_of` the plan's parameters, kept in the plan."""
    key = (ranks, None if model is None else weakref.ref(model))
    if plan.replicas is None or plan.replicas[0] != key:
        plan.replicas = key, replicas_of(plan.parameters, ranks, model)
    return plan.replicas[1]


def replicas_of(parameters: Sequence[Tensor], ranks: Ranks | None, model: nn.Module | None) -> list[int]:
    """Return for each parameter how many of the ranks hold the same shard of it as this rank: a norm counts it once.

    A DTensor's placements give the number of shards; ranks outside its mesh are taken to hold copies. An FSDP1
    parameter looks the same sharded or not, so its FSDP module is asked, which also knows how tensor parallelism had
    sharded it before. DDP over tensor parallel keeps the DTensorSpec on the parameter. Any other parameter is taken to
    be replicated on all ranks, as under DDP.

    Args:
        parameters: of any kind, frozen ones too.
        ranks: whose gradients make up the norm; None: this one alone.
        model: holds the `FullyShardedDataParallel` modules, where there are any.

    Raises: ValueError naming `model` if an FSDP1 parameter is in none of its modules, or holds several whose replicas
        count differently; naming `process_group` if one has more shards than there are ranks.
    """
    count = 1 if ranks is None else len(ranks.ranks)
    if count == 1 and not (several_ranks() and has_fsdp1(parameters)):
        return [1] * len(parameters)
    shards = _fsdp1_shards(model)
    return [_replicas_of_one(index, each, count, shards, model) for index, each in enumerate(parameters)]


def _replicas_of_one(index: int, parameter: Any, ranks: int, shards: dict[int, int], model: nn.Module | None) -> int:
    spec = dtensor_spec(parameter)
    if spec is not None:
        return max(1, ranks // num_shards(spec))
    if not is_fsdp1(parameter):
        return ranks
    if id(parameter) not in shards:
        if model is not None:
            raise ValueError(
                "model must be the FullyShardedDataParallel module or one around it, "
                f"got {type(model).__name__} in which no FSDP module holds parameter {index}"
            )
        raise ValueError(
            f"model is needed: parameter {index} is FullyShardedDataParallel's, which does not tell how it is sharded; "
            "pass model= the module that holds the FSDP modules"
        )
    pieces = shards[id(parameter)]
    if pieces > ranks:
        raise ValueError(
            f"process_group is needed: parameter {index} is FullyShardedDataParallel's, cut into {pieces} pieces, and "
            f"the norm would be that of {ranks}; use scaler_triton.ShardedGradScaler, or pass process_group="
        )
    return ranks // pieces


def _replicas_of_gradients(plan: GradPlan, replicas: Sequence[int]) -> Sequence[int]:
    """Return how many ranks hold each gradient that the plan collected last: backward may shard it differently."""
    if not plan.grad_shards:
        return replicas  # the same list: see `_weights`
    counts = list(replicas)
    for index, shards in plan.grad_shards.items():
        counts[index] = _replicas_of_gradient(replicas[index], plan.parameters[index], shards)
    return counts


def _replicas_of_gradient(count: int, parameter: Tensor, shards: int) -> int:
    """Return how many ranks hold the same shard of a DTensor gradient, which may have other placements.

    Args:
        count: how many ranks hold the same shard of the parameter.
        shards: how many shards the gradient has.
    """
    return count * num_shards(parameter) // shards


def _weights(batch: Batch, replicas: Sequence[int]) -> list[float] | None:
    """Return 1 / replicas for each gradient, the same list as long as `replicas` is the same; None: 1 for all."""
    layout = batch.layout
    if layout.weights is None or layout.weights[0] is not replicas:
        weights = [1.0 / replicas[position] for position in layout.positions]
        layout.weights = (replicas, None if set(weights) <= {1.0} else weights)
    return layout.weights[1]


def _fsdp1_shards(model: nn.Module | None) -> dict[int, int]:
    """Return the number of shards of each FSDP1 parameter of `model`, by its id."""
    if model is None:
        return {}
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    shards = {}
    for module in FullyShardedDataParallel.fsdp_modules(model):  # outer ones first: the innermost has the last word
        whole = module.sharding_strategy is ShardingStrategy.NO_SHARD
        size = 1 if whole else dist.get_world_size(module.process_group)
        shards.update({id(parameter): size for parameter in module.parameters()})
        shards.update({key: size * before for key, before in _shards_before_fsdp1(module).items()})
    return shards


def _shards_before_fsdp1(module: Any) -> dict[int, int]:
    """Return how many shards tensor parallelism made of an FSDP1 module's own parameters, by their ids."""
    try:
        flat = module._handle.flat_param
        specs, originals = flat._param_extensions, flat._params
    except AttributeError:  # it has no parameters of its own, or this torch has no such attributes
        return {}
    before = [1 if spec is None else num_shards(spec) for spec in specs]  # a spec is that of a DTensor
    if originals is not None:  # use_orig_params=True
        return {id(parameter): shards for parameter, shards in zip(originals, before, strict=True)}
    if len(set(before)) > 1:
        raise ValueError(
            "model must be FullyShardedDataParallel with use_orig_params=True, got flat parameters that hold what "
            "tensor parallelism cut beside what it did not"
        )
    return {id(flat): before[0]}


def _checked_optimizers(optimizers: Any) -> list[Any]:
    """Return one optimizer or several as a list.

    Raises: TypeError naming `optimizers` for what has no `param_groups`; ValueError for none, or one of them twice.
    """
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


def _checked_request(
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    model: nn.Module | None,
    parameters: Iterable[Tensor] | Tensor | None,
    optimizers: Sequence[Any],
) -> Request:
    """Return the request; warn if `parameters` are none of the optimizers'.

    Raises: ValueError or TypeError naming what cannot be.
    """
    chosen = None if parameters is None else _chosen_ids(parameters, optimizers)
    bound, order = _checked_bound(max_norm), policy.check_norm_type(norm_type, positive=True)
    if not isinstance(model, nn.Module | None):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    return Request(bound, order, error_if_nonfinite, model, chosen)


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
    trained = any(each.requires_grad for each in chosen)  # frozen ones are in no optimizer
    if trained and ids.isdisjoint(map(id, _all_parameters(optimizers))):
        warnings.warn(_NOT_HELD, stacklevel=stacklevel())
    return ids


def _checked_bound(max_norm: float) -> float:
    try:
        is_bound = bool(max_norm >= 0)  # False for NaN
        bound = float(max_norm)  # raises for arrays and huge ints
    except (TypeError, ValueError, RuntimeError):  # the last two: of several numbers
        raise TypeError(f"max_norm must be a number, got {one_line(repr(max_norm))}") from None
    if not is_bound:
        raise ValueError(f"max_norm must be a number >= 0, got {max_norm!r}")
    return bound
