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
from scaler_triton.core.flag import Flag, any_flag
from scaler_triton.core.memory import fp32_on
from scaler_triton.core.message import read_sums, tell_failure, write
from scaler_triton.core.plan import Batch, GradPlan
from scaler_triton.core.ranks import Ranks, group_ranks, mesh_ranks, several_ranks
from scaler_triton.core.registry import unwrap
from scaler_triton.core.step import CARRIED, FOREIGN, READY, OptimizerStep, parameters_of
from scaler_triton.core.torch_ops import wide_dtype, wide_on
from scaler_triton.core.warning import warn
from scaler_triton.kernels.abi import FAILURE, OVERFLOWS

if TYPE_CHECKING:
    from scaler_triton.parts import Parts

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
_FAILURE = 2.0**20  # what a rank that failed adds to the number of set flags
# torch's message.
_NONFINITE = (
    "The total norm of order {} for gradients from `parameters` is non-finite, so it cannot be clipped. To disable "
    "this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
)


class Request(NamedTuple):
    """The checked arguments of `clip_grad_norm_`."""

    optimizers: list[Any]
    max_norm: float
    norm_type: float
    error_if_nonfinite: bool
    model: nn.Module | None
    chosen: set[int] | None  # the ids of the parameters to be clipped; None: all

    def refusal(self) -> RuntimeError:
        """Return torch's error for a norm that is NaN or infinite."""
        return RuntimeError(_NONFINITE.format(self.norm_type))


def checked_request(
    optimizers: Any,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    model: nn.Module | None,
    parameters: Iterable[Tensor] | Tensor | None,
) -> Request:
    """Return the arguments of `clip_grad_norm_`; raise if one is illegal."""
    several = _checked_optimizers(optimizers)
    chosen = None if parameters is None else _chosen_ids(parameters, several)
    bound = policy.check_number("max_norm", max_norm)
    order = policy.check_number("norm_type", math.inf if str(norm_type) == "inf" else norm_type)
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    return Request(several, bound, order, error_if_nonfinite, model, chosen)


@dataclass(slots=True)
class _Part:
    """One of the optimizers that share a norm."""

    optimizer: Any
    step: OptimizerStep
    plan: GradPlan
    parameters: Sequence[Tensor]
    replicas: Sequence[int]  # how many ranks hold each parameter's shard
    flag: Any = None
    scale: Any = None  # by which its gradients are still to be divided
    batches: Sequence[Batch] = ()


