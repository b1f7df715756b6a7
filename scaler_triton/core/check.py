"""A check: one pass over an optimizer's gradients, and one reduction where other ranks must agree.

    batches = plan.collect()            every gradient is validated before the first is written
    look.run(batch, scale, flag)        flag = any gradient is NaN or Inf; Divide: g *= 1 / scale
    agree(flag, looks, message, peers)  one reduction, where other ranks must agree
    step.accept(flag)                   keeps the flag; UNSCALED if it divided

A rank whose check fails joins the reduction with the failure set, then raises: see `failures.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scaler_triton.core import failures, gradients, ranks
from scaler_triton.core.dispatch import Task, is_captured, is_capturing, usual_backend
from scaler_triton.core.flag import Flag, FlagRows, Flags, as_flag
from scaler_triton.core.look import Divide, Look, Read
from scaler_triton.core.message import agree, write
from scaler_triton.core.observer import Meeting
from scaler_triton.core.plan import Batch, GradPlan
from scaler_triton.core.prepared import PreparedCheck
from scaler_triton.core.registry import Steps
from scaler_triton.core.step import CARRIED, FLAGS, READY, UNSCALED, parameters_of

if TYPE_CHECKING:
    from scaler_triton.core.observer import Observer
    from scaler_triton.core.ranks import Ranks
    from scaler_triton.core.step import OptimizerStep
    from scaler_triton.core.update import Counters

Override = Callable[[Flag], Flags]  # a subclass's own pass, which sets `written`; returns the flag of each device


class Checks:
    """The checks of one scaler: whose steps they are of, who must agree, and how gradients are looked at.

    Args:
        counters: of the scaler's updates; kernels tell overflows apart by them.
        sharded: whether all ranks of a group agree on every optimizer, and fp16 gradients are unscaled.
    """

    def __init__(self, counters: Counters, *, sharded: bool) -> None:
        self.counters = counters
        self.steps = Steps()
        self.sharded = self.allow_fp16 = sharded
        self.needs_group = sharded  # False: without a group this process decides alone
        self.requested = usual_backend()
        self.task: Task = "unscaling"  # what kernels are tried for
        self.dividing: list[Look] = [Divide()]
        self.reading: list[Look] = [Read()]
        self.n_sums: int | None = None  # of these looks together, see `Look`
        self.n_extra = 0  # how many numbers they keep with each flag
        self.sums_partial = False  # whether they need the sums of Partial gradients
        self.observers: list[Observer] = []
        self.warned: set[str] = set()  # what is warned of once
        self._rows: dict[torch.device, FlagRows] = {}

    def check(
        self,
        step: OptimizerStep,
        optimizer: Any,
        scale: Tensor,
        group: Any,
        *,
        divide: bool,
        override: Override | None = None,
    ) -> None:
        """Check an optimizer's gradients, divide them by the scale if asked to, and agree with the other ranks.

        Args:
            step: the optimizer's, whose flag is written.
            optimizer: its gradients are read, or written.
            scale: one element; read.
            group: the ranks that must agree instead of those of the parameters' meshes; None: these.
            divide: take the looks that divide, which make the step UNSCALED.
            override: a pass to make instead, which may look at other gradients.
        """
        peers, flag, step.outcome = None, None, None
        try:
            looks = self.looks_for(step, scale, divide)
            plan, parameters = self.plan(step, optimizer, scale.device)
            if plan.is_distributed or self.sharded or group is not None:
                peers = self.peers_of(plan, parameters, group)
            flag = self.flag_for(step, scale)
            if override is None:
                self.take_looks(looks, plan, parameters, step, scale, flag, peers, divide=divide)
            else:
                flag.take(override(flag))
                flag.gather()
            message = None if peers is None else write([flag], looks, scale)
        except BaseException as error:
            failures.fail(self, step, optimizer, scale.device, group, peers, flag, tell=isinstance(error, Exception))
            self.explain(error, optimizer)
            raise
        try:
            if peers is not None or self.n_sums is not None:
                self.agree([flag], looks, message, peers)
            if flag.has_gradients and not flag.elsewhere and plan.devices == [flag.device]:
                flags = {flag.device: flag.found_inf}
            else:
                flags = self.flags_for(flag, plan, peers, group)
            step.accept(flag, flags, divided=divide)
        except BaseException:
            failures.spend(self, step, scale.device)
            raise

    def looks_for(self, step: OptimizerStep, scale: Tensor, divide: bool) -> Sequence[Look]:
        """Return the looks of a check; gradients that were divided before an update are not divided again."""
        if divide and not (step.phase is CARRIED and self.are_divided(step)):
            return self.dividing
        return self.reading

    def are_divided(self, step: OptimizerStep) -> bool:
        """Return whether a step is CARRIED, and nobody has written its gradients since they were divided."""
        owner = step.owner() if step.phase is CARRIED else None
        return owner is not None and gradients.is_unwritten(parameters_of(owner), step.notes.get("divided", ()))

    def take_looks(
        self,
        looks: Sequence[Look],
        plan: GradPlan,
        parameters: Sequence[Tensor],
        step: OptimizerStep,
        scale: Tensor,
        flag: Flag,
        peers: Ranks | None,
        *,
        divide: bool = True,
        sums_partial: bool = False,
    ) -> Sequence[Batch]:
        """Take the looks at all gradients of one optimizer, perhaps at the sums of Partial ones; return its batches."""
        for look in looks:
            if look.n_sums is not None:
                look.begin(plan, parameters, peers, flag, scale)
        allow_fp16, summed = self.allow_fp16 or not divide, sums_partial or self.sums_partial
        batches = plan.collect(parameters, allow_fp16=allow_fp16, summed=summed)
        divides = divide and looks is not self.reading
        if plan.is_new:
            self.tell_met(Meeting(step, plan, parameters, scale, flag, divides))
        is_alone = peers is None and not plan.is_distributed
        prepared = self._prepare(looks, plan, batches, scale, flag, divides) if is_alone else None
        if prepared is not None:
            is_found = prepared.run(batch.tensors for batch in batches)
        else:
            for batch in batches:
                for look in looks:
                    look.run(batch, scale, flag)
            is_found = flag.gather()
        if is_found:
            self.tell_found(step, batches)
        return batches

    def _prepare(
        self,
        looks: Sequence[Look],
        plan: GradPlan,
        batches: Sequence[Batch],
        scale: Tensor,
        flag: Flag,
        divides: bool,
    ) -> PreparedCheck | None:
        """Return an ordinary check, which the plan keeps, None if it is no such one."""
        selectors = plan.selectors(batches)
        is_at_home = plan.devices == [flag.device] and scale.dtype is torch.float32 and type(scale) is Tensor
        if len(looks) > 1 or selectors is None or not is_at_home or flag.is_captured:
            return None
        bound = [looks[0].bind(batch.layout, scale, flag.found_inf) for batch in batches]
        passes = [each for each in bound if each is not None]
        if len(passes) == len(bound):
            plan.prepared = PreparedCheck(plan, looks, scale, flag, divides, passes, selectors)
            return plan.prepared
        return None

    def repeat(self, step: OptimizerStep, optimizer: Any, scale: Tensor, group: Any, *, divide: bool) -> bool:
        """Check a READY step's gradients as last time, if that was an ordinary check and all is as it was.

        Args: as of `check`.

        Returns: whether that was so; otherwise nothing has been done.
        """
        plan, looks = step.plan, self.dividing if divide else self.reading
        prepared = None if plan is None or plan.is_new else plan.prepared
        if prepared is None or prepared.looks is not looks or step.phase is not READY or group is not None:
            return False
        if self.sharded and ranks.is_in_a_group(group):
            return False
        rows = prepared.rows(step, optimizer, scale)
        if rows is None:
            return False
        flag, step.outcome = prepared.flag, None
        try:
            flag.clear()
            if prepared.run(rows):
                self.tell_found(step, prepared.batches(rows))
            step.accept(flag, {flag.device: flag.found_inf}, divided=divide)
        except BaseException:
            failures.fail(self, step, optimizer, scale.device, None, None, flag)
            raise
        return True

    def tell_met(self, meeting: Meeting) -> None:
        """Tell the observers that a check has met gradients of new forms."""
        meeting.plan.is_new = False
        for observer in self.observers:
            observer.met(meeting)

    def tell_skipped(self, step: OptimizerStep, scale: Tensor) -> None:
        """Tell the observers that a plain optimizer's step was skipped."""
        for observer in self.observers:
            observer.skipped(step, scale)

    def explain(self, error: BaseException, optimizer: Any) -> None:
        """Have the observers add to an error what they know of its cause."""
        for observer in self.observers:
            with suppress(Exception):  # the error itself is more important
                observer.raising(error, optimizer)

    def tell_found(self, step: OptimizerStep, batches: Sequence[Batch]) -> None:
        """Tell the observers that a check has found a gradient that is not finite."""
        for observer in self.observers:
            observer.found(step, batches)

    def agree(self, flags: Sequence[Flag], looks: Sequence[Look], message: Tensor | None, peers: Ranks | None) -> None:
        """Make the flags of one check equal on the ranks that must agree, and let the looks judge them."""
        if peers is not None and message is not None:
            agree(flags, looks, message, peers)
        for look in looks:
            look.judge(flags, peers)

    def plan(self, step: OptimizerStep, optimizer: Any, home: torch.device) -> tuple[GradPlan, list[Tensor]]:
        """Return the plan of the optimizer's gradients, a new one if its parameters changed, and these parameters."""
        groups, plan = optimizer.param_groups, step.plan
        if type(groups) is list and len(groups) == 1:
            parameters = groups[0]["params"]
        else:
            parameters = [each for group in groups for each in group["params"]]
        if plan is None or not plan.is_for(parameters, home):
            skip_count = self.counters.skip_count_on(home)
            plan = step.plan = GradPlan(parameters, self.requested, self.task, home, skip_count)
        return plan, parameters

    def peers_of(self, plan: GradPlan, parameters: Sequence[Tensor], group: Any, *joint: GradPlan) -> Ranks | None:
        """Return the ranks that must agree on one optimizer, or on several together; the first one's plan keeps them.

        Args:
            plan: of the first one.
            parameters: of all of them.
            group: as of `check`.
            joint: the plans of the other ones.
        """
        key = (group, ranks.default_group(), *map(weakref.ref, joint))
        if plan.peers is None or plan.peers[0] != key:
            plan.peers = key, self.find_peers(parameters, group)
            plans = [step.plan for step in self.steps.all() if step.plan is not None]
            same_key = [each.peers for each in plans if each.peers is not None and each.peers[0] == key]
            ranks.warn_if_apart(self.warned, plan.peers[1], [peers for _, peers in same_key])
        return plan.peers[1]

    def find_peers(self, parameters: Sequence[Tensor], group: Any) -> Ranks | None:
        """Return the ranks that must agree on an optimizer of these parameters, None if no other rank must."""
        if self.sharded and not self.needs_group and not ranks.is_in_a_group(group):
            return None
        if self.sharded or group is not None:
            return ranks.group_ranks(parameters, group)
        return ranks.ranks_of_meshes(parameters, self.warned)

    def flag_for(self, step: OptimizerStep, scale: Tensor) -> Flag:
        """Return a cleared flag on the scale's device: the step's, unless that holds an earlier check's result."""
        flag, captured = step.flag, scale.is_cuda and is_capturing()
        if flag is None or flag.device != scale.device or step[FLAGS] or step.carried:
            flag = self.rows_on(scale.device).flag()
        if captured and flag.rows is not None:
            flag.rows.of_graphs.add(flag)  # each replay writes it
        flag.clear(captured)
        return flag

    def rows_on(self, device: torch.device) -> FlagRows:
        """Return the rows of flags on a device, made once."""
        if device not in self._rows:
            self._rows[device] = FlagRows(device, self.n_extra)
        return self._rows[device]

    def flags_for(self, flag: Flag, plan: GradPlan, peers: Ranks | None, group: Any, *, summed: bool = False) -> Flags:
        """Return the flag on every device that needs it; none if there is none: step and update then raise.

        `summed`: it may have been set after the passes.
        """
        if not self.has_flag(flag, peers, group):
            return {}
        checked = flag.devices()
        is_late = summed or self.n_sums is not None or peers is not None
        if not is_late and checked == plan.devices == [*flag.elsewhere] and len(checked) == 1:  # it is there already
            return {device: as_flag(part, device) for device, part in flag.elsewhere.items()}
        return flag.on_devices((*checked, *plan.devices) or (flag.device,))

    def flag_is_read_later(self, step: OptimizerStep, optimizer: Any) -> None:
        """Start copying the flag of a step that was unscaled to the host, where a plain optimizer's step needs it."""
        self.steps.unfinished = True
        flag = step.flag
        if flag is not None and not (flag.is_captured or getattr(optimizer, "_step_supports_amp_scaling", False)):
            flag.start_copy()

    def has_flag(self, flag: Flag, peers: Ranks | None, group: Any) -> bool:
        """Return whether a check has a flag to give: this rank checked a gradient, or other ranks may have."""
        return bool(flag.devices() or peers) or (self.sharded and ranks.is_in_a_group(group))

    def carried_over(self, captured: bool) -> list[OptimizerStep]:
        """Return the steps that the update which comes now carries over."""
        carried = self.steps.carried_over(captured)
        for step in carried:
            if step.phase is not CARRIED:
                owner = step.owner() if step.phase is UNSCALED else None
                step.notes["divided"] = () if owner is None else gradients.state_of(parameters_of(owner))
            for observer in self.observers:
                observer.carried(step)
        return carried

    def resume(self, step: OptimizerStep, scale: Tensor) -> None:
        """Continue a CARRIED step."""
        step.resume(is_captured(scale))
        self.resumed(step)

    def resumed(self, step: OptimizerStep) -> None:
        """Tell the observers that a step goes on which was checked before an update."""
        for observer in self.observers:
            observer.resumed(step)
