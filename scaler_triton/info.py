"""`python -m scaler_triton info`: what is installed, which GPUs there are, what serves them and why."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import warnings
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, TypeVar

from scaler_triton._version import __version__
from scaler_triton.console import complain, driver_version
from scaler_triton.text import count_of, error_line, one_line

if TYPE_CHECKING:
    import torch

    from scaler_triton.kernels.lookup import Found

Group = TypeVar("Group", bound=Hashable)

HELP = "show versions, devices, the backend of each and why, and the launch configurations in use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Print everything and return the exit status."""
    import torch

    from scaler_triton.dispatch import check_backend

    try:
        requested = check_backend(None)
    except ValueError as error:
        return complain(str(error))
    gpus, note = find_gpus()
    print(f"{version_lines()}\n\n{note}\n\n{device_lines(torch.device('cpu'), requested)}\n", flush=True)
    for gpu in gpus:
        print(f"{gpu_lines(gpu, requested)}\n", flush=True)
    print(cache_line())
    return 0


def version_lines() -> str:
    """Return the versions of what takes part, and the backend that was asked for."""
    import torch

    from scaler_triton.dispatch import ENV_VARIABLE

    asked = os.environ.get(ENV_VARIABLE)
    hip = torch.version.hip and f"ROCm {torch.version.hip}"
    rows = {
        "scaler_triton": __version__,
        "torch": torch.__version__,
        "triton": triton_version(),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "CUDA": torch.version.cuda or hip or "none: this torch is built without it",
        "backend": f"{asked} ({ENV_VARIABLE})" if asked else f"auto ({ENV_VARIABLE} is not set)",
    }
    return "\n".join(f"{name:<14}{value}" for name, value in rows.items())


def triton_version() -> str:
    """Return Triton's version and whether it interprets kernels, or why there is none."""
    try:
        import triton
    except Exception as error:  # a broken one is no reason not to answer
        return f"none ({error_line(error)}): torch's own ops are used"
    interprets = ", which interprets: TRITON_INTERPRET is set" if triton.knobs.runtime.interpret else ""
    return f"{triton.__version__}{interprets}"


def find_gpus() -> tuple[list[torch.device], str]:
    """Return the GPUs that torch can use, and a sentence on them; where there is none, with what torch says."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        note = f"{count_of(count, 'GPU')}, driver {driver_version()}."
    else:
        note = "No GPU here." + "".join(f" torch says: {one_line(warning.message)}" for warning in said)
    return [torch.device("cuda", index) for index in range(count)], note


def device_lines(device: torch.device, requested: str) -> str:
    """Return what serves each dtype on a device, and why."""
    from scaler_triton.gradients import DTYPES

    reasons = [(str(dtype).removeprefix("torch."), explain(device, dtype, requested)) for dtype in DTYPES]
    return "\n".join([f"{device}", *(f"  {', '.join(names)}: {reason}" for reason, names in grouped(reasons))])


def gpu_lines(device: torch.device, requested: str) -> str:
    """Return a GPU, what serves it, and the launch configurations of its kernels."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    facts = f"{properties.name}, capability {properties.major}.{properties.minor}"
    head, *rest = device_lines(device, requested).splitlines()
    lines = [f"{head}: {facts}, {properties.total_memory / 2**30:.1f} GiB", *rest]
    return "\n".join(lines + config_lines(device) if sys.modules.get("triton") else lines)


def config_lines(device: torch.device) -> list[str]:
    """Return the launch configuration of each mode and element size, and the file that it comes from."""
    from scaler_triton.kernels import lookup
    from scaler_triton.kernels.launch_config import ITEMSIZES, MODES
    from scaler_triton.kernels.tuned_file import file_stem

    origin = lookup.origin_of(device)
    lines = ["  launch configurations, warps x vectors x unroll"]
    for mode in MODES:
        found = [(str(size), lookup.lookup(origin, mode, size)) for size in ITEMSIZES]
        lines += [f"    {mode}, {', '.join(sizes)} bytes: {source(each)}" for each, sizes in grouped(found)]
    user = lookup.user_file(origin)
    if user and not user.exists():
        others = len(list(user.parent.glob(f"{file_stem(origin.device)}-*.json")))
        lines += [f"    tuned for another Triton or other kernels, so not used: {others} files"] if others else []
    return lines


def source(found: Found) -> str:
    """Return a launch configuration and where it comes from, in words."""
    return f"{found.config}, {f'from {found.file}' if found.file else 'the default'}"


def cache_line() -> str:
    """Return where the user's tuned files are kept."""
    from scaler_triton.kernels.lookup import cache_folder

    folder = cache_folder()
    if folder is None:
        return "tuned files   none are kept: there is no home folder"
    return f"tuned files   {folder}{'' if folder.is_dir() else ' (not there yet: `tune` makes it)'}"


def explain(device: torch.device, dtype: torch.dtype, requested: str) -> str:
    """Return the backend of a dtype and the reason; Triton is tried out for it."""
    from scaler_triton.dispatch import choose, reason_for

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning says what is shown here
        try:
            backend = choose(device, dtype, requested)
        except RuntimeError as error:
            return f"none ({error_line(error.__cause__) if error.__cause__ else one_line(error)})"
    return f"{backend} ({one_line(reason_for(device, dtype, requested))})"


def grouped(pairs: Iterable[tuple[str, Group]]) -> list[tuple[Group, list[str]]]:
    """Return the names that share a value, in the order in which they came."""
    groups: dict[Group, list[str]] = {}
    for name, value in pairs:
        groups.setdefault(value, []).append(name)
    return list(groups.items())
