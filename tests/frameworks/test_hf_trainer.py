"""HF Trainer: its default fused AdamW, clipping, schedule and checkpoints with our scaler; LoRA; FSDP1; a guard."""

from pathlib import Path
from typing import Any
from unittest import mock

import jobs
import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from test_accelerate import forget, launched, shard, use_torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from scaler_triton.integrations.accelerate import _AcceleratedOptimizer, use_scaler_triton, use_step_guard
from scaler_triton.integrations.trainer import LogScaler

STEPS, INIT_SCALE = 6, 256.0
DEFAULTS = {"fp16": True, "use_cpu": True, "max_steps": STEPS, "per_device_train_batch_size": 4}
DEFAULTS |= {"logging_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
SAVING = {"save_strategy": "steps", "save_steps": 3}
# Nothing is clipped: torch sums norms in fp32. With a fused optimizer torch's scaler splits the ranks at an overflow.
AS_TORCHS = {"optim": "adamw_torch", "max_grad_norm": 1e9}
# A linear way from 5e-5 to 0; a step that was skipped leaves its rate to the next one.
RATES = pytest.approx([5e-5 * (1 - n / STEPS) for n in (0, 1, 1, 2, 3, 3)])

pytestmark = pytest.mark.usefixtures("first_accelerator")


class Overflowing(Trainer):
    """A Trainer; in some steps this rank's gradients overflow."""

    overflows: tuple[int, ...] = (1, 4)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        if self.state.global_step in self.overflows:
            jobs.overflow(self.model.parameters())
        return loss


def new_model(seed: int = 0) -> GPT2LMHeadModel:
    """A GPT-2 of one layer, without dropout."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "initializer_range": 0.2}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    return GPT2LMHeadModel(config)


def new_trainer(folder: Path, *, ours: bool = True, seed: int = 0, sharded: bool = False, **options: Any) -> Any:
    """A Trainer for fp16 that logs every step, on the CPU: there, one run is like another to the bit."""
    tokens = torch.randint(32, (64, 16), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(str(folder), **DEFAULTS | options)
    trainer = Overflowing(new_model(seed), arguments, train_dataset=samples)
    if sharded:  # with FSDP1, which the real one has on GPUs only
        shard(1, whole=True)
        trainer.is_fsdp_enabled = True
    numbers = {"init_scale": INIT_SCALE, "growth_interval": 2000}
    if ours:
        assert use_scaler_triton(trainer, **numbers) is trainer.accelerator.scaler
    else:
        use_torch(trainer.accelerator, **numbers)
    return trainer


def logged(trainer: Trainer, key: str) -> list[Any]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def left(trainer: Any) -> tuple[Any, ...]:
    """What two runs that are alike leave alike."""
    return trainer.accelerator.scaler.state_dict(), logged(trainer, "learning_rate"), jobs.digests(trainer.model)


def skips(trainer: Any) -> tuple[int, int]:
    stats = trainer.accelerator.scaler.stats()
    return stats.updates, stats.skipped


def test_trains_with_its_defaults_and_the_schedule_waits(tmp_path):
    trainer, dtypes = new_trainer(tmp_path), set()
    scaler, before = trainer.accelerator.scaler, jobs.whole(trainer.model)
    block = trainer.model.transformer.h[0].mlp.c_fc
    block.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    with mock.patch.object(scaler, "clip_grad_norm_", wraps=scaler.clip_grad_norm_) as clip:
        trainer.train()
    assert dtypes == {torch.float16}
    assert "fused" in trainer.args.optim
    assert type(trainer.optimizer) is _AcceleratedOptimizer
    assert [(call.args[1], call.kwargs["parameters"]) for call in clip.call_args_list] == [(1.0, None)] * STEPS
    assert (skips(trainer), scaler.stats().last_skip, scaler.get_scale()) == ((STEPS, 2), 5, INIT_SCALE / 4)
    assert logged(trainer, "learning_rate") == RATES
    after = jobs.whole(trainer.model)
    assert after.isfinite().all()
    assert not torch.equal(before, after)


@pytest.mark.parametrize(("first_ours", "accumulated"), [(True, 1), (False, 1), (False, 2)])
def test_resumes_to_the_bit(tmp_path, first_ours, accumulated):
    """Also what torch's scaler has begun, which so does the same."""
    options = SAVING | {"gradient_accumulation_steps": accumulated} | ({} if first_ours else AS_TORCHS)
    straight = new_trainer(tmp_path, ours=first_ours, **options)
    straight.train()
    forget()
    resumed = new_trainer(tmp_path, seed=1, **options)  # its own weights must not matter
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert left(straight) == left(resumed)
    assert skips(resumed) == (3, 1)


def trained_adapters(folder: Path, base: torch.dtype, adapters: torch.dtype, **options: Any) -> Any:
    """Train a frozen model's LoRA adapters on one row; the same numbers in any dtype."""
    peft = pytest.importorskip("peft")
    layers = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, **layers)
    model, row = peft.get_peft_model(new_model().half().to(base), lora), torch.arange(16) % 5
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16().to(adapters)
    arguments = TrainingArguments(str(folder), **DEFAULTS | {"max_steps": 20, "learning_rate": 2e-2} | options)
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row}] * 16)
    if arguments.fp16:
        use_scaler_triton(trainer)
    trainer.train()
    return trainer


