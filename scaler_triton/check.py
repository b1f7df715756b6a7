"""A check: one pass over an optimizer's gradients and one reduction of the flag; what follows from an error in it.

    batches = plan.collect()                  every gradient is validated before the first is written
    passes.check(batches)                     flag = any gradient is NaN or Inf; perhaps g *= 1 / scale
    flag.agree(ranks)                         one reduction, where other ranks must agree
    step.checked() or step.unscaled()

Only here does a rank report its failure to the others: it joins the reduction with the flag set, then raises. The
others skip the step, and raise when they read the flag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scaler_triton import passes, ranks
from scaler_triton.dispatch import is_captured, usual_backend
from scaler_triton.flag import Flag, FlagRows, Flags, report_failure
from scaler_triton.plan import GradPlan
from scaler_triton.policy import NO_LIMITS, Limits
from scaler_triton.ranks import Membership, Ranks
from scaler_triton.step import OptimizerStep, Steps, parameters_of
from scaler_triton.torch_ops import inverse
from scaler_triton.update import Counters, DevicePolicy, Home, LaggingCounters

if TYPE_CHECKING:
    from scaler_triton.grad_scaler import GradScaler


class Ours:
    """What a scaler has beyond torch's attributes; if `sharded`, all ranks agree and fp16 gradients are unscaled."""

    __slots__ = (
        "allow_fp16", "counters", "home", "lagging", "limits", "membership", "policies", "rows", "sharded", "steps",
    )  # fmt: skip

    def __init__(self, sharded: bool, counters: Sequence[int] | None = None) -> None:
        self.sharded = self.allow_fp16 = sharded
        self.limits: Limits = NO_LIMITS
        self.counters = Counters(counters)
        self.lagging = LaggingCounters()
        self.steps = Steps(self.counters, usual_backend())
        self.membership = Membership(sharded)
        self.rows: dict[torch.device, FlagRows] = {}
        self.policies: dict[torch.device, DevicePolicy] = {}
        self.home: Home | None = None  # of the scale that was updated last

    def rows_on(self, device: torch.device) -> FlagRows:
        """Return the rows of flags on a device, made once."""
        if device not in self.rows:
            self.rows[device] = FlagRows(device)
        return self.rows[device]

    def policy_on(self, device: torch.device) -> DevicePolicy:
        """Return the numbers of the update rule on a device, made once."""
        if device not in self.policies:
            self.policies[device] = DevicePolicy(device)
        return self.policies[device]


def check(
    scaler: GradScaler, step: OptimizerStep, optimizer: Any, *, divide: bool, by_step: bool = False, copy: bool = True
) -> None:
    """Check an optimizer's gradients, divide them by the scale if asked to, and agree with the other ranks.

    Args:
        by_step: whether `scaler.step` calls, and uses the flag at once.
        copy: start a copy of the flag to the host, where `scaler.step` will read it.
    """
    ours, scale = scaler._ours, scaler._scale
    step.outcome = None
    together: Ranks | None = None
    try:
        plan = ours.steps.plan(step, optimizer)
        plan.written, plan.marks.resumed = False, {}
        if plan.is_distributed or ours.sharded or scaler.process_group is not None:
            together = ranks_of(scaler, plan)
        flag = new_flag(scaler, step)
        allow_fp16 = ours.allow_fp16 or not divide
        if is_replaced(scaler, "_unscale_grads_"):  # it may check gradients that are not in the plan
            plan.written = divide
            factor = inverse(scale) if divide else torch.ones_like(flag.found_inf)
            flags = scaler._unscale_grads_(optimizer, factor, flag.found_inf, allow_fp16)
        else:
            flags = passes.check(plan, plan.collect(allow_fp16=allow_fp16), scale, flag, divide=divide)
        only_here = len(flags) == 1 and flags.get(flag.device) is flag.found_inf
        if not only_here:
            flag.add(flags.values())
        if together is not None:
            flag.write_scale(scale)
    except BaseException as error:
        fail(scaler, step, optimizer, error, together)
        raise
    try:
        if together is not None:
            flag.agree(together)
        usual = only_here and plan.devices == [flag.device]
        agreed = flags if usual else flags_on(scaler, flag, flags, plan, together)
        if divide:
            step.unscaled(flag, agreed)
        else:
            step.checked(flag, agreed)
        if copy and not flag.is_on_host and not step.captured:
            flag.start_copy()
        step.fresh = by_step
        if divide:
            step.began &= by_step  # another attempt
        plan.written = False
    except BaseException:
        step_failed(scaler, step)
        raise


