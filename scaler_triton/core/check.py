"""A check: one pass over an optimizer's gradients and one reduction of the flag; what follows from an error in it.

    batches = plan.collect()                  every gradient is validated before the first is written
    passes.check(batches)                     flag = any gradient is NaN or Inf; perhaps g *= 1 / scale
    flag.agree(numbers, peers)                one reduction, where other ranks must agree
    step.checked()                            keeps the flag; UNSCALED if it divided

Only here does a rank report its failure to the others: it joins the reduction with the flag set, then raises. The
others skip the step, and raise when they read the flag.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scaler_triton.core import gradients, passes, ranks
from scaler_triton.core.dispatch import is_captured, is_capturing, usual_backend
from scaler_triton.core.flag import Flag, FlagRows, Flags, HostCopy, as_flag, report_failure, sum_totals_, write_scales
from scaler_triton.core.plan import Batch, GradPlan, choose_backends
from scaler_triton.core.policy import NO_LIMITS, Limits
from scaler_triton.core.ranks import Ranks
from scaler_triton.core.step import CARRIED, UNSCALED, OptimizerStep, Steps, parameters_of
from scaler_triton.core.torch_ops import inverse, wide_dtype
from scaler_triton.core.update import Counters, DevicePolicy, LaggingCounters, Updater
from scaler_triton.guard.spikes import Guard
from scaler_triton.kernels.abi import MEASURED_AT, SCALES, TOTALS
from scaler_triton.measuring.headroom import HeadroomRule

if TYPE_CHECKING:
    from scaler_triton.grad_scaler import GradScaler

# Functions of ours that subclasses and objects may replace: a method's `__func__` is then none of these.
OUR_METHODS: set[Any] = set()
TellOthers = Callable[[], None]  # joins the reductions in which the other ranks wait, after an error


class Ours:
    """What a scaler has beyond torch's attributes; if `sharded`, all ranks agree and fp16 gradients are unscaled."""

    __slots__ = (
        "__weakref__", "allow_fp16", "by_norm", "counters", "guard", "headroom", "lagging", "limits", "model",
        "policies", "rows", "scale_copy", "sharded", "steps", "updater", "warned", "warned_of",
    )  # fmt: skip

    def __init__(self, sharded: bool) -> None:
        self.sharded = self.allow_fp16 = sharded
        self.guard: Guard | None = None  # None: gradients are scaled
        self.by_norm = False  # whether a guard looks for spikes: every check then gives a norm
        self.headroom: HeadroomRule | None = None  # None: torch's rule
        self.limits: Limits = NO_LIMITS
        self.counters = Counters()
        self.lagging = LaggingCounters()
        self.model: weakref.ref[nn.Module] | None = None  # the last one that a report was asked with
        self.steps = Steps(self.counters, usual_backend())
        self.scale_copy = HostCopy()  # for `metrics`
        self.warned: set[str] = set()  # what is warned of once
        self.warned_of: int | None = None  # the update before the streak of skips that `streak.look` has warned of
        self.rows: dict[torch.device, FlagRows] = {}
        self.policies: dict[torch.device, DevicePolicy] = {}
        self.updater: Updater | None = None  # of the scale that was updated last

    def become_guard(self, guard: Guard) -> None:
        """Make these a guard's: all ranks agree, if there are several, and gradients are not scaled."""
        self.guard, self.sharded, self.allow_fp16 = guard, True, True
        self.by_norm = guard.sigma is not None

    def rows_on(self, device: torch.device) -> FlagRows:
        """Return the rows of flags on a device, made once."""
        if device not in self.rows:
            self.rows[device] = FlagRows(device, self.steps.measures)
        return self.rows[device]


