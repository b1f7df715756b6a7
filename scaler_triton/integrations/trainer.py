"""A callback for Hugging Face's Trainer that logs what its scaler or guard does."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from scaler_triton import GradScaler


class LogScaler(TrainerCallback):
    """Adds the metrics of the Trainer's scaler or guard to each of its logs, wherever it reports to; without a wait.

        trainer = Trainer(...)
        use_scaler_triton(trainer.accelerator)
        trainer.add_callback(LogScaler(trainer))

    When training starts it moves before all other callbacks, such as those of W&B, TensorBoard and MLflow: they get
    what those before them leave. The numbers are in `trainer.state.log_history`, too.

    Args:
        trainer: the one that it is added to, whose list of callbacks it changes.
        prefix: of each name; None: "scaler/", a guard's "guard/".

    Raises: TypeError naming an illegal `trainer`; when training starts, TypeError unless the Trainer has a scaler or a
        guard of this package.
    """

    def __init__(self, trainer: Any, prefix: str | None = None) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(f"trainer must be a transformers.Trainer, got {type(trainer).__name__}")
        self.trainer, self.prefix = trainer, prefix

    def on_train_begin(self, *arguments: Any, **others: Any) -> None:
        """Move to the front; raise if there is nothing to log."""
        scaler = self.trainer.accelerator.scaler
        if not isinstance(scaler, GradScaler):
            got = type(scaler).__name__ if scaler is not None else "none"
            raise TypeError(
                f"LogScaler needs a scaler or a guard of scaler_triton, got {got}: call "
                "use_scaler_triton(trainer.accelerator), or use_step_guard(trainer) for bf16 and fp32, before train()"
            )
        callbacks = self.trainer.callback_handler.callbacks
        callbacks.remove(self)  # the one that is called next stays in its place
        callbacks.insert(0, self)

    def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Add the metrics to the log in place, and to the history."""
        scaler = self.trainer.accelerator.scaler
        if isinstance(scaler, GradScaler):  # a log without training, such as of an evaluation, may come without it
            metrics = scaler.metrics() if self.prefix is None else scaler.metrics(self.prefix)
            others["logs"].update(metrics)
            state.log_history[-1].update(metrics)
