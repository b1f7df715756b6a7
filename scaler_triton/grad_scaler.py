"""GradScaler: dynamic loss scaling for fp16 training. One step, from top to bottom:

    scale     outputs * scale
    unscale_  flag = any gradient is NaN or Inf on any rank that must agree; g *= 1 / scale
    step      unscale_ if it was not called; optimizer.step() unless flag
              (a fused optimizer gets scale and flag, and does both itself on the device)
    update    scale *= backoff_factor if any flag, scale *= growth_factor after growth_interval updates without one

A plain optimizer's steady step on one device, in `core/` where no file is named:

    step
      Steps.open                     registry.py   the optimizer's OptimizerStep, whose phases are in step.py
      Checks.repeat                  check.py
        PreparedCheck.rows           prepared.py   its gradients, if all is as it was in the last check
        PreparedCheck.run            prepared.py   the bound passes: kernels/unscale.py, or torch's op
      OptimizerStep.is_bad           step.py       waits for the flag
      optimizer.step                               unless it is set
    update
      Updates.by_flags               update.py     in Python for a scale on the CPU
        PutOff.takes                 put_off.py    else counts it on the host, if it changes no scale
                                                   or kernels/update_scale.py, which also clears the flags

Where something is new or unusual, the check is made the general way:

    Checks.check                     check.py
      GradPlan.collect               plan.py       its gradients as batches
      Divide.run                     look.py       each batch
      agree                          message.py    only where other ranks must agree
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.cuda.amp import common

from scaler_triton import policy
from scaler_triton.clipping import clip
from scaler_triton.core import failures, fused, ranks
from scaler_triton.core.dispatch import (
    check_backend,
    is_captured,
    is_capturing,
    outside_transforms,
    refuse_capture,
    skip_tracing,
    stacklevel,
    stream_of,
)
from scaler_triton.core.flag import Flag, Flags, any_flag, make_flag
from scaler_triton.core.overrides import overrides, own
from scaler_triton.core.passes import check_batch, unscale_batch_
from scaler_triton.core.registry import Steps
from scaler_triton.core.step import CARRIED, FAILED, FOREIGN, READY, STEPPED, UNSCALED, OptimizerStep, parameters_of
from scaler_triton.core.torch_ops import inverse, wide_dtype
from scaler_triton.core.update import LaggingCounters
from scaler_triton.kernels.abi import CAP, MAX_SCALE, STATUS
from scaler_triton.measuring.headroom import Headroom, HeadroomRule, read_headroom
from scaler_triton.measuring.measure import is_measuring, measure_in
from scaler_triton.parts import Parts
from scaler_triton.policy import HEADROOM, KEY, NO_LIMITS, WINDOWS, Limits
from scaler_triton.report import overflow as report
from scaler_triton.report.describe import describe
from scaler_triton.report.marks import marks_of
from scaler_triton.report.overflow import Model, OverflowReport
from scaler_triton.report.streak import LOOKS
from scaler_triton.stats import ScalerStats
from scaler_triton.watch import closures

Outputs = TypeVar("Outputs")  # a tensor, or an iterable of them

_COUNTED = "_counted"  # in a pickle: what `Parts` holds, as plain numbers


class _Limits:
    """The limits of the scale, read only; unlike a property, it leaves the name free for a subclass's attribute."""

    def __get__(self, scaler: GradScaler | None, owner: type | None = None) -> Any:
        return self if scaler is None else scaler._ours.updates.limits

    def __repr__(self) -> str:
        return "<min_scale, max_scale, hysteresis and max_consecutive_skips, read only>"