def check(
    scaler: GradScaler,
    step: OptimizerStep,
    optimizer: Any,
    *,
    divide: bool,
    by_step: bool = False,
) -> None:
    """Check an optimizer's gradients, divide them by the scale if asked to, and agree with the other ranks.

    A guard's gradients are not divided, as its scale is 1. One that looks for spikes also judges their norm, from the
    same pass. `by_step`: called by `scaler.step`, which uses the flag at once.
    """
    ours, scale = scaler._ours, scaler._scale
    by_norm = ours.by_norm
    step.outcome = None
    peers: Ranks | None = None
    try:
        if by_norm:
            open_window(scaler, step)
        plan, parameters = ours.steps.plan(step, optimizer)
        plan.written = False
        if plan.is_distributed or ours.sharded or scaler.process_group is not None:
            peers = peers_of(scaler, plan, parameters)
        if by_norm:
            part = Part(optimizer, step, plan, parameters, replicas_in(plan, parameters, peers, None, guess=True))
            totals = norm_totals(scaler, [part], peers)
            flag, flags = part.flag, part.flags
        elif getattr(scaler._unscale_grads_, "__func__", None) not in OUR_METHODS:
            # It may check gradients that are not in the plan.
            flag, plan.written = new_flag(scaler, step, divide), divide
            factor = inverse(scale).clone() if divide else torch.ones_like(flag.found_inf)
            flags = scaler._unscale_grads_(optimizer, factor, flag.found_inf, ours.allow_fp16 or not divide)
        else:
            flag = new_flag(scaler, step, divide)
            batches = plan.collect(parameters, allow_fp16=ours.allow_fp16 or not divide)
            flags, _ = passes.check(plan, batches, scale, flag, divide=divide and ours.guard is None)
        only_here = len(flags) == 1 and flags.get(flag.device) is flag.found_inf
        if not only_here:
            flag.add(flags.values())
        if peers is not None:
            numbers = totals if by_norm else flag.numbers(scale)
    except BaseException as error:
        fail(scaler, step, optimizer, peers, tell=isinstance(error, Exception))
        raise
    try:
        if by_norm:
            agree_on_norm(scaler, [part], totals, peers)
        elif peers is not None:
            flag.agree(numbers, peers)
        if not (only_here and plan.devices == [flag.device]):
            if peers is None and len(flags) == 1 and plan.devices == [*flags] and not by_norm:  # it is there already
                flags = {device: as_flag(found_inf, device) for device, found_inf in flags.items()}
            else:
                flags = flags_on(scaler, flag, flags, plan, peers)
        step.checked(flag, flags, divided=divide, by_step=by_step)
        if not by_step:
            ours.steps.unfinished = True
        plan.written = False
    except BaseException:
        step_failed(scaler, step)
        raise


@dataclass(slots=True)
class Part:
    """One of the optimizers that share a norm, and the results of the pass that reads its gradients."""

    optimizer: Any
    step: OptimizerStep
    plan: GradPlan
    parameters: Sequence[Tensor]
    replicas: Sequence[int]  # how many ranks hold each parameter's shard
    flag: Any = None
    flags: Flags = field(default_factory=dict)  # of each device
    batches: Sequence[Batch] = ()


def norm_totals(scaler: GradScaler, parts: Sequence[Part], peers: Ranks | None) -> Tensor:
    """Check optimizers' gradients; return this rank's totals of their norm, on the scale's device."""
    scale, every, allow_fp16 = scaler._scale, [], scaler._ours.allow_fp16
    for part in parts:
        plan, flag = part.plan, new_flag(scaler, part.step)
        part.flag, part.batches = flag, plan.collect(part.parameters, allow_fp16=allow_fp16, summed=True)
        choose_backends(part.batches, plan.requested, clips=True)
        replicas = _replicas_of_gradients(part)
        weights = [_weights(batch, replicas) for batch in part.batches]
        part.flags, totals = passes.check(plan, part.batches, scale, flag, weights=weights)
        flag.add(part.flags.values())
        every += totals
    if len(every) == 1:
        return every[0]  # they hold the scale
    home = scale.device
    summed = torch.stack(every).sum(0) if every else torch.zeros(TOTALS, dtype=wide_dtype(home), device=home)
    if peers is not None:
        write_scales(summed[SCALES:], scale)
    return summed


