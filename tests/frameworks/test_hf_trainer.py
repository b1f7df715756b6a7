"""HF Trainer: its default fused AdamW, clipping, scheduler and checkpoints with our scaler, and LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate_cases import forget
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from scaler_triton.integrations.accelerate import _AcceleratedOptimizer, use_scaler_triton

ROOT = Path(__file__).parents[2]
STEPS = 6
DEFAULTS = {
    "fp16": True,
    "use_cpu": True,
    "max_steps": STEPS,
    "logging_steps": 1,
    "per_device_train_batch_size": 4,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
}

pytestmark = [
    pytest.mark.usefixtures("first_accelerator"),
    # transformers asks its own models by a name that it calls deprecated.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


class Overflow(TrainerCallback):
    """Makes one weight's gradient infinite in some steps, as fp16 would, before it is clipped."""

    def __init__(self, weight: nn.Parameter, steps: tuple[int, ...]) -> None:
        self.steps, self.now = steps, False
        weight.register_hook(lambda gradient: gradient * torch.inf if self.now else gradient)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.now = state.global_step in self.steps


def new_model(seed: int = 0) -> GPT2LMHeadModel:
    """A GPT-2 of one layer, without dropout."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    return GPT2LMHeadModel(config)


def samples() -> list[dict[str, Tensor]]:
    """Sixty-four sequences of tokens."""
    tokens = torch.randint(32, (64, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def new_trainer(model: nn.Module, folder: Path, overflows: tuple[int, ...] = (), **options: Any) -> Trainer:
    """A Trainer for fp16 that logs every step, on the CPU: there, one run is like another to the bit."""
    weight = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    arguments = TrainingArguments(str(folder), **DEFAULTS | options)
    return Trainer(model, arguments, train_dataset=samples(), callbacks=[Overflow(weight, overflows)])


def logged(trainer: Trainer, key: str) -> list[Any]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: parameter.detach().cpu().clone() for name, parameter in trainer.model.named_parameters()}


def assert_same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_trains_with_its_defaults(tmp_path):
    trainer = new_trainer(new_model(), tmp_path, (2,))
    scaler = use_scaler_triton(trainer.accelerator, init_scale=256.0)
    before, dtypes = weights(trainer), set()
    block = trainer.model.transformer.h[0].mlp.c_fc
    block.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    with mock.patch.object(scaler, "clip_grad_norm_", wraps=scaler.clip_grad_norm_) as clip:
        trainer.train()
    assert dtypes == {torch.float16}
    assert "fused" in trainer.args.optim
    assert type(trainer.optimizer) is _AcceleratedOptimizer
    assert [(call.args[1], call.kwargs["parameters"]) for call in clip.call_args_list] == [(1.0, None)] * STEPS
    assert scaler.stats().updates == STEPS
    assert (scaler.stats().skipped, scaler.stats().last_skip) == (1, 3)
    assert scaler.get_scale() == 128.0
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())
    assert any(not torch.equal(before[name], after) for name, after in weights(trainer).items())


def test_the_scheduler_waits_with_a_fused_optimizer(tmp_path):
    trainer = new_trainer(new_model(), tmp_path, (2,))
    use_scaler_triton(trainer.accelerator, init_scale=256.0)
    trainer.train()
    # A linear way from 5e-5 to 0 in STEPS steps; the third one was skipped, and the fourth has its rate.
    assert logged(trainer, "learning_rate") == pytest.approx([5e-5 * (1 - n / STEPS) for n in (0, 1, 2, 2, 3, 4)])


def use_torch(trainer: Trainer) -> None:
    """Put torch's scaler where Accelerate would, were this a GPU."""
    trainer.accelerator.scaler = torch.amp.GradScaler(trainer.accelerator.device.type, init_scale=256.0)
    trainer.accelerator.native_amp = True


@pytest.mark.parametrize("accumulated", [1, 2])
def test_equals_torchs_scaler_to_the_bit(tmp_path, accumulated):
    options = {"optim": "adamw_torch", "max_grad_norm": 1e9, "gradient_accumulation_steps": accumulated}
    trained = []
    for use in (lambda trainer: use_scaler_triton(trainer.accelerator, init_scale=256.0), use_torch):
        forget()
        trainer = new_trainer(new_model(), tmp_path, (2,), **options)
        use(trainer)
        trainer.train()
        trained.append(trainer)
    ours, theirs = trained
    assert_same_weights(weights(ours), weights(theirs))
    assert logged(ours, "learning_rate") == logged(theirs, "learning_rate")
    assert logged(ours, "loss") == logged(theirs, "loss")
    assert ours.accelerator.scaler.state_dict() == theirs.accelerator.scaler.state_dict()


