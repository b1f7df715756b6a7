"""The Trainer logs what its scaler does, to whatever it reports to."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from scaler_triton import use_scaler_triton
from scaler_triton.integrations.trainer import LogScaler

config = GPT2Config(
    vocab_size=64,
    n_positions=32,
    n_embd=32,
    n_layer=1,
    n_head=2,
    bos_token_id=0,
    eos_token_id=0,
)
rows = [(torch.arange(32) + start) % 64 for start in range(64)]
data = [{"input_ids": row, "labels": row} for row in rows]
arguments = TrainingArguments(
    output_dir="counting",
    fp16=True,
    max_steps=20,
    per_device_train_batch_size=16,
    logging_steps=10,
    report_to=[],  # such as ["wandb"]: it gets the numbers, too
)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data)
scaler = use_scaler_triton(trainer, measure=True)
trainer.add_callback(LogScaler(trainer))

trainer.train()
logged = trainer.state.log_history[-2]
print(*(name for name in logged if name.startswith("scaler/")))
print(scaler.headroom())