def agree_on_norm(scaler: GradScaler, parts: Sequence[Part], totals: Tensor, peers: Ranks | None) -> None:
    """Sum the totals over the ranks, by one all-reduce; a guard then judges the norm, and sets the flags."""
    if peers is not None:
        sum_totals_([part.flag for part in parts], totals, peers)
    window = parts[0].step.notes.get("window")  # of a guard that looks for spikes
    if window is not None and (peers is not None or any(part.flags for part in parts)):
        judged = parts[0] if peers is not None else next(part for part in parts if part.flags)
        window.judge(totals, judged.flag, scaler._ours.counters)


def open_window(scaler: GradScaler, step: OptimizerStep) -> None:
    """Make the window of an optimizer, if its norms are to be judged and it has none on the scale's device.

    It comes before all that may fail on one rank alone: a checkpoint's windows belong to optimizers in this order.
    """
    ours, device = scaler._ours, scaler._scale.device
    window = step.notes.get("window")
    if ours.guard is not None and ours.by_norm and (window is None or window.memory.device != device):
        step.notes["window"] = ours.guard.new_window(device, ours.steps.requested)


def replicas_in(
    plan: GradPlan, parameters: Sequence[Tensor], peers: Ranks | None, model: nn.Module | None, *, guess: bool = False
) -> list[int]:
    """Return `replicas_of` the plan's parameters, which the plan keeps; to `guess`, those of any model will do."""
    key = (peers, None if model is None else weakref.ref(model), guess)
    if plan.replicas is None or (plan.replicas[0] != key and not (guess and plan.replicas[0][0] == peers)):
        plan.replicas = key, ranks.replicas_of(parameters, peers, model, guess=guess)
    return plan.replicas[1]


def _replicas_of_gradients(part: Part) -> Sequence[int]:
    """Return how many ranks hold each gradient that was collected last: backward may shard it differently."""
    grad_shards, replicas = part.plan.grad_shards, part.replicas
    if not grad_shards:
        return replicas  # the same list: see `_weights`
    counts = list(replicas)
    for index, shards in grad_shards.items():
        counts[index] = replicas[index] * gradients.num_shards(part.parameters[index]) // shards
    return counts


def _weights(batch: Batch, replicas: Sequence[int]) -> list[float] | None:
    """Return 1 / replicas for each gradient, None if all are 1; the same list as long as `replicas` is the same."""
    layout = batch.layout
    if layout.weights is None or layout.weights[0] is not replicas:
        weights = [1.0 / replicas[position] for position in layout.positions]
        layout.weights = (replicas, None if set(weights) <= {1.0} else weights)
    return layout.weights[1]


def peers_of(scaler: GradScaler, plan: GradPlan, parameters: Sequence[Tensor], *joint: GradPlan) -> Ranks | None:
    """Return the ranks that must agree on one optimizer, or on several together; the first one's plan keeps them.

    Args:
        parameters: of all of them.
        joint: the plans of the other ones.
    """
    ours, key = scaler._ours, (scaler.process_group, ranks.default_group(), *map(weakref.ref, joint))
    if plan.peers is None or plan.peers[0] != key:
        plan.peers = key, ranks.find(ours, parameters, scaler.process_group)
        others = [step.plan.peers for step in ours.steps.all() if step.plan is not None and step.plan.peers is not None]
        ranks.warn_if_apart(ours, plan.peers[1], [theirs for their_key, theirs in others if their_key == key])
    return plan.peers[1]


def new_flag(scaler: GradScaler, step: OptimizerStep, divide: bool = True) -> Flag:
    """Return a cleared flag on the scale's device: the step's, unless that holds an earlier check's result."""
    scale, flag = scaler._scale, step.flag
    if flag is None or flag.device != scale.device or step["found_inf_per_device"] or step.carried:
        flag = scaler._ours.rows_on(scale.device).flag()
    captured = scale.is_cuda and is_capturing()
    if captured and flag.rows is not None:
        flag.rows.captured.add(flag)  # each replay writes it
    flag.clear(captured)
    if flag.measured is not None:
        is_divided = not divide and step.phase in (UNSCALED, CARRIED)
        flag.measured.zero_()[MEASURED_AT].fill_(1.0 if is_divided else scale.reshape(()))
    return flag