class GradScaler(torch.amp.GradScaler):
    """Drop-in for `torch.amp.GradScaler`: dynamic loss scaling for fp16 training.

        scaler = GradScaler(device.type)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Ranks agree where parameters are DTensors (FSDP2, tensor parallel); for FSDP1 use `ShardedGradScaler`. DDP's ranks
    hold equal gradients and need no agreement.

    Args:
        device: the device type of the scale, a string or a `torch.device`.
        init_scale: first scale, in [2^-126, fp32 max]; "measured", with `scale_policy="headroom"`: 1.
        growth_factor: > 1; factor after `growth_interval` updates without overflow.
        backoff_factor: in (0, 1); factor after an overflow.
        growth_interval: after how many updates without overflow the scale grows, >= 1.
        enabled: False makes every method a pass-through.
        process_group: the ranks that must agree, instead of those of the parameters' meshes.
        backend: "auto" (Triton for CUDA, torch elsewhere), "triton" or "torch"; None: the environment variable
            SCALER_TRITON_BACKEND, else "auto".
        min_scale: the smallest scale, including the first; None: 2^-126.
        max_scale: the largest scale, including the first; None: fp32 max.
        hysteresis: >= 1; the overflow of this number and those after it back the scale off. The count restarts when the
            scale is due to grow.
        max_consecutive_skips: >= 0; if more updates in a row are skipped, `update` raises `SkipStreakError`, on all
            ranks at once and a few updates late. None: never.
        scale_policy: "probe" is torch's rule. "headroom" sets the scale by the largest gradient of the last good
            updates, 2 ** (15 - headroom_bits - floor(log2(largest))), below a cap that torch's rule moves.
        headroom_bits: how many powers of 2 lie between that gradient and fp16's largest number, in [0, 30].
        headroom_window: how many updates, in [1, 1024].
        measure: True: checks also find the largest gradient, and count zeros and fp16 subnormals, for `headroom`.
        allow_fp16_grads: True: `unscale_` takes fp16 gradients, as `ShardedGradScaler` always does, instead of raising
            torch's ValueError: unscaled values below fp16's smallest become 0.

    Raises: torch's AssertionErrors for its own limits; ValueError or TypeError naming another illegal argument.
    """

    process_group: Any = None
    _scale: Any  # fp32, one element; None before the first `scale`

    @functools.cached_property
    def _ours(self) -> Parts:
        # Made on first use, as some public subclasses have an `__init__` that calls only torch's.
        return Parts()

    def __init__(
        self,
        device: str | torch.device = "cuda",
        init_scale: float | str = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        process_group: torch.distributed.ProcessGroup | None = None,
        backend: str | None = None,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        max_consecutive_skips: int | None = None,
        scale_policy: str = "probe",
        headroom_bits: int = 2,
        headroom_window: int = 16,
        measure: bool = False,
        allow_fp16_grads: bool = False,
    ) -> None:
        backend = check_backend(backend)
        policy.check_bool(allow_fp16_grads, "allow_fp16_grads")
        policy.check_bool(measure, "measure")
        numbers_of_headroom = policy.check_headroom(scale_policy, headroom_bits, headroom_window)
        if init_scale == "measured":
            if numbers_of_headroom is None:
                raise ValueError("init_scale='measured' needs scale_policy='headroom'")
            init_scale = 1.0
        device = policy.device_type(device)
        if device == "cuda" and common.amp_definitely_not_available():  # type: ignore[no-untyped-call]
            if enabled:  # torch's own warning would name a line of this file
                text = "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling."
                warnings.warn(text, stacklevel=stacklevel())
            enabled = False
        numbers = {"growth_factor": growth_factor, "backoff_factor": backoff_factor, "growth_interval": growth_interval}
        theirs: dict[str, Any] = {**numbers, "init_scale": init_scale}
        if enabled:  # torch compares factors with 1 before it checks that they are numbers
            theirs |= {name: policy.as_float(numbers[name], name) for name in ("growth_factor", "backoff_factor")}
        super().__init__(device=device, enabled=enabled, **theirs)
        limits = NO_LIMITS
        if self._enabled:
            extremes = {"min_scale": min_scale, "max_scale": max_scale}
            limits = limits.changed(**extremes, hysteresis=hysteresis, max_consecutive_skips=max_consecutive_skips)
            init_scale = limits.clamp(policy.check_number("scale", init_scale, "init_scale"))
            numbers = {name: policy.check_number(name, value) for name, value in numbers.items()}
        self._ours.checks.requested, self._ours.updates.limits = backend, limits
        self._ours.checks.allow_fp16 |= allow_fp16_grads
        if measure or numbers_of_headroom is not None:
            measure_in(self._ours.checks)
        if numbers_of_headroom is not None:
            self._ours.headroom = self._ours.updates.rule = HeadroomRule(*numbers_of_headroom)
        attributes = vars(
            self
        )  # not through a subclass's `__setattr__`; torch leaves a disabled scaler's numbers unset
        attributes.update(process_group=process_group, _init_scale=init_scale, _init_growth_tracker=0)
        attributes.update({f"_{name}": value for name, value in numbers.items()})

    def scale(self, outputs: Outputs) -> Outputs:
        """Return the outputs times the scale; the outputs themselves on a disabled scaler.

        Args:
            outputs: a loss, or an iterable of them, of any shape, dtype and device; read.

        Returns: the products, in torch's dtypes; `ShardedGradScaler` keeps that of each output.

        Raises: RuntimeError if a scaler's first call is captured in a graph; torch's errors.
        """
        if not self._enabled:
            return outputs
        steps, scale = self._ours.steps, self._scale
        if steps.unfinished:
            steps.loss_scaled()
        if scale is not None:
            if scale.is_cuda and is_capturing():
                steps.replayed = True  # each replay writes gradients without a call of this method
            if isinstance(outputs, Tensor) and outputs.device == scale.device:
                return outputs * scale  # type: ignore[no-any-return]
        return super().scale(outputs)  # type: ignore[call-overload, no-any-return]

    def unscale_(self, optimizer: Any) -> None:
        """Divide the optimizer's gradients by the scale, and agree with the other ranks on whether one overflowed.

        Equivalent PyTorch: `for p in params: p.grad.mul_(1 / scale)`, after a check of each gradient for NaN and Inf.
        It makes one reduction of the flag where ranks must agree, and does not wait for the device.

        Args:
            optimizer: an object with `param_groups`; its gradients (bf16, fp32 or fp64; fp16 for ShardedGradScaler and
                with `allow_fp16_grads`; strided, sparse COO or DTensors) are written.

        Raises: torch's RuntimeError for a wrong order of calls and AssertionError before the first `scale`; the errors
            of `ops.unscale_` for an illegal gradient. If gradients were written or other ranks know of the failure,
            the step will be skipped; otherwise the call may be repeated.
        """
        if not self._enabled:
            return
        if self._scale is None or vars(self)["_growth_tracker"] is None:
            _require_scale(self, "unscale_", [optimizer])
        checks = self._ours.checks
        step = checks.steps.open(optimizer)
        if step.phase is FOREIGN:
            super().unscale_(optimizer)
            return
        step.require_unscalable()
        replaced = overrides(self)
        if replaced or not checks.repeat(step, optimizer, self._scale, self.process_group, divide=True):
            _check(self, step, optimizer, replaced, divide=True)
        checks.flag_is_read_later(step, optimizer)

    def clip_grad_norm_(
        self,
        optimizers: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        model: nn.Module | None = None,
        parameters: Iterable[Tensor] | Tensor | None = None,
    ) -> Tensor:
        """Unscale the optimizers' gradients and scale them down to a global norm of at most `max_norm`.

        Equivalent PyTorch, for one optimizer whose gradients are all on this rank:

            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

        The norm is that of the whole model: shards are summed over the ranks, replicas counted once. It moves 12 bytes
        per fp32 element instead of 20, and makes one reduction (one per dimension for a mesh that is a part of the
        world), after one for each Partial gradient, which all ranks of its mesh must have. On an overflow the gradients
        are unscaled but not clipped, and the steps of all these optimizers are skipped. All ranks that must agree call
        it with the same options, or none does, as `unscale_` makes another reduction.

        Args:
            optimizers: one, or several under one norm; their gradients are written, as by `unscale_`.
            max_norm: >= 0, the largest norm of the unscaled gradients.
            norm_type: 2.0; inf or another p > 0, which takes a reduction for each optimizer and one more.
            error_if_nonfinite: raise torch's RuntimeError on every rank if the norm is NaN or infinite; waits for it.
            model: the module with the FSDP1 modules, if the parameters are theirs; read.
            parameters: clip only these tensors, by their norm; their gradients are written. All gradients of the
                optimizers are unscaled and checked. The call may be repeated with other parameters, and warns if the
                optimizers hold none of them.

        Returns: the norm, fp32, shape (), on the scale's device, equal on all ranks; NaN if another rank failed. A
            disabled scaler only clips gradients that are not sharded, and returns torch's norm in torch's dtype.

        Raises: as `unscale_`; ValueError or TypeError naming an illegal argument.
        """
        request = clip.checked_request(optimizers, max_norm, norm_type, error_if_nonfinite, model, parameters)
        return clip_as_requested(self, request)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
        """Call `optimizer.step(*args, **kwargs)` unless a gradient overflowed on any rank that must agree.

        Gradients are unscaled first if `unscale_` was not called. The call waits for the flag on the host, unless the
        optimizer reads it on the device (`fused=True`) and skips by itself. At 50 skips of an optimizer in a row it
        warns, once a streak; a fused one looks every 64th step, without a wait, at what the updates have counted.

        Args:
            optimizer: an optimizer, or a wrapper around one; its gradients are written if they are still scaled.
            args, kwargs: for `optimizer.step`; no `closure=`.

        Returns: what `optimizer.step` returns, None when skipped.

        Raises: torch's RuntimeError for a wrong order of calls and for a closure, AssertionError before the first
            `scale` or if there was no gradient to check; RuntimeError if another rank failed to check its gradients;
            whatever `optimizer.step` raises. Such a step is spent: called again, it skips, until the next `scale`.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]
        checks = self._ours.checks
        steps = checks.steps
        if args or kwargs:
            args = closures.watched(checks, args, kwargs)
        if self._scale is None or vars(self)["_growth_tracker"] is None:
            _require_scale(self, "step", [optimizer])
        step, updates = steps.open(optimizer), steps.updates
        way = fused.way_of(step, optimizer) if getattr(optimizer, "_step_supports_amp_scaling", False) else ""
        if step.phase is not READY:
            _take_up(self, step, way)
        if step.phase is FOREIGN:
            return super().step(optimizer, *args, **kwargs)
        replaced = overrides(self)
        if step.phase is READY:
            _check_for_step(self, step, optimizer, replaced, way)
        try:
            if way:
                result: float | None = _step_fused(self, step, optimizer, way, args, kwargs)
            else:
                result = _step_plain(self, step, optimizer, replaced, args, kwargs)
        except BaseException:  # whatever it has done, the step is spent
            step.outcome = None
            failures.spend(checks, step, self._scale.device, agreed=True)
            raise
        step.steps_taken += 1
        if steps.updates == updates:  # else the optimizer has called `update`
            step.finish()
        return result

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> float | None:
        step = optimizer_state
        if type(step) is not OptimizerStep:  # of a caller's own making
            return super()._maybe_opt_step(optimizer, step, *args, **kwargs)
        step.outcome = step.is_bad(self._ours.steps.exposed)  # hooks of the optimizer may ask for it
        if step.outcome:
            self._ours.checks.tell_skipped(step, self._scale)
            return None
        return optimizer.step(*args, **kwargs)  # type: ignore[no-any-return]

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Back the scale off if any optimizer's flag was set; let it grow after `growth_interval` updates without one.

        Equivalent PyTorch: `torch._amp_update_scale_` with the largest flag, except for >= and the limits.

        Args:
            new_scale: sets the scale instead, and leaves the growth tracker: a number in [min_scale, max_scale], or a
                one-element tensor of any dtype on a device of the scaler's type, which is read with one host wait.

        Raises: torch's AssertionErrors if nothing was checked since the last update or the tensor is of the wrong
            kind; ValueError or TypeError naming an illegal `new_scale`; nothing has changed then. `SkipStreakError`
            after the update if, four updates ago, more than `max_consecutive_skips` in a row had been skipped: on all
            ranks at once, and at each update until the streak ends or the scale is set, but not while a graph is
            captured or replayed.
        """
        if not self._enabled:
            return
        ours, scale, tracker = self._ours, self._scale, vars(self)["_growth_tracker"]
        if scale is None or tracker is None:
            self._check_scale_growth_tracker("update")  # raises torch's AssertionError
        checked = []
        for state in [*ours.steps.values()]:  # a garbage collection may free an optimizer meanwhile
            if state["found_inf_per_device"]:
                checked.append(state)
        captured = scale.is_cuda and is_capturing()
        carried = ours.checks.carried_over(captured) if ours.steps.unfinished else []
        if new_scale is not None:
            _set_scale(self, new_scale, checked)
        elif not checked:
            raise AssertionError("No inf checks were recorded prior to update.")
        else:
            numbers = self._growth_factor, self._backoff_factor, self._growth_interval
            ours.updates.by_flags(scale, tracker, checked, numbers, captured=captured, keep=bool(carried))
        ours.steps.close(carried)
        if ours.updates.limits.max_consecutive_skips is not None and not captured and new_scale is None:
            ours.streaks.raise_if_too_long(scale)

    def stats(self, *, wait: bool = True) -> ScalerStats:
        """Return what the updates have done so far, including replayed ones; all 0 on a disabled scaler.

        Args:
            wait: True waits for the device once. False never waits on CUDA: it returns the latest values on the host
                and starts the next copy, so that a call after every update is one or two updates behind.
        """
        counters = self._ours.counters
        return ScalerStats.of(counters.read() if wait else counters.newest())

    def headroom(self, *, wait: bool = True) -> Headroom:
        """Return how far the gradients of the last checks are from overflow, and how many are lost below fp16's range.

        Args:
            wait: True waits for the device once. False never waits on CUDA, as in `stats`.

        Returns: over all optimizers, each one's last check, and over the ranks that agreed; `str` of it is a sentence.

        Raises: RuntimeError if the scaler was not made with `measure=True`.
        """
        ours = self._ours
        if not is_measuring(ours.checks):
            raise RuntimeError("headroom() needs measure=True, an argument of the scaler")
        flags = [step.flag for step in ours.steps.all()]
        return read_headroom([flag for flag in flags if flag is not None], wait)

    def metrics(self, prefix: str = "scaler/") -> dict[str, float]:
        """Return numbers for a logger: the scale, and what the updates have done; empty on a disabled scaler.

        Never waits on CUDA: as `stats(wait=False)`, it is one or two updates behind if called after each of them.

        Args:
            prefix: of each name.

        Returns: by name `scale`, `updates`, `skipped`, `skip_share` (skipped / updates), `skipped_in_a_row` (those up
            to now, 0 after a good update), `spikes`, `growths` and `backoffs`, as floats; with `measure=True` also
            `largest`, `bits`, `zeros` and `subnormal` of `headroom`; infinite numbers are left out.
        """
        if not self._enabled:
            return {}
        ours = self._ours
        stats = ScalerStats.of(ours.counters.newest())
        known = {"skip_share": stats.skipped / max(1, stats.updates), "skipped_in_a_row": stats.consecutive_skips}
        known |= asdict(stats) | ours.newest(self._get_scale_async(), self._init_scale)
        names = ours.logged_names(["updates", "skipped", "skip_share", "skipped_in_a_row", "spikes"], known)
        if is_measuring(ours.checks):
            known |= asdict(self.headroom(wait=False))
            names += ["largest", "bits", "zeros", "subnormal"]
        return {f"{prefix}{name}": float(known[name]) for name in names if math.isfinite(known[name])}

    def attempts(self, optimizer: Any, *, max_attempts: int = 8) -> Iterator[int]:
        """Repeat a batch whose step was skipped, at the lower scale, instead of losing it.

            for attempt in scaler.attempts(optimizer):
                optimizer.zero_grad()
                scaler.scale(loss_of(batch)).backward()
                scaler.step(optimizer)
                scaler.update()

        All ranks that agree on a step repeat it, or none does. It waits for the flag of each step, including a fused
        one's.

        Args:
            optimizer: the one that the body steps; read.
            max_attempts: >= 1; after so many skips the loop ends, and the batch is lost.

        Yields: the number of the attempt, from 1. The loop ends, too, after a body that did not step, or whose check
            failed on a rank.

        Raises: ValueError or TypeError naming an illegal `max_attempts`.
        """
        most = policy.check_number("max_attempts", max_attempts)

        def repeat() -> Iterator[int]:
            for attempt in range(1, most + 1):
                before = self._ours.steps.open(optimizer).steps_taken
                yield attempt
                step = self._ours.steps.open(optimizer)  # the body may have assigned another registry
                if step.steps_taken == before:
                    return
                # Other ranks, which were told of a FAILED check, have raised.
                if step.outcome is None or step.outcome is FAILED or not self.was_skipped(optimizer):
                    return

        return repeat()

    def was_skipped(self, optimizer: Any) -> bool:
        """Return whether the last `step(optimizer)` was skipped, until its next `unscale_`, clip or step.

        It may be called before and after `update()`, and while the optimizer steps, as its hooks do: then it is about
        that step. It waits for the device if the optimizer is fused. For a step in
        a graph, the last replay counts. A disabled scaler returns False.

        Args:
            optimizer: the one that was stepped, or a wrapper around it; read.

        Raises: ValueError if it was never stepped, or was unscaled since; for a fused one RuntimeError, as `step` does
            for others, if another rank failed to check its gradients or the ranks' scales differ.
        """
        if not self._enabled:
            return False
        step = self._ours.steps.last(optimizer)
        outcome = None if step is None else step.outcome
        if outcome is None:
            name = type(optimizer).__name__
            raise ValueError(f"was_skipped: this {name} was not stepped yet, or was unscaled again since its last step")
        return outcome.last() if isinstance(outcome, Flag) else bool(outcome)

    def overflow_report(self, model: Model = None, gather: bool = False) -> OverflowReport:
        """Return which gradients caused the last skip; `zero_grad()` and later steps without overflow do not change it.

        A step without overflow launches nothing for it; the call waits for the device. Once an optimizer's parameters,
        or the shapes or dtypes of its gradients, have changed, its earlier steps are unknown.

        Args:
            model: names the parameters: a module, or what its `named_parameters()` returns; only names are read. None:
                they are numbered.
            gather: report on all ranks, not only on this one. Each of them must call it: when all have come, an
                all-gather follows (two for more than a hundred bad gradients on a rank).

        Returns: a report whose `str` is a table.

        Raises: TypeError naming an illegal `model`: with `gather` on this rank only, and the others' reports show it.
            With `gather`, ValueError naming `process_group` if pickling lost it or this rank is not in it, and
            TimeoutError if not all ranks come within five minutes, or half of `init_process_group`'s timeout if
            that is shorter. Training can go on then. A group that torch does not know begins its all-gather at once.
        """
        scale = self._get_scale_async()
        home = scale.device if scale is not None else torch.device(self._device if self._enabled else "cpu")
        ours = self._ours
        return report.overflow_report(ours.steps, ours.counters, ours.models, model, self.process_group, home, gather)

    limits = _Limits()

    def set_limits(self, **changes: Any) -> None:
        """Change some of min_scale, max_scale, hysteresis and max_consecutive_skips, from the next update on.

        Args:
            changes: by name, as the constructor takes them; the others stay.

        Raises: ValueError or TypeError naming an illegal one and its value; nothing has changed then.
        """
        updates = self._ours.updates
        updates.limits = updates.limits.changed(**changes)
        if "max_consecutive_skips" in changes:
            updates.lagging = LaggingCounters()
        _write_numbers(self)

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows: finite, >= 1, else ValueError or TypeError; 1 keeps the scale."""
        self._growth_factor = policy.check_number("growth_factor", new_factor, "new_factor")
        _write_numbers(self)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor that backs the scale off: in (0, 1], else ValueError or TypeError; 1 keeps the scale."""
        self._backoff_factor = policy.check_number("backoff_factor", new_factor, "new_factor")
        _write_numbers(self)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set after how many updates without overflow the scale grows: >= 1, else ValueError or TypeError."""
        self._growth_interval = policy.check_number("growth_interval", new_interval, "new_interval")
        _write_numbers(self)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five fields; `{}` on a disabled scaler.

        If any of `min_scale`, `max_scale`, `hysteresis` and `max_consecutive_skips` is not its default, they and the
        counters are under one more key, `scaler_triton`, which torch's class ignores. With `scale_policy="headroom"`
        they always are, with its exponents and cap, and so are a `StepGuard`'s, with its norms. It waits for the GPU.
        """
        if not self._enabled:
            return {}
        state = super().state_dict()
        ours = self._ours
        if ours.updates.limits != NO_LIMITS or ours.headroom is not None:
            state[KEY] = policy.to_checkpoint(ours.updates.limits, ours.counters.read())
        if ours.headroom is not None:
            exponents, cap = ours.headroom.remembered()
            state[KEY][HEADROOM] = {"exponents": exponents, "cap": cap}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class or of torch's returned; a disabled scaler loads nothing.

        Without the key `scaler_triton`, or with an empty dict there, the limits stay and the counters become 0. Every
        optimizer's step begins anew: gradients count as scaled, whatever was unscaled or stepped before.

        Args:
            state_dict: the five fields, and perhaps that key; read.

        Raises: torch's RuntimeError for an empty dict and KeyError for a missing field; ValueError or TypeError
            naming an illegal field and its value; TypeError if it is no dict. The scaler is unchanged then.
        """
        if not self._enabled:
            return
        ours = self._ours
        limits, counters = ours.updates.limits, policy.no_counters()
        remembered: tuple[list[int], float] = [], MAX_SCALE
        if policy.check_dict(state_dict, "state_dict"):  # torch raises for an empty one
            fields = policy.check_dict(state_dict.get(KEY, {}), KEY)
            if fields and WINDOWS not in fields:  # no guard's
                limits, counters = policy.from_checkpoint(fields)
                remembered = policy.check_remembered(fields.get(HEADROOM, {}))
            state_dict = policy.check_state_dict(state_dict)
        put_off = ours.updates.put_off
        is_over = put_off.is_over
        super().load_state_dict(state_dict)
        put_off.is_over = is_over  # torch's method has got the tracker, but keeps it no longer
        ours.updates.limits, ours.updates.lagging = limits, LaggingCounters()
        ours.counters.set(counters)
        if ours.headroom is not None:
            ours.headroom.restore(*remembered)
        ours.steps.reset()  # what was checked or stepped before does not count in the loaded run
        ours.streaks.forget(ours.steps.all())
        for step in ours.steps.all():
            if step.plan is not None:
                marks_of(step.plan).forget()  # they refer to another run's skips
        _write_numbers(self)

    # The names below are private to torch's class; frameworks and subclasses call, replace or write them.

    @property
    def _per_optimizer_states(self) -> Steps:
        steps = self._ours.steps
        steps.exposed = steps.unfinished = True  # other code may write stages
        return steps

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: Mapping[Any, Any]) -> None:
        self._ours.steps = self._ours.checks.steps = self._ours.steps.replaced_by(states)

    # Our own methods get the tracker by `vars`: for whoever reads or writes this, updates are no longer put off.
    @property
    def _growth_tracker(self) -> Any:  # int32, one element; None before the first `scale`
        if "_growth_tracker" not in vars(self):  # as on torch's disabled scaler
            raise AttributeError(f"{type(self).__name__!r} object has no attribute '_growth_tracker'")
        tracker = vars(self)["_growth_tracker"]
        self._ours.updates.settle(for_good=tracker is not None)  # other code has it from now on
        return tracker

    @_growth_tracker.setter
    def _growth_tracker(self, tracker: Any) -> None:
        self._ours.updates.settle(for_good=tracker is not None)
        vars(self)["_growth_tracker"] = tracker

    def _get_growth_tracker(self) -> int:
        if not self._enabled or vars(self)["_growth_tracker"] is None:
            return super()._get_growth_tracker()
        self._ours.updates.settle()
        return int(vars(self)["_growth_tracker"].item())

    def _get_scale_async(self) -> Any:  # a tensor, None before the first `scale`
        return getattr(self, "_scale", None)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        """Create scale and tracker on `dev` (a device or its name) unless they are there already."""
        device = torch.device(dev)
        # In torch.func's transforms they would have no address; updates outside inference mode must write them.
        with torch.inference_mode(False), outside_transforms():
            if getattr(self, "_scale", None) is None:  # a disabled scaler has no such attribute
                refuse_capture(device, "a scaler's first scale")  # a replay would set it again
                self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=device)
            if vars(self).get("_growth_tracker") is None:
                tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=device)
                vars(self)["_growth_tracker"] = tracker
                if type(self)._growth_tracker is not GradScaler._growth_tracker:  # a subclass keeps it in its own way
                    self._growth_tracker = tracker
                    self._ours.updates.settle(for_good=True)

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True) -> Flags:
        """Unscale on this rank only; return a flag for each device with gradients.

        That on `found_inf`'s device starts as `found_inf`. Without gradients a `ShardedGradScaler` returns that one, as
        callers reduce it over the ranks.
        """
        checks = self._ours.checks
        # A call from outside a step, perhaps for a few parameters, must not begin one.
        step = checks.steps.last(optimizer) or OptimizerStep()
        plan, parameters = checks.plan(step, optimizer, found_inf.device)
        flag = make_flag(found_inf.new_zeros(STATUS))
        flag.found_inf.copy_(found_inf.reshape(()))
        try:
            batches = plan.collect(parameters, allow_fp16=allow_fp16)
        except BaseException:
            if (checked := step.notes.get("overridden")) is not None:
                checked.written = False
            raise
        for batch in batches:
            device = batch.layout.device
            if batch.is_partial:
                check_batch(batch, flag.found_inf_on(device))
            else:
                unscale_batch_(batch, inv_scale, flag.found_inf_on(device), inverse=True)
        if flag.gather():
            checks.tell_found(step, batches)
        here = (
            {flag.device: flag.found_inf} if flag.has_gradients or (checks.needs_group and not flag.elsewhere) else {}
        )
        return here | flag.elsewhere

    def _check_inf_per_device(self, optimizer: Any) -> Any:
        """Check the optimizer's gradients without writing them, and return the agreed flag on every device.

        If other ranks must agree, they are checked once per step; else by each call until a step or a joint clip.
        """
        step = self._per_optimizer_states.open(optimizer)
        if step.phase is FOREIGN:
            return super()._check_inf_per_device(optimizer)
        if step.phase is CARRIED:
            step["found_inf_per_device"] = step.carried
            return step.carried
        phase, flag, flags = step.phase, step.flag, step["found_inf_per_device"]
        try:
            if self._scale is None or vars(self)["_growth_tracker"] is None:
                _require_scale(self, "_check_inf_per_device", [optimizer])
            is_final = phase in (STEPPED, FAILED) or (phase is UNSCALED and (flag is None or flag.is_final))
            if not (flags and (is_final or _have_peers(self, step, optimizer))):
                measured = None if flag is None or flag.extra is None or phase is READY else flag.extra.clone()
                _check(self, step, optimizer, overrides(self), divide=False)
                if measured is not None:  # of the gradients as they were scaled
                    step.flag.extra.copy_(measured)  # type: ignore[union-attr]
        except BaseException:
            if step.phase is FAILED and phase is not UNSCALED:  # of an UNSCALED one, `step` will not check
                step.undo_failed_look(phase)
            raise
        return step["found_inf_per_device"]

    def _found_inf_per_device(self, optimizer: Any) -> Any:
        """Return the optimizer's flags in this step by device, none before a check."""
        return self._per_optimizer_states.open(optimizer)["found_inf_per_device"]

    def __repr__(self) -> str:
        name, device = type(self).__name__, getattr(self, "_device", None)
        if device is None:
            return f"{name}(no __init__ has run)"
        if not self._enabled:
            return f"{name}({device}, disabled)"
        return f"{name}({describe(self._ours, device, self._get_scale_async(), self._init_scale)})"

    def __getstate__(self) -> dict[str, Any]:
        steps = self._ours.steps.all() if self._enabled else []
        if any(step.phase not in (READY, CARRIED) or step["found_inf_per_device"] for step in steps):
            raise AssertionError(
                "A GradScaler instance may only be pickled at the beginning "
                "of an iteration, or at the end after scaler.update()."
            )
        ours, state = self._ours, vars(self).copy()
        del state["_ours"]
        if self._enabled:
            state["_init_scale"], state["_init_growth_tracker"] = self.get_scale(), self._get_growth_tracker()
            state["_scale"] = state["_growth_tracker"] = None
        # Plain numbers: otherwise the pickle would name the modules of our classes.
        checks, limits = ours.checks, tuple(ours.updates.limits)
        numbers = {"limits": limits, "backend": checks.requested, "counters": ours.counters.read()}
        flags = {"allow_fp16_grads": checks.allow_fp16, "measure": is_measuring(checks)}
        headroom = ours.headroom and (ours.headroom.bits, ours.headroom.window, *ours.headroom.remembered())
        state[_COUNTED] = {**numbers, **flags, "headroom": headroom}
        return {**state, "process_group": None}

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.process_group is not None and self.process_group is not ranks.default_group():
            raise TypeError(
                "a scaler with a process_group of its own cannot be pickled, as the group cannot: save "
                "scaler.state_dict(), and load it into a scaler that was made with the group"
            )
        return super().__reduce_ex__(protocol)

    def __setstate__(self, state: dict[str, Any]) -> None:
        counted, ours = state.get(_COUNTED), self._ours
        if counted is not None:
            ours.counters.set(counted["counters"])
            ours.updates.limits, ours.checks.requested = Limits(*counted["limits"]), counted["backend"]
            ours.checks.allow_fp16 |= counted.get("allow_fp16_grads", False)
            if counted.get("measure", False):
                measure_in(ours.checks)
            if counted.get("headroom") is not None:
                bits, window, *remembered = counted["headroom"]
                ours.headroom = ours.updates.rule = HeadroomRule(bits, window)
                ours.headroom.restore(*remembered)
        plain = {name: value for name, value in state.items() if name not in (_COUNTED, "_per_optimizer_states")}
        vars(self).update(plain)

    def __copy__(self) -> Self:
        clone = type(self).__new__(type(self))
        clone.__setstate__(self.__getstate__())
        vars(clone)["process_group"] = self.process_group  # a group is shared, it cannot be copied
        return clone

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        clone = memo[id(self)] = type(self).__new__(type(self))  # before the copy: its attributes may refer to it
        clone.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        vars(clone)["process_group"] = self.process_group
        return clone


