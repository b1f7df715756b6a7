"""Hugging Face Accelerate, and the Trainer on top of it: our scaler or guard, fused clipping, `step_was_skipped`."""

from __future__ import annotations

import functools
import sys
from contextlib import suppress
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer as _Original
from accelerate.utils import DistributedType
from torch import Tensor, nn

import scaler_triton
from scaler_triton import GradScaler, StepGuard
from scaler_triton.core.step import parameters_of
from scaler_triton.integrations import updates, versions
from scaler_triton.integrations.unscaled import Unscaled, clip_again, unscale_once

_ELSEWHERE = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
_HINTS = {  # for an accelerator of that mixed_precision
    "bf16": ": bf16 needs no scale; guard its steps by use_step_guard",
    "fp16": ": fp16 needs a scale, from use_scaler_triton",
}
_STATE_MAKER = "torch.distributed.checkpoint.state_dict"


def use_scaler_triton(accelerator: Any, **settings: Any) -> GradScaler:
    """Give an `Accelerator`, or a Trainer, a scaler of ours, before `prepare`.

        accelerator = Accelerator(mixed_precision="fp16")
        use_scaler_triton(accelerator)

    The scaler is a `ShardedGradScaler` under FSDP1, else a `GradScaler`, with the numbers of `GradScalerKwargs`. Then,
    of this accelerator only:

        clip_grad_norm_(parameters, 1.0)  # scaler.clip_grad_norm_ of the optimizers that hold them
        optimizer.step_was_skipped        # scaler.was_skipped(optimizer), fused or not

    The scale is updated once for each loss, however many optimizers are stepped on it, and saving or loading a
    checkpoint does not step the scaler. A subclass of `Accelerator` keeps a `clip_grad_norm_` of its own. On a CPU,
    where Accelerate ignores `mixed_precision="fp16"`, this also turns autocast on. May be called again: without
    `settings` the scaler stays.

    Args:
        accelerator: with `mixed_precision="fp16"`, nothing prepared yet; changed. A Trainer's is taken from it, before
            `train()`.
        settings: more arguments for the scaler, such as `min_scale=1.0`; they override `GradScalerKwargs`.

    Returns: the scaler, which is `accelerator.scaler` from now on.

    Raises: TypeError or ValueError naming what is wrong with `accelerator`; the scaler's own errors for `settings`.
        The accelerator is unchanged then.
    """
    accelerator = getattr(accelerator, "accelerator", accelerator)
    _check(accelerator, "fp16")
    scaler = accelerator.scaler
    if settings or not isinstance(scaler, GradScaler):
        _check_unprepared(accelerator)
        scaler = _new_scaler(accelerator, settings)
    accelerator.native_amp = True
    _install(accelerator, scaler)
    return scaler


def use_step_guard(accelerator: Any, **arguments: Any) -> StepGuard:
    """Give an `Accelerator`, or a Trainer, a guard of its steps in bf16 or fp32, where Accelerate has no scaler.

        accelerator = Accelerator(mixed_precision="bf16")
        guard = use_step_guard(accelerator, spike_sigma=6.0)

    What was prepared before is guarded, too. Clipping, `step_was_skipped`, schedulers and checkpoints work as after
    `use_scaler_triton`; to load a checkpoint of a run without a guard, call this after `load_state`. Another call gives
    it another guard.

    Args:
        accelerator: with `mixed_precision` "bf16" or "no"; changed. A Trainer's is taken from it, before `train()`.
        arguments: of `StepGuard`, such as `spike_sigma=6.0`.

    Returns: the guard, which is `accelerator.scaler` from now on.

    Raises: TypeError or ValueError naming what is wrong with `accelerator`; the guard's own errors for `arguments`. The
        accelerator is unchanged then.
    """
    accelerator = getattr(accelerator, "accelerator", accelerator)
    _check(accelerator, "bf16", "no")
    guard = StepGuard(**{"device": accelerator.device.type, **arguments})
    _install(accelerator, guard)
    return guard


