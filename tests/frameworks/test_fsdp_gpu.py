"""FSDP as Accelerate and the HF Trainer turn it on, which takes a GPU: one process, in a world of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# As torchrun starts a single rank: by these, Accelerate and the Trainer know that the run is distributed.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}

# As `accelerate launch` says it: the group then has gloo, too, for what whole states hold on the host.
WHOLE = {"ACCELERATE_USE_FSDP": "true", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def run(program: str, *arguments: str, needs: tuple[str, ...]) -> None:
    """Run a program of this folder in a process of its own: its process group is left open where it fails."""
    for package in needs:
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    folders = (HERE.parents[1], HERE.parent, HERE.parent / "distributed", os.environ.get("PYTHONPATH", ""))
    paths = os.pathsep.join(filter(None, map(str, folders)))
    environment = os.environ | ALONE | WHOLE | {"MASTER_PORT": "0", "PYTHONPATH": paths}
    command = [sys.executable, str(HERE / program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("version", [1, 2])
def test_accelerate(version: int, optimizer: str, tmp_path: Path) -> None:
    run("accelerate_on_gpu.py", str(version), optimizer, str(tmp_path / "saved"), needs=("accelerate",))


@pytest.mark.parametrize("version", [1, 2])
def test_trainer(version: int, tmp_path: Path) -> None:
    run("trainer_on_gpu.py", str(version), str(tmp_path), needs=("accelerate", "transformers"))
