"""fp16 training with Hugging Face's Trainer: a small GPT-2 learns to count.

Nothing is downloaded.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from scaler_triton import use_scaler_triton

config = GPT2Config(
    vocab_size=64,
    n_positions=32,
    n_embd=32,
    n_layer=1,
    n_head=2,
    bos_token_id=0,
    eos_token_id=0,
    resid_pdrop=0.0,
)
model = GPT2LMHeadModel(config)
rows = [(torch.arange(32) + start) % 64 for start in range(64)]

arguments = TrainingArguments(
    output_dir="counting",
    fp16=True,
    max_steps=20,
    learning_rate=1e-2,
    per_device_train_batch_size=16,
    logging_steps=10,
    report_to=[],
)  # the rest is as it comes: fused AdamW, max_grad_norm=1.0, a linear schedule
data = [{"input_ids": row, "labels": row} for row in rows]
trainer = Trainer(model, arguments, train_dataset=data)
# The one line, before train().
scaler = use_scaler_triton(trainer, min_scale=1.0)

trainer.train()
print(scaler.stats())
print(scaler.overflow_report(trainer.model))