def clip_as_requested(scaler: GradScaler, request: clip.Request) -> Tensor:
    """Clip by one reduction with the check where that is possible; it is then so on all ranks."""
    ours, group = scaler._ours, scaler.process_group
    if not scaler._enabled:
        return clip.clip_unscaled_(request, group, ours.checks.sharded)
    # Gradients are squared before they are divided by the scale, which in fp32 would overflow too early.
    squares_fit = not ours.scales or wide_dtype(torch.device(scaler._device)) is torch.float64
    is_ours = overrides(scaler).isdisjoint(("unscale_", "_unscale_grads_"))
    kind: Callable[..., clip.Clip] = functools.partial(clip.ClipAfterUnscaling, scaler.unscale_)
    if request.chosen is None and request.norm_type == 2.0 and is_ours and squares_fit:
        kind = clip.ClipAtOnce
    if scaler._scale is None or vars(scaler)["_growth_tracker"] is None:
        several = request.optimizers
        _require_scale(scaler, "clip_grad_norm_", several, lambda: kind(ours, scaler._scale, group, request).fail())
    return kind(ours, scaler._scale, group, request).run()


def _require_scale(
    scaler: GradScaler, name: str, optimizers: Sequence[Any], tell_others: Callable[[], None] | None = None
) -> None:
    """Raise torch's error for a method that was called before `scale`, and tell the other ranks; make a guard's."""
    ours, group = scaler._ours, scaler.process_group
    try:
        if ours.scales:
            scaler._check_scale_growth_tracker(name)
        _make_scale(scaler, optimizers)
    except Exception:
        with suppress(Exception):  # the first error is more important
            if failures.ranks_that_wait(ours.checks, optimizers, group) is not None:
                _make_scale(scaler, optimizers)  # the others have one, and what comes later must be the same
                (tell_others or functools.partial(_fail_early, scaler, optimizers[0]))()
        raise


