"""Callbacks for Lightning's Trainer; `integrations.lightning` has them, too, and imports Lightning only for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from scaler_triton import GradScaler

# They differ only in the name; a class of both passes for a callback of either.
_NAMES = ("lightning.pytorch", "pytorch_lightning")
_INSTALLED = [name for name in _NAMES if find_spec(name.partition(".")[0]) is not None]
if not _INSTALLED:
    raise ImportError("Lightning's callbacks need the package lightning or pytorch-lightning")
_USED = [name for name in _INSTALLED if name in sys.modules] or _INSTALLED[:1]
_Callback: Any = type("_Callback", tuple(import_module(name).Callback for name in _USED), {})


class WaitForSkips(_Callback):  # type: ignore[misc]
    """Makes step-wise schedulers and `WeightAveraging` wait when a step is skipped, which Lightning counts as one.

        trainer = Trainer(plugins=mixed_precision(Trainer), callbacks=[WeightAveraging(), WaitForSkips()])

    A scheduler with `"interval": "step"` and an average are not stepped after a batch in which their optimizer took no
    step, so torch's warning "Detected call of `lr_scheduler.step()` before `optimizer.step()`" is gone, too. What is
    stepped by epoch is left alone. In manual optimization schedulers are yours: ask `trainer.scaler.was_skipped`.

    It asks `was_skipped` after each step: a fused optimizer's answer waits for the device, once a step; any other's
    is on the host already.

    Raises: TypeError when training starts, unless the Trainer has a scaler or a guard of this package.
    """

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}  # by optimizer: its steps before this batch
        self._replaced: list[tuple[Any, str, Any]] = []  # object, name, and what it held itself, if anything

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the place of what Lightning asks: the module's `lr_scheduler_step`, an average's `should_update`."""
        scaler_of(trainer, self)
        self._restore()
        theirs = pl_module.lr_scheduler_step

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            stepwise = any(
                each.scheduler is scheduler for each in trainer.lr_scheduler_configs if each.interval == "step"
            )
            if not stepwise or self._has_stepped(trainer, getattr(scheduler, "optimizer", None)):
                theirs(scheduler, metric)

        self._replace(pl_module, "lr_scheduler_step", lr_scheduler_step)
        for callback in trainer.callbacks:
            if any(cls.__name__ == "WeightAveraging" for cls in type(callback).__mro__):
                self._replace(callback, "should_update", self._asking(trainer, callback.should_update))

    def on_train_batch_start(self, trainer: Any, *arguments: Any) -> None:
        """Note how many steps there were before."""
        self._taken = {id(each): _steps_taken(trainer, each) for each in trainer.optimizers}

    def on_train_end(self, *arguments: Any) -> None:
        """Give back what was replaced."""
        self._restore()

    def on_exception(self, *arguments: Any) -> None:
        """Give back what was replaced."""
        self._restore()

    def _asking(self, trainer: Any, theirs: Callable[..., bool]) -> Callable[..., bool]:
        def should_update(step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            is_wanted = step_idx is None or self._has_stepped(trainer, None)
            return is_wanted and theirs(step_idx=step_idx, epoch_idx=epoch_idx)

        return should_update

    def _has_stepped(self, trainer: Any, optimizer: Any) -> bool:
        """Return whether an optimizer, or any for None, took a step in this batch."""
        if not trainer.scaler.is_enabled():
            return True
        asked = trainer.optimizers if optimizer is None else [optimizer]
        return any(
            _steps_taken(trainer, each) != self._taken.get(id(each), 0) and not trainer.scaler.was_skipped(each)
            for each in asked
        )

    def _replace(self, owner: Any, name: str, by: Any) -> None:
        self._replaced.append((owner, name, vars(owner).get(name)))
        vars(owner)[name] = by

    def _restore(self) -> None:
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is None:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before


class LogScaler(_Callback):  # type: ignore[misc]
    """Logs the metrics of the Trainer's scaler or guard by `log_dict`, whenever the Trainer logs; without a wait.

        trainer = Trainer(plugins=mixed_precision(Trainer), callbacks=[LogScaler()])

    So they go to every logger, and other callbacks may watch them, such as `EarlyStopping("scaler/skipped_in_a_row")`.

    Args:
        prefix: of each name; None: "scaler/", a guard's "guard/".

    Raises: TypeError when training starts, unless the Trainer has a scaler or a guard of this package.
    """

    def __init__(self, prefix: str | None = None) -> None:
        self.prefix = prefix

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise unless there is something to log."""
        scaler_of(trainer, self)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        """Log, if the Trainer logs this step."""
        if trainer._logger_connector.should_update_logs:
            options = {} if self.prefix is None else {"prefix": self.prefix}
            pl_module.log_dict(trainer.scaler.metrics(**options), on_step=True, on_epoch=False)


def scaler_of(trainer: Any, asked_by: Any) -> GradScaler:
    """Return the Trainer's scaler or guard; raise TypeError if it is none of this package."""
    scaler = trainer.scaler
    if not isinstance(scaler, GradScaler):
        got = type(scaler).__name__ if scaler is not None else "none"
        raise TypeError(
            f"{type(asked_by).__name__} needs a scaler or a guard of scaler_triton, got {got}: "
            "Trainer(plugins=mixed_precision(Trainer)), or step_guard_precision(Trainer) for bf16 and fp32"
        )
    return scaler


def _steps_taken(trainer: Any, optimizer: Any) -> int:
    step = trainer.scaler._ours.steps.last(optimizer)
    return 0 if step is None else step.steps_taken
