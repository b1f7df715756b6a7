"""Where and with what a number was measured."""

import datetime
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Machine:
    """What every row of a CSV carries along."""

    device: str
    driver: str
    torch: str
    triton: str
    python: str
    commit: str
    date: str


def here() -> Machine:
    """Return what this process runs on."""
    return Machine(
        device=_device(),
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        torch=torch.__version__,
        triton=_version("triton"),
        python=platform.python_version(),
        commit=_commit(),
        date=datetime.date.today().isoformat(),
    )


def _device() -> str:
    """Return the device as a file name: the GPU's model, or how many cores a CPU has for us."""
    if torch.cuda.is_available():
        return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    return f"cpu-{len(os.sched_getaffinity(0))}-cores"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Return the commit, or where git has none, as in a copy of the tree, what the environment's COMMIT says."""
    commit = _output("git", "rev-parse", "--short", "HEAD")
    changed = commit and _output("git", "status", "--porcelain", "--", "scaler_triton", "kernels")
    return f"{commit}+changes" if changed else commit or os.environ.get("COMMIT", "")


def _output(*command: str) -> str:
    """Return what a command prints; nothing where it is missing or fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
