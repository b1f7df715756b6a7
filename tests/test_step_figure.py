"""The figure of a clipped FSDP2 step shows what torch's scaler and ours do, in that order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from scaler_triton.mirror import HostMirror
from scaler_triton.verdict import Verdict
from step_figure import drawn
from test_clipping_launches import Launches
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from perf.bench_clip import CLIP, MOVES
from perf.grads import Still
from scaler_triton import GradScaler

pytestmark = [
    pytest.mark.usefixtures("two_ranks"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this counts on the CPU"),
]
ROOT = Path(__file__).parents[1]
# What is more or less than one small launch. The CPU does not show all of it: a reduction of torch's is one of a clone;
# on a GPU a norm begins with zeros and ends with a sum over chunks, and a number is copied before it is waited for.
DRAWN = {
    "aten::_amp_foreach_non_finite_check_and_unscale_": ["pass"],
    "aten::_foreach_norm": ["small", "pass", "small"],
    "aten::_foreach_mul_": ["pass"],
    "aten::_local_scalar_dense": ["small", "wait"],
    "aten::view_as": [],
    "_c10d_functional::all_reduce": ["small", "collective"],
    "_c10d_functional::_wrap_tensor_autograd": [],
    "_c10d_functional::wait_tensor": [],
    "c10d::allreduce_": ["collective"],
    "_sum_squares_kernel": ["pass"],
    "_clip_kernel": ["pass"],
    "wait": ["wait"],
    "step": ["theirs"],
}


class Noted(Still):
    """An optimizer that notes its steps, and does nothing."""

    def __init__(self, parameters: list[Tensor], launches: Launches) -> None:
        super().__init__(parameters)
        self.launches = launches

    def step(self) -> None:
        self.launches.seen.append("step")


def third_step(launches: Launches, scaler: Any, clip: Callable[[Any, Any], Any]) -> list[str]:
    """Return what a step launches once all is in place."""
    mesh = init_device_mesh("cpu", (2,))
    weights = [torch.nn.Parameter(distribute_tensor(torch.ones(6), mesh, [Shard(0)])) for _ in range(3)]
    for weight in weights:
        weight.grad = distribute_tensor(torch.ones(6), mesh, [Shard(0)])
    optimizer = Noted(weights, launches)
    for _ in range(3):
        scaler.scale(torch.ones(()))
        launches.seen.clear()
        launches.of(lambda: (clip(scaler, optimizer), scaler.step(optimizer), scaler.update()))
    return launches.seen


def figure(lane: str) -> list[str]:
    """Return the kinds of work that are drawn behind backward."""
    return [work.kind for work in drawn(lane)[1:] for _ in range(work.count)]


def kinds(launched: list[str]) -> list[str]:
    """Return the kinds of work that these are."""
    return [kind for name in launched for kind in DRAWN.get(name, ["small"])]


def moved(op: str) -> int:
    """Return the bytes an fp32 element that an op moves: it reads a list, and writes it if its schema says so."""
    packet = getattr(torch.ops.aten, op.removeprefix("aten::"))
    written = getattr(packet, packet.overloads()[0])._schema.arguments[0].alias_info
    return 8 if written is not None and written.is_write else 4


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="drawn for torch 2.13")
def test_torchs_step_is_drawn_as_it_is() -> None:
    def clip(scaler: Any, optimizer: Any) -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)

    launched = third_step(Launches(), torch.amp.GradScaler("cpu"), clip)
    assert kinds(launched) == figure("TORCH")
    passes = [moved(op) for op in launched if "pass" in DRAWN.get(op, [])]
    assert passes == [work.moved for work in drawn("TORCH") if work.kind == "pass"]
    assert sum(passes) == 4 * MOVES[CLIP]["torch"]


def test_our_step_is_drawn_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of its passes are counted in kernels/test_traffic.py."""
    launches, read = Launches(), HostMirror.read

    def noted(mirror: HostMirror) -> list[Any]:
        launches.seen.append("wait")
        return read(mirror)

    monkeypatch.setattr(HostMirror, "read", noted)
    # As on a GPU: the host sees a copy of the flag.
    monkeypatch.setattr(Verdict, "_host_status", property(lambda self: None, lambda self, status: None), raising=False)
    scaler = GradScaler("cpu", backend="triton")
    launched = third_step(launches, scaler, lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 0.5))
    assert kinds(launched) == figure("OURS")


DRAW = """
import runpy, sys, matplotlib
draw = runpy.run_path(sys.argv[1])["draw"]
draw.__globals__["OUT"] = sys.argv[2]
draw()
print(matplotlib.__version__)
"""


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_the_picture_is_what_its_script_draws(tmp_path: Path) -> None:
    script, picture = ROOT / "docs/draw_step.py", tmp_path / "step.svg"
    command = [sys.executable, "-c", DRAW, str(script), str(picture)]
    environment = os.environ | {"MPLBACKEND": "agg"}
    drawn_by = subprocess.check_output(command, env=environment, text=True, timeout=120).strip()
    if f"\nmatplotlib=={drawn_by}\n" not in (ROOT / "constraints.txt").read_text():
        pytest.skip(f"drawn by another matplotlib than {drawn_by}")
    assert picture.read_bytes() == (ROOT / "docs/step.svg").read_bytes()