def _make_scale(scaler: GradScaler, optimizers: Sequence[Any]) -> None:
    """Make the scale where that of these optimizers belongs."""
    devices = [each.device for each in parameters_of(*optimizers) if isinstance(each, Tensor)]
    home = next((each for each in devices if each.type == scaler._device), torch.device(scaler._device))
    scaler._lazy_init_scale_growth_tracker(home)


def _fail_early(scaler: GradScaler, optimizer: Any) -> None:
    """Tell the other ranks of an error that came before the check."""
    checks, scale = scaler._ours.checks, scaler._scale
    step = checks.steps.open(optimizer)
    checks.looks_for(step, scale, divide=True)  # which may prepare something, on every rank
    failures.fail(checks, step, optimizer, scale.device, scaler.process_group)


def _take_up(scaler: GradScaler, step: OptimizerStep, way: str) -> None:
    """Go on with a step whose gradients were checked before; torch's error if it was taken."""
    if not way:
        _refuse_capture(scaler)
    step.require_steppable()
    if step.phase is CARRIED:
        scaler._ours.checks.resume(step, scaler._scale)


def _check(scaler: GradScaler, step: OptimizerStep, optimizer: Any, replaced: frozenset[str], *, divide: bool) -> None:
    """Check the gradients; a subclass's own pass over them is made in place of ours, unless a norm is judged."""
    checks, override = scaler._ours.checks, None
    if "_unscale_grads_" in replaced and not checks.sums_partial:
        override = _override(scaler, step, optimizer, divide=divide)
    checks.check(step, optimizer, scaler._scale, scaler.process_group, divide=divide, override=override)