@pytest.mark.native
def test_bf16_adapters_over_a_base_in_fp16_train_as_in_fp32(tmp_path):
    """As TRL makes them; torch's scaler refuses bf16 on a GPU."""
    trainer = trained_adapters(tmp_path, torch.float16, torch.bfloat16, use_cpu=not torch.cuda.is_available())
    forget()
    reference = logged(trained_adapters(tmp_path, torch.float32, torch.float32, fp16=False), "loss")
    assert skips(trainer) == (20, 0)
    assert reference[-1] < 0.8 * reference[0]
    assert logged(trainer, "loss") == pytest.approx(reference, rel=2.0**-7)  # bf16 rounds to 2^-8
    before = dict(new_model().half().named_parameters())
    for name, parameter in trainer.model.base_model.model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter.cpu(), before[name.replace(".base_layer", "")])


class InOrder(Trainer):
    """A Trainer that takes the samples in their order, and a model whose loss is that of `jobs`."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return jobs.loss_of(model, inputs["x"])


def new_guarded(folder: Path, batches: list[torch.Tensor], seed: int = 0, **options: Any) -> Any:
    """A Trainer in fp32, or in bf16 by an option, with a guard; a batch's rows are samples."""
    samples = [{"x": row} for batch in batches for row in batch]
    fixed = {"fp16": False, "num_train_epochs": 1, "max_steps": -1, "lr_scheduler_type": "constant"}
    arguments = TrainingArguments(str(folder), **DEFAULTS | fixed | {"learning_rate": 0.1} | options)
    trainer = InOrder(jobs.new_net(seed), arguments, train_dataset=samples)
    use_step_guard(trainer, **jobs.GUARD)
    return trainer


@pytest.mark.parametrize("factor", [torch.inf, jobs.SPIKE], ids=["infinite", "spike"])
@pytest.mark.parametrize("options", [{"bf16": True}, {"optim": "adamw_torch"}, {"max_grad_norm": 0.0}], ids=str)
def test_a_guarded_run_goes_on_as_if_it_had_not_seen_the_bad_batch(tmp_path, options, factor):
    seen, ends = jobs.guarded_batches(4, factor), []
    for batches, skipped in (seen, 1), (seen[:4] + seen[5:], 0):
        forget()
        trainer = new_guarded(tmp_path, batches, **options)
        trainer.train()
        assert skips(trainer) == (len(batches), skipped)
        assert trainer.accelerator.scaler.stats().spikes == (skipped if factor == jobs.SPIKE else 0)
        ends.append(jobs.whole(trainer.model))
    assert torch.equal(*ends)


def test_a_guard_resumes_with_its_norms_to_the_bit(tmp_path):
    """Without those of the first three steps, the next one would not be taken for a spike."""
    straight = new_guarded(tmp_path, jobs.guarded_batches(3, jobs.SPIKE), bf16=True, **SAVING)
    straight.train()
    forget()
    resumed = new_guarded(tmp_path, jobs.guarded_batches(3, jobs.SPIKE), seed=1, bf16=True, **SAVING)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert left(straight) == left(resumed)
    assert resumed.accelerator.scaler.stats().spikes == 1