def _install(accelerator: Any, scaler: GradScaler) -> None:
    """Make a scaler that of an accelerator, and of what it has prepared already."""
    accelerator.scaler = scaler
    for optimizer in accelerator._optimizers:
        optimizer.__class__ = _AcceleratedOptimizer
        optimizer.__setstate__({"scaler": scaler})  # which also makes what a wrapper without a scaler lacks
    # Partials of functions that can be found by name, so that the accelerator can still be pickled.
    accelerator.prepare_optimizer = functools.partial(_prepare_optimizer, accelerator)
    accelerator.backward = functools.partial(_backward, accelerator)
    accelerator.unscale_gradients = functools.partial(_unscale_gradients, accelerator)
    if type(accelerator).clip_grad_norm_ is accelerate.Accelerator.clip_grad_norm_:
        accelerator.clip_grad_norm_ = functools.partial(_clip_grad_norm, accelerator)


class _AcceleratedOptimizer(_Original):  # type: ignore[misc]
    """Accelerate's optimizer wrapper with a correct `step_was_skipped`; checkpointing's steps bypass the scaler."""

    _answer: bool | Tensor | None = False  # of `step_was_skipped`; None: nobody has asked since the last step

    def step(self, closure: Any = None) -> None:
        """Step through the scaler; directly if `torch.distributed.checkpoint` calls, to initialise the state.

        That step, of zero gradients at a learning rate of zero, comes when FSDP2's checkpoints are saved or loaded.
        """
        if not self.gradient_state.sync_gradients:
            return
        if not getattr(self.optimizer, "state", None) and _is_called_from(_STATE_MAKER):
            self.optimizer.step()
            return
        updates.step(self.scaler, self.optimizer, closure)
        self._answer = None

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped; waits for the device if the optimizer is fused."""
        with suppress(ValueError):  # not stepped yet, or unscaled since
            self._answer = self.scaler.was_skipped(self.optimizer)
        return bool(self._answer)

    def keep_answer(self) -> None:
        """Keep what unscaling makes the scaler forget, without a wait: on the device if it is known only there."""
        if self._answer is None:
            self._answer = self.scaler._ours.steps.outcome(self.optimizer)


def _check(accelerator: Any, *precisions: str) -> None:
    """Raise if `accelerator` cannot be changed; warn if its version is none that was tested."""
    if not isinstance(accelerator, accelerate.Accelerator):
        got = type(accelerator).__name__
        raise TypeError(f"accelerator must be an accelerate.Accelerator, or a Trainer that has one, got {got}")
    if accelerator.distributed_type in _ELSEWHERE:
        kind = accelerator.distributed_type.value
        raise ValueError(f"accelerator must be of a distributed_type that leaves the step to Accelerate, got {kind}")
    precision = accelerator.mixed_precision
    if precision not in precisions:
        wanted = " or ".join(f"mixed_precision={each!r}" for each in precisions)
        raise ValueError(f"accelerator must have {wanted}, got {precision!r}{_HINTS.get(precision, '')}")
    for package in ("accelerate", "transformers") if "transformers" in sys.modules else ("accelerate",):
        versions.check(package)


def _check_unprepared(accelerator: Any) -> None:
    prepared = [*accelerator._optimizers, *(() if accelerator.native_amp else accelerator._models)]
    if prepared:
        names = ", ".join(type(getattr(one, "optimizer", one)).__name__ for one in prepared)
        raise ValueError(f"accelerator must have prepared nothing yet, which would keep what it got: {names}")


def _new_scaler(accelerator: Any, settings: dict[str, Any]) -> GradScaler:
    """Return a scaler with the numbers of Accelerate's, or of the one that Accelerate does not make on a CPU."""
    device, theirs = accelerator.device.type, accelerator.scaler
    if theirs is None:
        handler = accelerator.scaler_handler
        theirs = torch.amp.GradScaler(device, **(handler.to_kwargs() if handler is not None else {}))
    numbers: dict[str, Any] = {"enabled": theirs.is_enabled()}
    if theirs.is_enabled():
        numbers["init_scale"] = theirs.get_scale()
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            numbers[name] = getattr(theirs, f"get_{name}")()
    scaler = _scaler_class(accelerator)(device, **{**numbers, **settings})
    scaler._init_growth_tracker = theirs._get_growth_tracker()
    return scaler


