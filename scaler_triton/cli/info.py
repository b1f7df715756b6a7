"""`python -m scaler_triton info`: versions, GPUs, the backend of each device and dtype, launch configurations."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import warnings
from typing import TYPE_CHECKING

from scaler_triton import __version__
from scaler_triton.cli.console import driver_version, fitted, requested_backend
from scaler_triton.text import count_of, error_line, one_line

if TYPE_CHECKING:
    import torch

HELP = "show versions, devices, the backend of each and why, and the launch configurations in use"
DTYPES = ("float16", "bfloat16", "float32", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Print everything and return the exit status."""
    import torch

    requested = requested_backend()
    if requested is None:
        return 2
    gpus, note = find_gpus()
    print(fitted(f"{version_lines()}\n\n{note}", sys.stdout))
    for device in (torch.device("cpu"), *gpus):
        print(fitted("\n" + "\n".join(device_lines(device, requested)), sys.stdout), flush=True)
    return 0


def version_lines() -> str:
    """Return the versions of everything involved, and the backend that the environment asks for."""
    import torch

    from scaler_triton.core.dispatch import ENV_VARIABLE

    asked = os.environ.get(ENV_VARIABLE)
    unset = "not set" if asked is None else "empty"
    hip = torch.version.hip and f"ROCm {torch.version.hip}"
    rows = {
        "scaler_triton": __version__,
        "torch": torch.__version__,
        "triton": triton_version(),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "CUDA": torch.version.cuda or hip or "none: this torch is built without it",
        "backend": f"{asked} ({ENV_VARIABLE})" if asked else f"auto ({ENV_VARIABLE} is {unset})",
    }
    return "\n".join(f"{name:<14}{value}" for name, value in rows.items())


def triton_version() -> str:
    """Return Triton's version and whether it interprets kernels, or why it cannot be imported."""
    try:
        import triton
    except Exception as error:  # a broken installation fails in other ways, too
        return f"none ({error_line(error)}): torch's own ops are used"
    interprets = ", which interprets: TRITON_INTERPRET is set" if triton.knobs.runtime.interpret else ""
    return f"{triton.__version__}{interprets}"


def find_gpus() -> tuple[list[torch.device], str]:
    """Return the GPUs that torch can use and a sentence about them; without any, it quotes torch's warnings."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        return [torch.device("cuda", i) for i in range(count)], f"{count_of(count, 'GPU')}, driver {driver_version()}."
    return [], "No GPU here." + "".join(f" torch says: {one_line(warning.message)}" for warning in caught)


def device_lines(device: torch.device, requested: str) -> list[str]:
    """Return a device, the backend of each dtype there and why, and on a GPU the kernels' launch configurations."""
    import torch

    head = str(device)
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        head += f": {gpu.name}, capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.1f} GiB"
    dtypes: dict[str, list[str]] = {}
    for name in DTYPES:
        dtypes.setdefault(explain(device, getattr(torch, name), requested), []).append(name)
    lines = [head, *(f"  {', '.join(names)}: {backend}" for backend, names in dtypes.items())]
    if device.type == "cuda" and sys.modules.get("triton"):
        from scaler_triton.kernels.config import describe

        lines += ["  launch configurations", *(f"    {line}" for line in describe(device))]
    return lines


def explain(device: torch.device, dtype: torch.dtype, requested: str) -> str:
    """Return the backend of a dtype and the reason; this tries Triton out if it may be used."""
    from scaler_triton.core.dispatch import choose, reason_for

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning of a failure repeats the reason
        try:
            backend = choose(device, dtype, requested)
        except RuntimeError as error:
            return f"none ({error_line(error.__cause__) if error.__cause__ else one_line(error)})"
    return f"{backend} ({one_line(reason_for(device, dtype, requested))})"