def train(rank: int, folder: Path, *, ours: bool = True, checkpoint: str | None = None, **options: Any) -> Any:
    """Train by FSDP1, with an overflow on one rank in steps 1 and 4."""
    with launched(rank):
        trainer = new_trainer(folder, ours=ours, seed=checkpoint is not None, sharded=True, **options)
        trainer.overflows = Overflowing.overflows if rank == 1 else ()
        trainer.train(resume_from_checkpoint=checkpoint)
        return left(trainer), skips(trainer) if ours else None


def test_all_ranks_skip_with_the_defaults_and_a_run_with_torchs_scaler_goes_on_with_ours(two, tmp_path):
    for (state, rates, _), skipped in two(train, tmp_path):
        assert (skipped, state["scale"]) == ((STEPS, 2), INIT_SCALE / 4)
        assert rates == RATES
    begun = two(train, tmp_path, ours=False, **AS_TORCHS, **SAVING)
    resumed = two(train, tmp_path, checkpoint=str(tmp_path / "checkpoint-3"), **AS_TORCHS, **SAVING)
    for (whole, _), (end, skipped) in zip(begun, resumed, strict=True):
        assert (end, skipped) == (whole, (3, 1))


class Seen(TrainerCallback):
    """What callbacks of loggers get, which come before those that are added."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []
        self.events: list[str] = []

    def on_train_begin(self, *arguments: Any, **others: Any) -> None:
        self.events.append("begin")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **others: Any) -> None:
        self.logs.append({**logs})


@pytest.mark.parametrize("prefix", [None, "amp/"])
def test_the_scalers_metrics_are_in_each_log_before_others_see_it(tmp_path: Path, prefix: str | None) -> None:
    trainer, seen, late = new_trainer(tmp_path), Seen(), Seen()
    trainer.add_callback(seen)
    trainer.add_callback(LogScaler(trainer) if prefix is None else LogScaler(trainer, prefix))
    trainer.callback_handler.callbacks.append(late)
    for _ in range(2):  # the second run finds it at the front
        trainer.train()
    assert seen.events == late.events == ["begin"] * 2  # nobody is left out or asked twice as it moves
    assert type(trainer.callback_handler.callbacks[0]) is LogScaler
    prefix = prefix or "scaler/"
    steps = [log for log in seen.logs if "loss" in log][:STEPS]
    assert [log[f"{prefix}skipped"] for log in steps] == [0, 1, 1, 1, 2, 2]
    assert [log[f"{prefix}scale"] for log in steps] == [INIT_SCALE / 2**n for n in (0, 1, 1, 1, 2, 2)]
    assert [log[f"{prefix}skipped_in_a_row"] for log in steps] == [0, 1, 0, 0, 1, 0]
    assert all(entry[f"{prefix}updates"] > 0 for entry in trainer.state.log_history)


def test_a_guards_metrics_are_logged_with_its_norm(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), **DEFAULTS | {"fp16": False, "bf16": True})
    samples = [{"input_ids": row, "labels": row} for row in torch.randint(32, (64, 16))]
    trainer = Trainer(new_model(), arguments, train_dataset=samples)
    use_step_guard(trainer, spike_sigma=100.0, window=2)
    trainer.add_callback(LogScaler(trainer))
    trainer.train()
    logged = trainer.state.log_history[STEPS - 1]
    assert logged["guard/norm"] == pytest.approx(logged["grad_norm"], rel=1e-5)
    assert logged["guard/limit"] > logged["guard/norm"]
    assert logged["guard/updates"] == STEPS
    assert "guard/scale" not in logged


def test_what_logs_no_scaler_of_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="trainer must be a transformers.Trainer, got int"):
        LogScaler(3)
    trainer = new_trainer(tmp_path, ours=False)
    trainer.add_callback(LogScaler(trainer))
    trainer.log({"eval_loss": 1.0})
    assert {*trainer.state.log_history[-1]} == {"eval_loss", "epoch", "step"}
    with pytest.raises(TypeError, match=r"got GradScaler: call use_scaler_triton\(trainer.accelerator\), or use_step"):
        trainer.train()