def _override(scaler: GradScaler, step: OptimizerStep, optimizer: Any, *, divide: bool) -> Callable[[Flag], Flags]:
    def run(flag: Flag) -> Flags:
        factor = inverse(scaler._scale).clone() if divide else torch.ones_like(flag.found_inf)
        allow_fp16 = scaler._ours.checks.allow_fp16 or not divide
        scaler._ours.steps.exposed = True  # it gets the flag, and may keep it
        # It may write before it fails; ours, which it may call, tells the flag if it has refused before a write.
        flag.written, step.notes["overridden"] = divide, flag
        try:
            flags: Flags = scaler._unscale_grads_(optimizer, factor, flag.found_inf, allow_fp16)
        finally:
            step.notes.pop("overridden", None)
        return flags

    return run


def _refuse_capture(scaler: GradScaler) -> None:
    if is_captured(scaler._scale):
        raise RuntimeError("a step that reads the flag on the host cannot be captured in a graph: use fused=True")


def _check_for_step(
    scaler: GradScaler, step: OptimizerStep, optimizer: Any, replaced: frozenset[str], way: str
) -> None:
    """Check the gradients of a READY step, as last time if that will do."""
    checks, divide = scaler._ours.checks, not (way and scaler._ours.scales)
    if not replaced and checks.repeat(step, optimizer, scaler._scale, scaler.process_group, divide=divide):
        return
    if way:
        _check_for_fused(scaler, step, optimizer, replaced, way)
    else:
        _check_for_plain(scaler, step, optimizer, replaced)


