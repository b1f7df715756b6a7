"""`python -m scaler_triton tune`: finds the fastest launch configuration for this GPU and remembers it."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaler_triton._version import __version__
from scaler_triton.cli.console import complain, driver_version, missing_packages, new_bar
from scaler_triton.text import one_line

if TYPE_CHECKING:
    import torch

    from scaler_triton.kernels.launch_config import LaunchConfig
    from scaler_triton.kernels.sweep import Figures, Timer, Workloads
    from scaler_triton.kernels.tuned_file import Origin

HELP = "find the fastest launch configuration for the current GPU, on scratch, and keep it for later runs"
HEAD = ["pass", "bytes", "warps x vectors x unroll", "span GB/s", "of copy", "mixed GB/s", "of copy", ""]
ALIGNMENT = ["left", "right", "right", "right", "right", "right", "right", "left"]
NOTE_WIDTH = 60  # characters; the file keeps all of it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the tuner's arguments."""
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write DEVICE.json there, to be shipped; default: the user's cache"
    )


def run(arguments: argparse.Namespace) -> int:
    """Tune, show all figures and write the file; return the exit status."""
    if refusal := why_not():
        return complain(refusal)
    import torch

    from scaler_triton.kernels.lookup import origin_of
    from scaler_triton.kernels.sweep import gpu_timer, gpu_workloads

    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    origin = origin_of(device)
    try:
        path = output_path(arguments.out, origin)
    except OSError as error:
        return complain(f"cannot write to {error.filename}: {error.strerror}")
    with torch.cuda.device(device):
        return tune(device, origin, path, gpu_workloads(properties.L2_cache_size), gpu_timer)


def why_not() -> str:
    """Return what keeps this process from tuning, in words; empty if nothing does."""
    if missing := missing_packages(["torch", "triton"]):
        return f"tune needs {', '.join(missing)}"
    import torch

    from scaler_triton.kernels.launcher import INTERPRETED

    if INTERPRETED:
        return "tune does nothing under TRITON_INTERPRET=1: an interpreter's time is not a GPU's"
    if not torch.cuda.is_available():
        return "tune needs a GPU, and there is none here"
    if missing := missing_packages(["tabulate"]):
        return f"tune needs {', '.join(missing)}: pip install {' '.join(missing)}"
    return ""


def output_path(out: Path | None, origin: Origin) -> Path:
    """Return the file that is going to be written, in a folder that exists and can be written to.

    Args:
        out: the folder for a file to be shipped; None: the user's own file, in the cache.
        origin: what is tuned.

    Raises: OSError naming the folder.
    """
    from scaler_triton.kernels.lookup import user_file
    from scaler_triton.kernels.tuned_file import file_stem

    path = out / f"{file_stem(origin.device)}.json" if out else user_file(origin)
    if path is None:
        raise FileNotFoundError(2, "there is no such folder, name one with --out", "the user's cache")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(13, "permission denied", str(path.parent))
    return path


def tune(device: torch.device, origin: Origin, path: Path, workloads: Workloads, timer: Timer) -> int:
    """Sweep, show all figures, write the file and return the exit status."""
    from scaler_triton.kernels import lookup, sweep, tuned_file

    try:
        with new_bar(f"tuning {origin.device}", sweep.count_steps()) as bar:
            figures = sweep.sweep(device, workloads, timer, bar.update)
    except RuntimeError as error:
        return complain(f"tune failed, and nothing is written: {str(error).splitlines()[0]}", 1)
    chosen = sweep.choose_all(figures)
    print(f"\n{figures_table(figures, chosen)}\n\n{summary(chosen)}")
    tuned = tuned_file.TunedFile(origin, chosen)
    try:
        tuned_file.write(path, tuned, provenance=provenance(device), measured=[_record(each) for each in figures])
    except OSError as error:
        return complain(f"cannot write {path}: {error.strerror}", 1)
    lookup.forget()
    print(f"written: {path}")
    return 0


def figures_table(figures: Sequence[Figures], chosen: Mapping[tuple[str, int], LaunchConfig]) -> str:
    """Return every candidate with its bandwidth, beside what torch's copy reached."""
    from tabulate import SEPARATING_LINE, tabulate

    rows: list[Any] = []
    for key, config in chosen.items():
        rows += [SEPARATING_LINE] if rows else []
        rows += [_row(each, config) for each in figures if (each.mode, each.itemsize) == key]
    return str(tabulate(rows, HEAD, disable_numparse=True, colalign=ALIGNMENT))


def summary(chosen: Mapping[tuple[str, int], LaunchConfig]) -> str:
    """Return what comes of it, in one sentence."""
    from scaler_triton.kernels.launch_config import DEFAULT
    from scaler_triton.kernels.sweep import MARGIN

    changed = sum(config != DEFAULT for config in chosen.values())
    rule = f"what replaces the default, {DEFAULT}, is more than {MARGIN:.0%} faster on both workloads"
    return f"{changed} of {len(chosen)} defaults replaced: {rule}."


def provenance(device: torch.device) -> dict[str, Any]:
    """Return where and when the figures were taken."""
    import torch

    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "scaler_triton": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "driver": driver_version(),
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["memory_bytes"] = properties.total_memory
        facts["l2_bytes"] = properties.L2_cache_size
        facts["multiprocessors"] = properties.multi_processor_count
    return facts


def _row(figures: Figures, chosen: LaunchConfig) -> list[str]:
    from scaler_triton.kernels.launch_config import DEFAULT

    row = [figures.mode, str(figures.itemsize), str(figures.config)]
    for name in ("span", "mixed"):
        speed = figures.gbps.get(name)
        row += ["", ""] if speed is None else [f"{speed:.0f}", f"{speed / figures.copy_gbps:.0%}"]
    notes = ["default"] if figures.config == DEFAULT else []
    notes += ["chosen"] if figures.config == chosen else []
    notes += [one_line(f"dropped: {figures.problem}", NOTE_WIDTH)] if figures.problem else []
    return [*row, ", ".join(notes)]


def _record(figures: Figures) -> dict[str, Any]:
    """Return a candidate's figures as they are written: four digits are more than repeat."""
    config = figures.config
    return {
        "mode": figures.mode,
        "itemsize": figures.itemsize,
        "config": [config.num_warps, config.vectors, config.unroll],
        "ms": {name: _rounded(value) for name, value in figures.ms.items()},
        "gbps": {name: _rounded(value) for name, value in figures.gbps.items()},
        "copy_gbps": _rounded(figures.copy_gbps),
        "problem": figures.problem[:1000],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