def ranks_of(scaler: GradScaler, plan: GradPlan) -> Ranks | None:
    """Return the ranks that must agree on an optimizer's flag, cached in its plan; None: only this one."""
    ours, key = scaler._ours, (scaler.process_group, ranks.default_group())
    if plan.ranks is None or plan.ranks[0] != key:
        plan.ranks = key, ours.membership.find(plan.parameters, scaler.process_group)
        others = [step.plan.ranks for step in ours.steps.all() if step.plan is not None and step.plan.ranks is not None]
        ours.membership.warn_if_apart(plan.ranks[1], [theirs for their_key, theirs in others if their_key == key])
    return plan.ranks[1]


def new_flag(scaler: GradScaler, step: OptimizerStep) -> Flag:
    """Return a cleared flag on the scale's device: the step's, unless that holds an earlier check's result."""
    home = scaler._scale.device
    flag = step.flag
    if flag is None or flag.device != home or step["found_inf_per_device"]:
        flag = scaler._ours.rows_on(home).flag()
    step.captured = scaler._scale.is_cuda and torch.cuda.is_current_stream_capturing()
    if step.captured and flag.rows is not None:
        flag.rows.captured.add(flag)  # each replay writes it
    flag.clear(step.captured)
    return flag


def flags_on(scaler: GradScaler, flag: Flag, checked: Flags, plan: GradPlan, together: Ranks | None) -> Flags:
    """Return the agreed flag on every device that needs it; none if nothing was checked: step and update then raise."""
    if not checked and together is None and not scaler._ours.sharded:
        return {}
    if checked.keys() == {flag.device} == {*plan.devices}:
        return {flag.device: flag.found_inf}
    return flag.on_devices((*checked, *plan.devices) or (flag.device,))


def fail(scaler: GradScaler, step: OptimizerStep, optimizer: Any, error: BaseException, together: Ranks | None) -> None:
    """Report an error, unless it is an interrupt, to the other ranks, which wait in the reduction.

    This rank's step will be skipped if theirs will, or if gradients have been written.
    """
    plan = step.plan
    if isinstance(error, Exception) and together is None:
        with suppress(Exception):  # such as an illegal process_group, which fails on every rank
            together = scaler._ours.membership.find(parameters_of(optimizer), scaler.process_group)
    told = together if isinstance(error, Exception) else None
    try:
        if told is not None or (plan is not None and plan.written):
            step_failed(scaler, step)
    finally:  # even if that raises: the others wait in the reduction
        if told is not None:
            report_failure(told, scaler._scale.device)


def step_failed(scaler: GradScaler, step: OptimizerStep, *, agreed: bool = False) -> None:
    """Make a step FAILED, with the flag that the ranks `agreed` on if any; one that was only captured starts over."""
    if not is_captured(scaler._scale):
        step.failed(None if agreed else scaler._scale.device)
    elif step.captured:
        step.reset()


def refuse_without_scale(
    scaler: GradScaler, name: str, optimizers: Sequence[Any], report: Callable[[Any, Ranks], None] | None = None
) -> None:
    """Report to the other ranks that a method was called before `scale`, then raise torch's error.

    Args:
        report: joins the reductions of the others; None: those of a check.
    """
    try:
        scaler._check_scale_growth_tracker(name)
    except AssertionError:
        with suppress(Exception):  # torch's error is more important
            held = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
            together = scaler._ours.membership.find(held, scaler.process_group)
            if together is not None:
                devices = [each.device for each in held if isinstance(each, Tensor)]
                home = next((each for each in devices if each.type == scaler._device), torch.device(scaler._device))
                scaler._lazy_init_scale_growth_tracker(home)  # the others back off in `update`, and so must this rank
                if report is not None:
                    report(optimizers, together)
                else:
                    for optimizer in optimizers:
                        scaler._ours.steps.open(optimizer).failed(home)
                        report_failure(together, home)
        raise


def is_replaced(scaler: GradScaler, name: str) -> bool:
    """Return whether a method of ours was replaced, by a subclass or on the object."""
    return getattr(getattr(scaler, name), "__func__", None) is not _METHODS[name]


_METHODS: dict[str, Any] = {}


def methods_of(cls: type, *names: str) -> None:
    """Store a class's methods, for `is_replaced`."""
    _METHODS.update({name: vars(cls)[name] for name in names})