def _check_for_plain(scaler: GradScaler, step: OptimizerStep, optimizer: Any, replaced: frozenset[str]) -> None:
    if scaler._scale.is_cuda:
        _refuse_capture(scaler)
    if "unscale_" in replaced:
        scaler.unscale_(optimizer)
    else:
        _check(scaler, step, optimizer, replaced, divide=True)


def _check_for_fused(
    scaler: GradScaler, step: OptimizerStep, optimizer: Any, replaced: frozenset[str], way: str
) -> None:
    """Check the gradients of a step whose optimizer will divide them; a guard's are unscaled: it need not."""
    if way == "attributes" and "_check_inf_per_device" in replaced:
        scaler._check_inf_per_device(optimizer)
    elif way == "attributes" or hasattr(optimizer, "param_groups"):  # older containers lack them
        _check(scaler, step, optimizer, replaced, divide=not scaler._ours.scales)


def _step_plain(
    scaler: GradScaler, step: OptimizerStep, optimizer: Any, replaced: frozenset[str], args: Any, kwargs: Any
) -> Any:
    """Step unless the flag, which this waits for, is set."""
    if not step["found_inf_per_device"]:
        error = AssertionError("No inf checks were recorded for this optimizer.")
        scaler._ours.checks.explain(error, optimizer)
        raise error
    if step.phase is FAILED:
        step.outcome = FAILED
        return None
    if "_maybe_opt_step" in replaced:
        return _step_by_override(scaler, step, optimizer, args, kwargs)
    return scaler._maybe_opt_step(optimizer, step, *args, **kwargs)