def test_resumes_to_the_bit(tmp_path):
    runs = []
    for checkpoint in (None, str(tmp_path / "checkpoint-3")):
        forget()
        model = new_model(seed=len(runs))  # the second run's own weights must not matter
        trainer = new_trainer(model, tmp_path, (1, 4), save_strategy="steps", save_steps=3)
        scaler = use_scaler_triton(trainer.accelerator, init_scale=256.0, min_scale=1.0)
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append((trainer, scaler))
    (straight, scaler), (resumed, other) = runs
    assert_same_weights(weights(straight), weights(resumed))
    assert scaler.state_dict() == other.state_dict()
    assert scaler.stats() == other.stats()
    assert scaler.stats().skipped == 2
    assert logged(straight, "learning_rate") == logged(resumed, "learning_rate")


def test_a_run_with_torchs_scaler_goes_on_with_ours(tmp_path):
    options = {"optim": "adamw_torch", "max_grad_norm": 1e9, "save_strategy": "steps", "save_steps": 3}
    begun = new_trainer(new_model(), tmp_path, (1, 4), **options)
    use_torch(begun)
    begun.train()
    forget()
    resumed = new_trainer(new_model(seed=1), tmp_path, (1, 4), **options)
    scaler = use_scaler_triton(resumed.accelerator, init_scale=2.0)  # another than the checkpoint's
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same_weights(weights(begun), weights(resumed))
    assert scaler.state_dict() == begun.accelerator.scaler.state_dict()
    assert scaler.stats().skipped == 1  # of the three steps that it took
    for key in ("learning_rate", "loss"):
        assert logged(begun, key) == logged(resumed, key)


class Interrupt(TrainerCallback):
    """Interrupts a run once, as Ctrl-C in a notebook may, between clipping and the third step."""

    def __init__(self) -> None:
        self.waiting = True

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.waiting and state.global_step == 2:
            self.waiting = False
            raise KeyboardInterrupt


def test_an_interrupted_run_leaves_nothing_to_the_next(tmp_path):
    trainer = new_trainer(new_model(), tmp_path)
    scaler = use_scaler_triton(trainer.accelerator, init_scale=256.0)
    trainer.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert scaler.stats().updates == 2 + STEPS
    assert scaler.stats().skipped == 0
    assert trainer.state.global_step == STEPS


@pytest.mark.parametrize("cpu", [True, pytest.param(False, marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
def test_lora_trains_its_adapters_only(tmp_path, cpu):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(new_model(), settings)
    trainer = new_trainer(model, tmp_path, (2,), learning_rate=1e-2, use_cpu=cpu)
    scaler = use_scaler_triton(trainer.accelerator, init_scale=256.0)
    assert scaler._device == ("cpu" if cpu else "cuda")
    before = weights(trainer)
    with mock.patch.object(scaler, "unscale_", side_effect=AssertionError):  # unscaled and clipped in one
        trainer.train()
    changed = {name for name, after in weights(trainer).items() if not torch.equal(before[name], after)}
    assert changed == {name for name in before if "lora_" in name}
    assert scaler.stats().skipped == 1
    assert logged(trainer, "learning_rate") == pytest.approx([1e-2 * (1 - n / STEPS) for n in (0, 1, 2, 2, 3, 4)])


@pytest.mark.gpu
def test_trains_on_a_gpu_by_triton(tmp_path):
    trainer = new_trainer(new_model(), tmp_path, (2,), use_cpu=False)
    assert type(trainer.accelerator.scaler) is torch.amp.GradScaler
    scaler = use_scaler_triton(trainer.accelerator, init_scale=256.0, backend="triton")
    trainer.train()
    assert scaler._scale.is_cuda
    assert (scaler.stats().updates, scaler.stats().skipped) == (STEPS, 1)
    assert logged(trainer, "learning_rate") == pytest.approx([5e-5 * (1 - n / STEPS) for n in (0, 1, 2, 2, 3, 4)])
