"""The Trainer logs what its scaler does, to whatever it reports to: a callback adds the numbers to each log."""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from scaler_triton import GradScaler
from scaler_triton.integrations.accelerate import use_scaler_triton


class LogScaler(TrainerCallback):
    """Adds the scaler's metrics to what the Trainer logs; before the callbacks of TensorBoard, W&B and MLflow."""

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler

    def on_log(self, arguments: Any, state: Any, control: Any, logs: dict[str, float], **others: Any) -> None:
        """Add the metrics, in place."""
        logs.update(self.scaler.metrics("scaler/"))
        state.log_history[-1].update(logs)


config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
rows = [(torch.arange(32) + start) % 64 for start in range(64)]
arguments = TrainingArguments(
    output_dir="counting", fp16=True, max_steps=20, per_device_train_batch_size=16, logging_steps=10, report_to=[]
)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
scaler = use_scaler_triton(trainer.accelerator, measure=True)
trainer.callback_handler.callbacks.insert(0, LogScaler(scaler))

trainer.train()
print(*(name for name in trainer.state.log_history[-2] if name.startswith("scaler/")))
print(scaler.headroom())