class Clip:
    """One call of `clip_grad_norm_`: `read` what gives the norm, then `write` the clipped gradients.

    Args:
        ours: the scaler's.
        scale: one element; read.
        group: as of a check.
        request: what is asked for.
    """

    def __init__(self, ours: Parts, scale: Tensor, group: Any, request: Request) -> None:
        self.ours, self.checks, self.scale, self.group, self.request = ours, ours.checks, scale, group, request
        self.parts: list[_Part] = []
        self.peers: Ranks | None = None  # that share the norm

    def run(self) -> Tensor:
        """Unscale and clip; return the norm."""
        self._open()
        try:
            self.read()
        except Exception as error:  # the other ranks wait in the norm's reduction
            self.fail()
            self.checks.explain(error, None)
            raise
        try:
            norm, refused = self.write()
        except BaseException:  # gradients are half written
            for part in self.parts:
                failures.spend(self.checks, part.step, self.scale.device)
            raise
        finally:
            for part in self.parts if len(self.parts) > 1 else ():
                part.step.notes["clipped"] = [each.step for each in self.parts]
        if refused:
            raise self.request.refusal()
        return norm

    def read(self) -> None:
        """Do all that may fail on one rank alone, while it can still tell the others."""
        raise NotImplementedError

    def write(self) -> tuple[Tensor, bool]:
        """Clip by the norm over all ranks; return it, and whether it must raise, so that nothing was clipped."""
        raise NotImplementedError

    def fail(self) -> None:
        """After an error skip the steps, and join the reductions of checks and norm in which the other ranks wait."""
        checks, chosen, optimizers = self.checks, self.request.chosen, self.request.optimizers
        peers = failures.ranks_that_wait(checks, optimizers, self.group)
        if peers is None:
            return
        steps = [checks.steps.open(each) for each in optimizers]
        with suppress(Exception):  # here and below: the caller is raising already, and the others wait
            for step in steps:
                checks.looks_for(step, self.scale, divide=True)
        with suppress(Exception):
            self.fail_checks(steps)
        with suppress(Exception):
            gradients.reduce_(each for each in parameters_of(*optimizers) if chosen is None or id(each) in chosen)
        with suppress(Exception):
            for step in steps:
                failures.spend(checks, step, self.scale.device)
        with suppress(Exception):
            self.tell_failure(peers)

    def fail_checks(self, steps: Sequence[OptimizerStep]) -> None:
        """Join the reductions of checks that come before that of the norm."""

    def tell_failure(self, peers: Ranks) -> None:
        """Join the reduction of the norm."""
        raise NotImplementedError

    def _open(self) -> None:
        """Find the steps to be clipped, and the ranks that share their norm; an error is told to these."""
        checks, request, home = self.checks, self.request, self.scale.device
        steps = [checks.steps.open(each) for each in request.optimizers]
        for step in steps:
            if step.phase is FOREIGN:
                raise RuntimeError(_FOREIGN.format(step["stage"]))
            step.require_unscalable(_UNSCALES_TOO, _LATE, again=request.chosen is not None)
        try:
            for step in steps:
                checks.looks_for(step, self.scale, divide=True)  # which may prepare something, on every rank
            planned = [checks.plan(step, each, home) for step, each in zip(steps, request.optimizers, strict=True)]
            plans, parameters = zip(*planned, strict=True)
            self.peers = checks.peers_of(plans[0], parameters_of(*request.optimizers), self.group, *plans[1:])
            replicas = [replicas_in(plan, held, self.peers, request.model) for plan, held in planned]
        except ValueError:  # a wrong argument raises on all ranks
            raise
        except Exception:
            self.fail()
            raise
        self.parts = list(map(_Part, request.optimizers, steps, plans, parameters, replicas))


class ClipAtOnce(Clip):
    """The 2-norm of all gradients, which the pass that checks them also gives: it takes one reduction."""

    def read(self) -> None:
        """Check all gradients, and sum their squares."""
        looks = self.ours.looks_with_norm(self.parts[0].step, self.scale, self.request.model)
        flags: list[Flag] = []
        for part in self.parts:
            part.step.outcome = None
            part.flag = self.checks.flag_for(part.step, self.scale)
            part.scale = torch.ones_like(self.scale) if self.checks.are_divided(part.step) else self.scale
            given = part.plan, part.parameters, part.step, part.scale, part.flag, self.peers
            part.batches = self.checks.take_looks(looks, *given, sums_partial=True)
            flags.append(part.flag)
        self._looks, self._flags = looks, flags
        self._message = None if self.peers is None else write(flags, looks, self.scale)

    def write(self) -> tuple[Tensor, bool]:
        """Unscale and clip in one pass."""
        parts, peers, checks, group = self.parts, self.peers, self.checks, self.group
        checks.agree(self._flags, self._looks, self._message, peers)
        totals = self._looks[-1].totals
        assert totals is not None
        refused = self.request.error_if_nonfinite and not math.isfinite(torch_ops.norm_of(totals).item())
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
                number = fp32_on(device, part.scale)
                status = unwritten if here else None
                got, wrote = passes.clip_batch_(batch, number, local, self.request.max_norm, status, size)
                norm, unwritten = got if here else norm, None if wrote else unwritten
            if unwritten is not None:
                read_sums(part.flag, totals)
            flags_of_step = checks.flags_for(part.flag, part.plan, peers, group, summed=True)
            part.step.accept(part.flag, flags_of_step, divided=True)
            checks.flag_is_read_later(part.step, part.optimizer)
        return torch_ops.norm_of(totals) if norm is None else norm, refused

    def tell_failure(self, peers: Ranks) -> None:
        """Join the reduction of the norm."""
        tell_failure(peers, self.scale.device, self.checks.n_sums or 0)


