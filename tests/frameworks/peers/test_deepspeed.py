"""DeepSpeed's `torch_autocast` in fp16 calls `torch.amp.GradScaler` wrongly, which no class can mend.

As a program, `python test_deepspeed.py CASE [patched]`, it trains one rank on the CPU and prints what came of it.
"""

import json
import os
import socket
import subprocess
import sys
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from peer import imported
from torch import Tensor, nn

import scaler_triton


class Case(NamedTuple):
    """What is trained."""

    factor: float = 1.0  # of the loss
    lr: float = 1.0
    groups: int = 1  # of parameters
    clip: float = 0.0
    steps: int = 3


CASES = {"overflow": Case(factor=3e4, lr=1e-6, steps=12), "groups": Case(groups=2), "clip": Case(clip=1.0, steps=1)}


def new_model(case: Case) -> tuple[nn.Module, torch.optim.SGD, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    parts = [model[0], model[2]] if case.groups == 2 else [model]
    optimizer = torch.optim.SGD([{"params": [*part.parameters()]} for part in parts], lr=case.lr)
    return model, optimizer, torch.randn(4, 64, generator=torch.Generator().manual_seed(7))


def loss_of(model: Any, inputs: Tensor, case: Case) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        loss: Tensor = model(inputs).float().square().mean() * case.factor
    return loss


def flat(model: nn.Module) -> Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def by_deepspeed(case: Case) -> dict[str, Any]:
    """Train under ZeRO-1; return the scaler's module, scale and tracker, how many steps were skipped, the way moved."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    model, optimizer, inputs = new_model(case)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": case.clip,
    }
    engine, zero, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    scaler, before = zero.torch_autocast_gradscaler, flat(model)
    for _ in range(case.steps):
        engine.backward(loss_of(engine, inputs, case))
        engine.step()
    moved = (flat(model) - before).norm().item()
    numbers = {"scale": scaler.get_scale(), "tracker": scaler._get_growth_tracker(), "skipped": engine.skipped_steps}
    return {"made by": type(scaler).__module__, "moved": moved, **numbers}


def by_hand(case: Case) -> dict[str, Any]:
    """Train in a loop that calls the scaler as it is meant."""
    model, optimizer, inputs = new_model(case)
    scaler, before, skipped = scaler_triton.GradScaler("cpu"), flat(model), 0
    for _ in range(case.steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, inputs, case)).backward()
        if case.clip:
            scaler.clip_grad_norm_(optimizer, case.clip)
        scaler.step(optimizer)
        skipped += scaler.was_skipped(optimizer)
        scaler.update()
    moved = (flat(model) - before).norm().item()
    return {"scale": scaler.get_scale(), "tracker": scaler._get_growth_tracker(), "skipped": skipped, "moved": moved}


@pytest.mark.heavy
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_no_class_can_mend_how_it_is_called(name: str, patched: bool) -> None:
    imported("deepspeed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    environment = os.environ | place | rank | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, name, *["patched"] * patched]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    theirs, right = json.loads(done.stdout.splitlines()[-1]), by_hand(CASES[name])
    assert theirs["made by"].split(".")[0] == ("scaler_triton" if patched else "torch")
    if name == "overflow":  # it skips by its own check, and calls neither `step` nor `update`
        assert (theirs["skipped"], theirs["scale"], theirs["moved"]) == (12, 65536.0, 0.0)
        assert right["skipped"] < 12
        assert right["moved"] > 0.0
    elif name == "groups":  # it updates once for each group
        assert (theirs["tracker"], right["tracker"]) == (6, 3)
    else:  # it measures scaled gradients
        assert theirs["moved"] < 1e-4 < 0.1 < right["moved"]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "patched" in sys.argv:
        scaler_triton.patch_torch()
    print("\n" + json.dumps(by_deepspeed(CASES[sys.argv[1]])))
