"""Frameworks that build the scaler themselves build ours after `patch_torch()`, and their own code steps with it.

As a program, `python test_patched.py FRAMEWORK`, it trains three steps by the framework's own code on the CPU, the
second of which overflows, and prints the scaler's classes, and after each step whether the weights moved and the scale.
"""

import json
import math
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peer import make_importable, printed_by

import scaler_triton

INPUTS = [torch.full((2, 2), number) for number in (1.0, math.inf, 1.0)]


class Record:
    """A small model, its optimizer, and what the weights and the scale did in each step."""

    def __init__(self) -> None:
        self.model, self.steps = torch.nn.Linear(2, 2), []
        self.optimizer, self.before = torch.optim.SGD(self.model.parameters(), lr=0.1), self.weights()

    def weights(self) -> torch.Tensor:
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def __call__(self, scaler: Any) -> None:
        after = self.weights()
        assert after.isfinite().all()
        self.steps.append((not torch.equal(after, self.before), scaler.get_scale()))
        self.before, self.scaler = after, scaler


def without_gpu() -> None:
    """Let a scaler that is built for "cuda", and would be disabled here, be one for the CPU."""
    build = scaler_triton.GradScaler.__init__

    def built(scaler: Any, device: str = "cuda", *numbers: Any, **options: Any) -> None:
        build(scaler, "cpu", *numbers, **options)

    scaler_triton.GradScaler.__init__ = built


def with_timm(record: Record) -> None:
    from timm.utils import NativeScaler

    scaler = NativeScaler(device="cpu")
    for inputs in INPUTS:
        record.optimizer.zero_grad()
        loss = record.model(inputs).sum()
        scaler(loss, record.optimizer, clip_grad=1.0, parameters=record.model.parameters())
        record(scaler._scaler)


def with_monai(record: Record) -> None:
    from ignite.engine import Events
    from monai.engines import SupervisedTrainer

    without_gpu()
    trainer = SupervisedTrainer(
        device="cpu",
        max_epochs=1,
        train_data_loader=[{"image": inputs, "label": torch.zeros(2, 2)} for inputs in INPUTS],
        network=record.model,
        optimizer=record.optimizer,
        loss_function=torch.nn.functional.mse_loss,
        amp=True,
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: record(trainer.scaler))
    trainer.run()


def with_mmengine(record: Record, **how: Any) -> None:
    """Without its check for a GPU, behind which nothing needs one, and its autocast, whose import needs OpenCV."""
    from mmengine.optim import AmpOptimWrapper
    from mmengine.optim.optimizer import amp_optimizer_wrapper as its

    without_gpu()
    its.is_cuda_available = lambda: True
    wrapper = AmpOptimWrapper(optimizer=record.optimizer, clip_grad={"max_norm": 1.0}, **how)
    for inputs in INPUTS:
        wrapper.update_params(record.model(inputs).sum())
        record(wrapper.loss_scaler)


def with_mmengine_for_fsdp(record: Record) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with_mmengine(record, use_fsdp=True, loss_scale={"device": "cpu"})
    torch.distributed.destroy_process_group()


def with_open_clip(record: Record) -> None:
    """Run its loop. The scaler is built here, as by its `main`, which cannot be imported without pandas."""
    from open_clip import ClipLoss
    from open_clip_train.train import train_one_epoch

    class Pair(torch.nn.Module):
        """Both halves of a model that compares images with texts: the texts' is the identity."""

        logit_scale = torch.ones(())

        def forward(self, images: torch.Tensor, texts: torch.Tensor) -> dict[str, torch.Tensor]:
            features = {"image_features": record.model(images), "text_features": texts}
            return features | {"logit_scale": self.logit_scale}

    class Batches(list[Any]):
        num_batches, num_samples = 1, 2

    scaler = torch.amp.GradScaler(device=torch.device("cpu"))
    named = {"device": "cpu", "precision": "amp", "grad_clip_norm": 1.0, "batch_size": 2, "world_size": 1, "rank": 0}
    off = dict.fromkeys(("distill", "skip_scheduler", "horovod", "wandb"), False)
    args = SimpleNamespace(**named, **off, accum_freq=1, log_every_n_steps=1)
    rest = record.optimizer, scaler, lambda _: None, None, args
    for epoch, inputs in enumerate(INPUTS):
        data = SimpleNamespace(set_epoch=lambda _: None, dataloader=Batches([(inputs, torch.eye(2))]))
        train_one_epoch(Pair(), {"train": data}, ClipLoss(), epoch, *rest)
        record(scaler)


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
    from helpers import STRICT  # the program does not find it

    home, kinds, steps = printed_by(*STRICT, __file__, framework)
    assert home == "scaler_triton"
    assert ("ShardedGradScaler" in kinds) == (framework == "mmengine for FSDP")
    assert steps == [[True, 2.0**16], [False, 2.0**15], [True, 2.0**15]]


def main(framework: str) -> None:
    scaler_triton.patch_torch()
    warnings.simplefilter("ignore")  # of what they import
    make_importable()
    record = Record()
    FRAMEWORKS[framework](record)
    kind = type(record.scaler)
    print(json.dumps([kind.__module__.partition(".")[0], [cls.__name__ for cls in kind.__mro__], record.steps]))


if __name__ == "__main__":
    main(sys.argv[1])
