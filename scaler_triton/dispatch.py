"""Which backend serves a device: Triton for CUDA, torch for the rest, torch wherever Triton does not work."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from typing import Literal, cast

import torch

Backend = Literal["triton", "torch"]

ENV_VARIABLE = "SCALER_TRITON_BACKEND"
_CHOICES = ("auto", "triton", "torch")

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_chosen: dict[tuple[torch.device, str], Backend] = {}


def check_backend(backend: str | None) -> str:
    """Return the backend asked for: the argument, else the environment's, else "auto".

    Raises: ValueError naming where an unknown one came from.
    """
    source, value = ("backend", backend) if backend is not None else (ENV_VARIABLE, os.environ.get(ENV_VARIABLE))
    value = value or "auto"
    if value not in _CHOICES:
        raise ValueError(f"{source} must be one of {', '.join(_CHOICES)}, got {value!r}")
    return value


def choose(device: torch.device, requested: str) -> Backend:
    """Return the backend for tensors on `device`, decided once and logged; Triton is tried out before it is chosen.

    Args:
        device: with its index.
        requested: as `check_backend` returns it.

    Raises: RuntimeError with the cause if "triton" was requested and does not work on this device.
    """
    if requested == "torch":
        return "torch"
    key = (device, requested)
    with _lock:
        if key not in _chosen:
            _chosen[key] = _decide(device, requested)
        return _chosen[key]


def _decide(device: torch.device, requested: str) -> Backend:
    if requested == "auto" and device.type != "cuda":
        return _logged(device, "torch", "Triton is chosen for CUDA only")
    try:
        from scaler_triton.kernels.probe import probe

        probe(device)
    except Exception as cause:
        return _without_triton(device, requested, cause)
    return _logged(device, "triton", f"{requested}, and a trial run was right")


def _without_triton(device: torch.device, requested: str, cause: Exception) -> Backend:
    reason = f"{type(cause).__name__}: {cause}"
    if requested == "triton":
        raise RuntimeError(f"backend='triton' does not work on {device}: {reason}") from cause
    warnings.warn(
        f"Triton does not work on {device}, so torch's own ops unscale there ({reason})",
        RuntimeWarning,
        stacklevel=2,
    )
    return _logged(device, "torch", reason)


def _logged(device: torch.device, backend: str, reason: str) -> Backend:
    _log.debug("%s is served by %s: %s", device, backend, reason)
    return cast(Backend, backend)
