"""Frameworks on a GPU: FSDP as each of them turns it on, and no wait that nobody asks for.

As a program, `python test_frameworks.py CASE ARGUMENT... FOLDER`, it runs one of CASES in a world of one process, whose
group may be left open.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "frameworks")]

import jobs  # noqa: E402
from helpers import waits_raise  # noqa: E402
from jobs import BAD_STEPS, SCALES, SETTINGS, SKIPPED, STEPS  # noqa: E402

from scaler_triton import GradScaler, ShardedGradScaler  # noqa: E402
from scaler_triton.integrations import lightning  # noqa: E402

pytestmark = pytest.mark.gpu

# As torchrun starts a single rank, and `accelerate launch` says it: the group then has gloo, too, for whole states.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
WHOLE = {"ACCELERATE_USE_FSDP": "true", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT", "MASTER_PORT": "0"}
CLASSES = {"1": ShardedGradScaler, "2": GradScaler}


def accelerates_fsdp(version: str, name: str, folder: str) -> None:
    """Train by the plugin that Accelerate passes over on a CPU."""
    import test_accelerate as cases
    from accelerate.utils import FullyShardedDataParallelPlugin

    kinds: Any = {"1": {"state_dict_type": "FULL_STATE_DICT", "use_orig_params": True}, "2": {}}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=int(version), cpu_ram_efficient_loading=False, **kinds[version]
    )
    job = cases.Job(0, "ddp", name, cpu=False, fsdp_plugin=plugin)  # what overflows, all ranks see
    assert job.accelerator.is_fsdp2 is (version == "2")
    assert {parameter.device.type for parameter in job.model.parameters()} == {"cuda"}
    assert type(job.scaler) is CLASSES[version]
    report = job.train(range(STEPS), BAD_STEPS)
    assert (report["skipped"], report["scales"]) == (SKIPPED, SCALES)
    assert report["clipped_by_scaler"] == [None] * STEPS
    saved = job.state()
    job.accelerator.save_state(folder)
    job.train(range(STEPS), set())
    job.accelerator.load_state(folder)
    assert job.state() == saved


def trainers_fsdp(version: str, folder: str) -> None:
    """Train by the HF Trainer, and go on in another one from the middle."""
    import test_hf_trainer as cases

    ended = []
    for checkpoint in (None, f"{folder}/checkpoint-3"):
        cases.forget()
        options = {"use_cpu": False, "fsdp": "full_shard", "fsdp_config": {"version": int(version)}, **cases.SAVING}
        trainer = cases.new_trainer(Path(folder), seed=checkpoint is not None, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.accelerator.is_fsdp2 is (version == "2")
        assert type(trainer.accelerator.scaler) is CLASSES[version]
        assert cases.skips(trainer) == ((STEPS, 2) if checkpoint is None else (3, 1))
        assert cases.logged(trainer, "learning_rate") == cases.RATES
        ended.append(cases.left(trainer)[:2])  # attention's backward need not be the same every time on a GPU
    assert ended[0] == ended[1]


def lightnings_fsdp(folder: str) -> None:
    """Train a fused optimizer by Lightning's own FSDP strategy, clipped."""
    import test_lightning as cases

    made = lightning.fsdp_precision(cases.space("Trainer").cls, ShardedGradScaler("cuda", **SETTINGS))
    options = {"strategy": "fsdp", "use_distributed_sampler": False, "gradient_clip_val": cases.MAX_NORM}
    module = cases.module_of("adamw-fused", jobs.batches())
    trace = cases.fit(made, module, accelerator="gpu", **options).trace
    assert cases.scales_of(trace) == SCALES


CASES = {"accelerate": accelerates_fsdp, "transformers": trainers_fsdp, "lightning": lightnings_fsdp}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        *(("accelerate", (version, name)) for version in "12" for name in jobs.FUSED),
        *(("transformers", (version,)) for version in "12"),
        ("lightning", ()),
    ],
)
def test_fsdp(case: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip(case)
    paths = os.pathsep.join(filter(None, [str(TESTS.parent), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, __file__, case, *arguments, str(tmp_path)]
    environment = os.environ | ALONE | WHOLE | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.parametrize("count", [1, 2])
def test_nobody_waits_who_does_not_ask_accelerate(count: int) -> None:
    pytest.importorskip("accelerate")
    import test_accelerate as cases

    cases.forget()
    accelerator = cases.new_accelerator(cpu=False)
    scaler = cases.use_scaler_triton(accelerator)
    made = cases.prepare(accelerator, "AdamW", layers=count, fused=True)
    layers, optimizers = made[:count], made[count:]
    batch = torch.tensor([[3.0, 4.0]], device="cuda")

    def step(value: float) -> None:
        accelerator.backward(sum((layer(batch) * value).float().sum() for layer in layers))
        for layer, optimizer in zip(layers, optimizers, strict=True):
            accelerator.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(2):  # compiles kernels, makes the optimizer's state and the scaler's tables
        step(1.0)
    with waits_raise():
        step(float("inf"))
    assert all(optimizer.step_was_skipped for optimizer in optimizers)
    step(1.0)
    assert not accelerator.optimizer_step_was_skipped
    assert (scaler.stats().updates, scaler.stats().skipped) == (4, 1)
    cases.forget()


if __name__ == "__main__":
    CASES[sys.argv[1]](*sys.argv[2:])