def _step_by_override(scaler: GradScaler, step: OptimizerStep, optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Step by a subclass's `_maybe_opt_step`, which may write the flags, and need not call ours."""
    scaler._ours.steps.exposed = True
    result = scaler._maybe_opt_step(optimizer, step, *args, **kwargs)
    if step.outcome is None:
        step.outcome = any_flag(step["found_inf_per_device"].values(), scaler._scale.device)
    return result


def _step_fused(scaler: GradScaler, step: OptimizerStep, optimizer: Any, way: str, args: Any, kwargs: Any) -> Any:
    """Step an optimizer that divides and skips by itself; nothing waits."""
    if step.phase is FAILED:
        fused.remove_scale(optimizer, step.owner())
        step.outcome = FAILED
        return None
    if step.steps_taken & LOOKS == LOOKS:
        scaler._ours.streaks.look(scaler._scale)
    if way == "argument":
        return fused.step_by_argument(scaler, step, optimizer, args, kwargs)
    ours, scale = scaler._ours, scaler._get_scale_async()
    updater = ours.updates.updater
    stream = stream_of(scale, ours.checks.requested) if updater is None else updater.stream
    return fused.step_fused(step, optimizer, scale, ours.steps.exposed, stream, args, kwargs)


def _have_peers(scaler: GradScaler, step: OptimizerStep, optimizer: Any) -> bool:
    """Return whether other ranks must agree on an optimizer."""
    checks = scaler._ours.checks
    plan, parameters = checks.plan(step, optimizer, scaler._scale.device)
    return checks.peers_of(plan, parameters, scaler.process_group) is not None


def _numbers(scaler: GradScaler) -> tuple[float, float, int]:
    return scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval


def _write_numbers(scaler: GradScaler) -> None:
    """Write the rule's numbers to the memory that graphs read at each replay."""
    if scaler._ours.updates.policies:  # none on a disabled scaler, which may lack the numbers
        scaler._ours.updates.write_numbers(_numbers(scaler))


def _set_scale(scaler: GradScaler, new_scale: Any, checked: Any) -> None:
    number = scaler._ours.updates.by_value(scaler._scale, new_scale, checked, scaler._device)
    headroom = scaler._ours.headroom
    if headroom is not None:  # the overflow that lowered the cap may have had another cause than the scale
        headroom.on(scaler._scale.device)[CAP].clamp_(min=number)


own(GradScaler)
skip_tracing(GradScaler)
