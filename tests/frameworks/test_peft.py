"""Adapters in bf16 over a base in fp16, as TRL makes them: they train, where torch's scaler refuses on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Place, places

pytest.importorskip("peft")
pytest.importorskip("transformers")

import peft
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from scaler_triton.integrations.accelerate import use_scaler_triton

STEPS = 20
ROW = torch.arange(16) % 5
ROUNDING = 2.0**-8  # of bf16, relative

pytestmark = pytest.mark.usefixtures("first_accelerator")


def adapted(base: torch.dtype, adapters: torch.dtype) -> Any:
    """Return a GPT-2 of one layer without dropout, frozen, with LoRA adapters; the same numbers in any dtype."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = GPT2Config(
        **sizes, initializer_range=0.2, bos_token_id=0, eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    )
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True
    )
    model = peft.get_peft_model(GPT2LMHeadModel(config).half().to(base), lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16().to(adapters)
    return model


def losses(folder: Path, model: Any, place: Place | None) -> tuple[list[float], Any]:
    """Return the loss of each step, and the scaler; without a place there is none."""
    arguments = TrainingArguments(
        str(folder),
        fp16=place is not None,
        use_cpu=place is None or place.device == "cpu",
        max_steps=STEPS,
        learning_rate=2e-2,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": ROW, "labels": ROW}] * 16)
    scaler = None if place is None else use_scaler_triton(trainer.accelerator, backend=place.backend)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], scaler


@pytest.mark.parametrize("place", places(), ids=str)
def test_bf16_adapters_under_fp16_train_as_in_fp32(place: Place, tmp_path: Path) -> None:
    found, scaler = losses(tmp_path, adapted(torch.float16, torch.bfloat16), place)
    reference, _ = losses(tmp_path, adapted(torch.float32, torch.float32), None)
    assert scaler.stats().updates - scaler.stats().skipped == len(found) == STEPS
    assert reference[-1] < 0.8 * reference[0]
    assert found == pytest.approx(reference, rel=2 * ROUNDING)
