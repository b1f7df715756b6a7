"""DeepSpeed's `torch_autocast` in fp16 calls `torch.amp.GradScaler` wrongly, which no class can mend.

As a program, `python test_deepspeed.py CASE [patched]`, it trains one rank on the CPU and prints what came of it.
"""

import json
import os
import socket
import sys
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from peer import imported, printed_by
from torch import nn

import scaler_triton


class Case(NamedTuple):
    factor: float = 1.0  # of the loss
    lr: float = 1.0
    groups: int = 1  # of parameters
    clip: float = 0.0
    steps: int = 3


CASES = {"overflow": Case(factor=3e4, lr=1e-6, steps=12), "groups": Case(groups=2), "clip": Case(clip=1.0, steps=1)}


def train(case: Case, by_deepspeed: bool) -> dict[str, Any]:
    """Train under ZeRO-1, or in a loop that calls the scaler as it is meant; return what came of it."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    parts = [model[0], model[2]] if case.groups == 2 else [model]
    optimizer = torch.optim.SGD([{"params": [*part.parameters()]} for part in parts], lr=case.lr)
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(7))
    if by_deepspeed:
        engine, scaler = new_engine(model, optimizer, case.clip)
    else:
        engine, scaler = None, scaler_triton.GradScaler("cpu")
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for _ in range(case.steps):
        with torch.autocast("cpu", torch.float16):
            loss = (engine or model)(inputs).float().square().mean() * case.factor
        if engine is not None:
            engine.backward(loss)
            engine.step()
            continue
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if case.clip:
            scaler.clip_grad_norm_(optimizer, case.clip)
        scaler.step(optimizer)
        scaler.update()
    skipped = scaler.stats().skipped if engine is None else engine.skipped_steps
    moved = (nn.utils.parameters_to_vector(model.parameters()) - before).norm().item()
    numbers = {"scale": scaler.get_scale(), "tracker": scaler._get_growth_tracker(), "skipped": skipped}
    return {"made by": type(scaler).__module__, "moved": moved, **numbers}


def new_engine(model: nn.Module, optimizer: torch.optim.SGD, clip: float) -> tuple[Any, Any]:
    """Return DeepSpeed's engine and its scaler."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": clip,
    }
    engine, zero, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, zero.torch_autocast_gradscaler


@pytest.mark.heavy
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_no_class_can_mend_how_it_is_called(name: str, patched: bool) -> None:
    imported("deepspeed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    paths = os.pathsep.join(sys.path)
    theirs = printed_by(__file__, name, *["patched"] * patched, PYTHONPATH=paths, **place, **rank)
    right = train(CASES[name], by_deepspeed=False)
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
    print("\n" + json.dumps(train(CASES[sys.argv[1]], by_deepspeed=True)))