class ClipAfterUnscaling(Clip):
    """Any norm, perhaps that of some parameters only: optimizers are unscaled one by one, then comes the norm.

    Args:
        unscale_: the scaler's method, which a subclass may replace.
    """

    def __init__(self, unscale_: Callable[[Any], None], *given: Any) -> None:
        super().__init__(*given)
        self._unscale_ = unscale_

    def read(self) -> None:
        """Unscale the optimizers, then find the `_terms_of` the chosen gradients."""
        parts, device = self.parts, self.scale.device
        ready = [part for part in parts if part.step.phase in (READY, CARRIED)]
        for part in ready:  # every gradient is validated before the first is written
            part.plan.collect(part.parameters, allow_fp16=self.checks.allow_fp16)
        for part in ready:
            self._unscale_(part.optimizer)
        flag = any_flag((f for part in parts for f in part.step["found_inf_per_device"].values()), device)
        replicas = chain(*(part.replicas for part in parts))
        self._terms = _terms_of(parameters_of(*self.request.optimizers), replicas, flag, self.request)

    def write(self) -> tuple[Tensor, bool]:
        """Clip, and share the flags where there are several."""
        norm, bad, refused = _clip_by_terms_(self._terms, self.peers, self.request)
        for part in self.parts if len(self.parts) > 1 or self.peers is not None else ():
            self._take_flag(part, bad)
        return norm, refused

    def _take_flag(self, part: _Part, bad: Tensor) -> None:
        """Replace an optimizer's flag on every device by that of all of them, which is set if `bad` is not 0."""
        step, checks = part.step, self.checks
        flag, flags = step.own_flag() if checks.steps.exposed else step.flag, step["found_inf_per_device"]
        if flag is not None and checks.has_flag(flag, self.peers, self.group):
            flag.share(bad)
            flag.status[FAILURE].clamp_(min=bad >= _FAILURE)
            shared = checks.flags_for(flag, part.plan, self.peers, self.group, summed=True)
        else:
            shared = {device: (bad != 0).float().to(device, copy=True) for device in flags}
        step["found_inf_per_device"] = shared

    def fail_checks(self, steps: Sequence[OptimizerStep]) -> None:
        """Join the reductions of the checks that are still to come."""
        for step, optimizer in zip(steps, self.request.optimizers, strict=True):
            if step.phase in (READY, CARRIED):
                failures.fail(self.checks, step, optimizer, self.scale.device, self.group)

    def tell_failure(self, peers: Ranks) -> None:
        """Join the reduction of the norm."""
        device = self.scale.device
        values = torch.tensor([0.0, 1.0, _FAILURE], dtype=wide_dtype(device), device=device)
        peers.reduce_(values, "MAX" if self.request.norm_type == math.inf else "SUM")


def clip_unscaled_(request: Request, group: Any, sharded: bool) -> Tensor:
    """Clip as torch does, for a disabled scaler; if it is `sharded`, or ranks hold shards, over all ranks."""
    parameters = parameters_of(*request.optimizers)
    shared = sharded or group is not None or any(map(gradients.is_fsdp1, parameters))
    across_ranks = shared and several_ranks()
    # torch's norm is right only if this rank holds whole gradients.
    if not across_ranks and all(each is None for each in map(gradients.dtensor_spec, parameters)):
        clipped = [p for p in parameters if request.chosen is None or id(p) in request.chosen]
        options = request.max_norm, request.norm_type, request.error_if_nonfinite
        return torch.nn.utils.clip_grad_norm_(clipped, *options)
    peers = group_ranks(parameters, group) if across_ranks or group is not None else mesh_ranks(parameters)
    flag = torch.zeros((), dtype=torch.float32, device=parameters[0].device if parameters else "cpu")
    read = _terms_of(parameters, replicas_of(parameters, peers, request.model), flag, request)
    norm, _, refused = _clip_by_terms_(read, peers, request)
    if refused:
        raise request.refusal()
    return norm


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
        warn("ST13", _NOT_HELD)
    return ids
