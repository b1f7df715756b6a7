"""QLoRA in fp16 as on a T4: SFTTrainer, a tiny Llama in nf4, adapters in bf16.

TRL casts the adapters of a quantized model to bf16, whatever the GPU. Under fp16
autocast their gradients are bf16, which torch's scaler refuses on every GPU.
`docs/notebooks/qlora_t4.ipynb` is this program, cell by cell.
"""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer

from scaler_triton import use_scaler_triton

name = tempfile.mkdtemp()
words = [f"w{number}" for number in range(62)]
numbers = {word: number for number, word in enumerate(["<pad>", "<eos>", *words])}
splitter = Tokenizer(models.WordLevel(numbers, unk_token="<eos>"))
splitter.pre_tokenizer = pre_tokenizers.Whitespace()
tokens = {"pad_token": "<pad>", "eos_token": "<eos>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=splitter, **tokens)
tokenizer.save_pretrained(name)

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    pad_token_id=0,
    eos_token_id=1,
)
LlamaForCausalLM(config).save_pretrained(name)

in_nf4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.float16,
)
model = AutoModelForCausalLM.from_pretrained(
    name,
    quantization_config=in_nf4,
    dtype=torch.float16,
)

texts = [" ".join((words + words)[start : start + 16]) for start in range(62)]
arguments = SFTConfig(
    output_dir=f"{name}/adapters",
    fp16=True,
    max_steps=20,
    learning_rate=2e-2,
    per_device_train_batch_size=8,
    logging_steps=5,
    save_strategy="no",
    report_to=[],
)
lora = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
trainer = SFTTrainer(
    model,
    arguments,
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=AutoTokenizer.from_pretrained(name),
    peft_config=lora,
)

scaler = use_scaler_triton(trainer)

adapters = [each for each in trainer.model.parameters() if each.requires_grad]
print({each.dtype for each in adapters})
print(trainer.accelerator.scaler)

trainer.train()

stats = scaler.stats()
print(stats)
print([line["loss"] for line in trainer.state.log_history if "loss" in line])
if stats.skipped:
    print(scaler.overflow_report(trainer.model))
else:
    print("no step was skipped")
