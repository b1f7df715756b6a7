"""Frameworks that build the scaler themselves build ours after `patch_torch()`, and their own code steps with it.

As a program, `python test_patched.py FRAMEWORK`, it trains three steps by the framework's own code on the CPU, the second
of which overflows, and prints the class of the scaler, and after each step whether the weights moved, and the scale.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import STRICT
from peer import imported, make_importable

import scaler_triton

INPUTS = [torch.full((2, 2), number) for number in (1.0, math.inf, 1.0)]
PACKAGES = {"MONAI": "monai.engines", "mmengine for FSDP": "mmengine"}


class Record:
    """What the weights and the scale did in each step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.steps = model, []
        self.before = self.weights()

    def weights(self) -> torch.Tensor:
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def __call__(self, scaler: Any) -> None:
        after = self.weights()
        assert after.isfinite().all()
        self.steps.append((not torch.equal(after, self.before), scaler.get_scale()))
        self.before, self.scaler = after, scaler


def line() -> tuple[torch.nn.Module, torch.optim.Optimizer, Record]:
    """Return a small model, its optimizer and what records its steps."""
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), Record(model)


def without_gpu() -> None:
    """Let a scaler that is built for "cuda", and would be disabled here, be one for the CPU."""
    build = scaler_triton.GradScaler.__init__

    def built(scaler: Any, device: str = "cuda", *numbers: Any, **options: Any) -> None:
        build(scaler, "cpu", *numbers, **options)

    scaler_triton.GradScaler.__init__ = built


def with_timm() -> Record:
    from timm.utils import NativeScaler

    model, optimizer, record = line()
    scaler = NativeScaler(device="cpu")
    for inputs in INPUTS:
        optimizer.zero_grad()
        scaler(model(inputs).sum(), optimizer, clip_grad=1.0, parameters=model.parameters())
        record(scaler._scaler)
    return record


def with_monai() -> Record:
    from ignite.engine import Events
    from monai.engines import SupervisedTrainer

    without_gpu()
    model, optimizer, record = line()
    trainer = SupervisedTrainer(
        device="cpu",
        max_epochs=1,
        train_data_loader=[{"image": inputs, "label": torch.zeros(2, 1)} for inputs in INPUTS],
        network=model,
        optimizer=optimizer,
        loss_function=torch.nn.functional.mse_loss,
        amp=True,
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: record(trainer.scaler))
    trainer.run()
    return record


def with_mmengine(**how: Any) -> Record:
    """Without its check for a GPU, behind which nothing needs one, and its autocast, whose import needs OpenCV."""
    from mmengine.optim import AmpOptimWrapper
    from mmengine.optim.optimizer import amp_optimizer_wrapper as its

    without_gpu()
    its.is_cuda_available = lambda: True
    model, optimizer, record = line()
    wrapper = AmpOptimWrapper(optimizer=optimizer, clip_grad={"max_norm": 1.0}, **how)
    for inputs in INPUTS:
        wrapper.update_params(model(inputs).sum())
        record(wrapper.loss_scaler)
    return record


def with_mmengine_for_fsdp() -> Record:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    record = with_mmengine(use_fsdp=True, loss_scale={"device": "cpu"})
    torch.distributed.destroy_process_group()
    return record


class Pair(torch.nn.Module):
    """Both halves of a model that compares images with texts: the texts' is the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.logit_scale = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(()))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> dict[str, torch.Tensor]:
        features = {"image_features": self.layer(images), "text_features": texts}
        return features | {"logit_scale": self.logit_scale.exp()}


class Batches(list[Any]):
    """One batch of two pairs, as open_clip's loop asks for it."""

    num_batches, num_samples = 1, 2


def with_open_clip() -> Record:
    """Run its loop. The scaler is built here, as by its `main`, which cannot be imported without pandas."""
    from open_clip import ClipLoss
    from open_clip_train.train import train_one_epoch

    model = Pair()
    optimizer, record = torch.optim.SGD(model.parameters(), lr=0.1), Record(model)
    scaler = torch.amp.GradScaler(device=torch.device("cpu"))
    named = {"device": "cpu", "precision": "amp", "grad_clip_norm": 1.0, "batch_size": 2, "world_size": 1, "rank": 0}
    off = dict.fromkeys(("distill", "skip_scheduler", "horovod", "wandb"), False)
    args = SimpleNamespace(**named, **off, accum_freq=1, log_every_n_steps=1)
    for epoch, inputs in enumerate(INPUTS):
        data = SimpleNamespace(set_epoch=lambda _: None, dataloader=Batches([(inputs, torch.eye(2))]))
        train_one_epoch(model, {"train": data}, ClipLoss(), epoch, optimizer, scaler, lambda _: None, None, args)
        record(scaler)
    return record


FRAMEWORKS = {
    "timm": with_timm,
    "MONAI": with_monai,
    "mmengine": with_mmengine,
    "mmengine for FSDP": with_mmengine_for_fsdp,
    "open_clip": with_open_clip,
}


@pytest.mark.heavy
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_its_scaler_is_ours_and_skips_only_the_step_that_overflows(framework: str) -> None:
    """Patching first gives no warning."""
    make_importable()
    imported(PACKAGES.get(framework, framework))
    command = [sys.executable, *STRICT, __file__, framework]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    kinds, steps = json.loads(run.stdout.splitlines()[-1])
    assert [framework == "mmengine for FSDP", True] == [kind in kinds for kind in ("ShardedGradScaler", "ours")]
    assert steps == [[True, 2.0**16], [False, 2.0**15], [True, 2.0**15]]


IMPORTED_FIRST = """
import warnings
with warnings.catch_warnings(action="ignore"):
    import mmengine.optim, monai.engines
import scaler_triton
with warnings.catch_warnings(action="always", record=True) as caught:
    scaler_triton.patch_torch()
warned = " ".join(str(warning.message) for warning in caught)
assert "mmengine.optim.optimizer.amp_optimizer_wrapper" in warned, warned
assert "monai" not in warned, warned  # it looks the class up when it builds one
"""


@pytest.mark.heavy
def test_a_framework_that_took_torchs_class_before_is_named() -> None:
    imported("mmengine")
    subprocess.run([sys.executable, *STRICT, "-c", IMPORTED_FIRST], check=True, timeout=300)


if __name__ == "__main__":
    scaler_triton.patch_torch()
    warnings.simplefilter("ignore")  # of what they import
    make_importable()
    record = FRAMEWORKS[sys.argv[1]]()
    classes = type(record.scaler).__mro__
    ours = ["ours"] if type(record.scaler).__module__.startswith("scaler_triton.") else []
    print(json.dumps(([cls.__name__ for cls in classes] + ours, record.steps)))