def flags_on(scaler: GradScaler, flag: Flag, checked: Flags, plan: GradPlan, peers: Ranks | None) -> Flags:
    """Return the agreed flag on every device that needs it; none if there is none: step and update then raise."""
    if not has_flag(scaler, checked, peers):
        return {}
    return flag.on_devices((*checked, *plan.devices) or (flag.device,))


def has_flag(scaler: GradScaler, checked: Flags, peers: Ranks | None) -> bool:
    """Return whether a check has a flag to give: this rank checked a gradient, or other ranks may have."""
    return bool(checked or peers) or (scaler._ours.sharded and ranks.is_in_a_group(scaler.process_group))


def fail(
    scaler: GradScaler, step: OptimizerStep, optimizer: Any, peers: Ranks | None = None, *, tell: bool = True
) -> None:
    """After an error `tell` the other ranks, which wait in the reduction of a check; an interrupt is not reported.

    This rank's step will be skipped if theirs will, or if gradients have been written.
    """
    told = (peers or ranks_that_wait(scaler, [optimizer])) if tell else None
    try:
        if told is not None or (step.plan is not None and step.plan.written):
            step_failed(scaler, step)
    finally:  # even if that raises: the others wait in the reduction
        if told is not None:
            by_norm = scaler._ours.by_norm
            if by_norm:  # the others first sum what is Partial
                with suppress(Exception):
                    gradients.reduce_(parameters_of(optimizer))
            report_failure(told, scaler._scale.device, by_norm=by_norm, measures=scaler._ours.steps.measures)


def ranks_that_wait(scaler: GradScaler, optimizers: Sequence[Any]) -> Ranks | None:
    """Return the ranks that wait for this one in the reduction of these optimizers, None if there are none.

    Where there is no scale or window yet it is made: the others have one, and what comes later must be the same.
    """
    peers = None
    with suppress(Exception):  # such as an illegal process_group, which fails on every rank
        peers = ranks.find(scaler._ours, parameters_of(*optimizers), scaler.process_group)
        if peers is not None:
            if scaler._scale is None or scaler._growth_tracker is None:
                scaler._lazy_init_scale_growth_tracker(_home_of(scaler, optimizers))
            for optimizer in optimizers:
                open_window(scaler, scaler._ours.steps.open(optimizer))
    return peers


def fail_early(scaler: GradScaler, optimizer: Any) -> None:
    """Report an error that came before the check."""
    with suppress(Exception):  # the first error is more important
        peers = ranks_that_wait(scaler, [optimizer])
        if peers is not None:
            step = scaler._ours.steps.open(optimizer)
            fail(scaler, step, optimizer, peers)


def step_failed(scaler: GradScaler, step: OptimizerStep, *, agreed: bool = False) -> None:
    """Make a step FAILED, with the flag that the ranks `agreed` on if any; one that was only captured starts over."""
    if not is_captured(scaler._scale):
        scaler._ours.steps.unfinished = True
        step.failed(None if agreed else scaler._scale.device)
    elif step.flag is not None and step.flag.captured:
        step.reset()


def require_scale(
    scaler: GradScaler, name: str, optimizers: Sequence[Any], tell_others: TellOthers | None = None
) -> None:
    """Raise torch's error for a method that was called before `scale`, and report it; make the scale of a guard."""
    try:
        if scaler._ours.guard is None:
            scaler._check_scale_growth_tracker(name)
        else:
            scaler._lazy_init_scale_growth_tracker(_home_of(scaler, optimizers))
    except Exception:
        if tell_others is not None:
            tell_others()
        else:
            fail_early(scaler, optimizers[0])
        raise


def _home_of(scaler: GradScaler, optimizers: Sequence[Any]) -> torch.device:
    """Return where the scale of these optimizers belongs."""
    devices = [each.device for each in parameters_of(*optimizers) if isinstance(each, Tensor)]
    return next((each for each in devices if each.type == scaler._device), torch.device(scaler._device))
