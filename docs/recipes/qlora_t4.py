"""LoRA with adapters in bf16 over a base model in fp16, as on a T4: a small GPT-2, on numbers that count up.

TRL casts the adapters of a quantized model to bf16, whatever the GPU. Under fp16 autocast their gradients are bf16,
which torch's scaler refuses on every GPU.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from scaler_triton.integrations.accelerate import use_scaler_triton

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0
)
# A real one is `AutoModelForCausalLM.from_pretrained(name, quantization_config=BitsAndBytesConfig(load_in_4bit=True,
# bnb_4bit_compute_dtype=torch.float16))`: fp16, as a T4 only emulates bf16.
base = GPT2LMHeadModel(config).half()
lora = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
model = get_peft_model(base, lora)
for parameter in model.parameters():
    if parameter.requires_grad:
        parameter.data = parameter.data.bfloat16()  # as TRL's trainers do

rows = [(torch.arange(16) + start) % 64 for start in range(64)]
arguments = TrainingArguments(
    output_dir="adapters",
    fp16=True,
    max_steps=20,
    learning_rate=5e-2,
    per_device_train_batch_size=8,
    logging_steps=10,
    save_strategy="no",
    report_to=[],
)
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
scaler = use_scaler_triton(trainer.accelerator)  # the one line, before train()

trainer.train()
print(scaler.stats())