def _scaler_class(accelerator: Any) -> type[GradScaler]:
    return scaler_triton.ShardedGradScaler if _is_fsdp1(accelerator) else GradScaler  # that name imports FSDP


def _is_fsdp1(accelerator: Any) -> bool:
    return bool(accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2)


def _prepare_optimizer(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """`Accelerator.prepare_optimizer` with our wrapper; a step that was interrupted is forgotten."""
    optimizer = type(accelerator).prepare_optimizer(accelerator, *args, **kwargs)
    optimizer.__class__ = _AcceleratedOptimizer
    updates.finish(accelerator.scaler)
    # In every run the Trainer prepares its optimizer or a new one, also after a run that was interrupted in a step.
    accelerator.scaler._ours.steps.reset(parameters_of(optimizer))
    return optimizer


def _backward(accelerator: Any, loss: Any, **kwargs: Any) -> None:
    """`Accelerator.backward`, which raises if it adds to gradients that were unscaled for a step still to come.

    A later clipping of another part of the model could not detect that.
    """
    updates.begin(accelerator.scaler, accelerator._optimizers)
    unscaled = Unscaled(accelerator.scaler)
    type(accelerator).backward(accelerator, loss, **kwargs)
    unscaled.refuse_changes()


def _unscale_gradients(accelerator: Any, optimizer: Any = None) -> None:
    """`Accelerator.unscale_gradients`, after which optimizers still know whether their last step was skipped.

    Those that have been stepped or unscaled on this loss are left out of "all" once one has been stepped.
    """
    given = updates.left_to_unscale(accelerator.scaler, accelerator._optimizers) if optimizer is None else optimizer
    several = given if isinstance(given, (list, tuple)) else [given]
    for one in several:
        if isinstance(one, _AcceleratedOptimizer):
            one.keep_answer()
    if isinstance(accelerator.scaler, StepGuard):  # Accelerate's own does nothing unless it is fp16
        unscale_once(accelerator.scaler, *several)
    type(accelerator).unscale_gradients(accelerator, several)


def _clip_grad_norm(accelerator: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
    """`Accelerator.clip_grad_norm_`, by the scaler: the norm is that of the whole model, however it is sharded.

    Only the optimizers that hold some of `parameters` are unscaled. A gradient that no prepared optimizer holds is left
    alone, because it is still scaled.
    """
    chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    ids = set(map(id, chosen))
    holders = [one for one in accelerator._optimizers if any(id(p) in ids for p in parameters_of(one))]
    optimizers = [*{id(one.optimizer): one.optimizer for one in holders}.values()]  # may be prepared repeatedly
    if not optimizers or not accelerator.scaler.is_enabled():
        norm: Tensor = type(accelerator).clip_grad_norm_(accelerator, chosen, max_norm, norm_type)
        return norm
    for one in holders:
        one.keep_answer()
    scaler = accelerator.scaler
    # If these are all that the optimizers train, one pass and one reduction are enough.
    at_once = all(id(p) in ids or not p.requires_grad for one in optimizers for p in parameters_of(one))
    numbers, model = (float(max_norm), float(norm_type)), _fsdp1_model(accelerator)
    if isinstance(scaler, StepGuard):  # without a scaler, clipping may be repeated
        return clip_again(scaler, optimizers, *numbers, model=model, parameters=chosen, at_once=at_once)
    norm = scaler.clip_grad_norm_(optimizers, *numbers, model=model, parameters=None if at_once else chosen)
    return norm


def _fsdp1_model(accelerator: Any) -> nn.Module | None:
    """Return what holds the FSDP1 modules: by them the scaler knows which parameters are sharded."""
    if not _is_fsdp1(accelerator):
        return None
    return accelerator._models[0] if len(accelerator._models) == 1 else nn.ModuleList(accelerator._models)


def _is_called_from(module: str) -> bool:
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None
