"""Chooses the backend for a device: Triton for CUDA, torch for the rest and wherever Triton does not work."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from typing import Literal

import torch

from scaler_triton import callers
from scaler_triton.cuda_graphs import refuse_capture
from scaler_triton.waiting import unnoticed

Backend = Literal["triton", "torch"]

ENV_VARIABLE = "SCALER_TRITON_BACKEND"
_CHOICES = ("auto", "triton", "torch")

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_chosen: dict[tuple[torch.device, torch.dtype, str, bool], tuple[Backend, str]] = {}  # with the reason
_warned: set[torch.device] = set()


def _renew_lock() -> None:
    """Take a new lock in a forked child, where one that another thread of the parent held is never released."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def check_backend(backend: str | None) -> str:
    """Return the backend asked for: the argument, else the environment's, else "auto".

    Raises: ValueError naming where an unknown one came from.
    """
    source, value = ("backend", backend) if backend is not None else (ENV_VARIABLE, os.environ.get(ENV_VARIABLE))
    value = value or "auto"
    if value not in _CHOICES:
        raise ValueError(f"{source} must be one of {', '.join(_CHOICES)}, got {value!r}")
    return value


def usual_backend() -> str:
    """Return the backend that the environment asks for, "auto" if it names none that there is."""
    value = os.environ.get(ENV_VARIABLE)
    return value if value in _CHOICES else "auto"


def choose(device: torch.device, dtype: torch.dtype, requested: str, *, clips: bool = False) -> Backend:
    """Return the backend for tensors of `dtype` on `device`, decided once; for Triton by a trial run of the kernels.

    Args:
        device: with its index.
        requested: as `check_backend` returns it.
        clips: for norms and clipping, whose kernels are tried on first use.

    Raises: RuntimeError with the cause if "triton" was requested and does not work there; torch.OutOfMemoryError if the
        trial ran out of memory, and nothing is decided then.
    """
    key = (device, dtype, requested, clips)
    known = _chosen.get(key)
    if known is not None:
        return known[0]
    if clips:
        choose(device, dtype, requested)
    with _lock:
        if key not in _chosen:
            _chosen[key] = _decide(*key)
        return _chosen[key][0]


def reason_for(device: torch.device, dtype: torch.dtype, requested: str) -> str:
    """Return the reason for the choice that `choose` made for these."""
    return _chosen[device, dtype, requested, False][1]


def choose_for_subclasses(device: torch.device, dtype: torch.dtype) -> Backend:
    """Return the backend for tensor subclasses, whatever was requested: torch, whose ops they implement themselves."""
    return _logged(f"a tensor subclass of {_place(device, dtype)}", "torch", "it implements these ops itself")[0]


def choose_for_scale(scale: torch.Tensor, requested: str, *, clips: bool = False) -> Backend:
    """As `choose`, for kernels that read the scale, which must be a plain fp32 tensor for that.

    Args:
        scale: one element.
        requested, clips: as `choose` takes them.
    """
    if scale.dtype is not torch.float32 or type(scale) is not torch.Tensor:
        return "torch"
    return choose(scale.device, scale.dtype, requested, clips=clips)


def _without_trial(device: torch.device, requested: str) -> str:
    """Return why torch is chosen without a trial of Triton; "" if Triton is to be tried."""
    if requested == "auto":
        return "" if device.type == "cuda" else "Triton is chosen for CUDA only"
    return "asked for" if requested == "torch" else ""


def _decide(device: torch.device, dtype: torch.dtype, requested: str, clips: bool) -> tuple[Backend, str]:
    unscales = _chosen.get((device, dtype, requested, False))
    if unscales is not None and unscales[0] == "torch":
        return unscales
    place = f"{'clipping ' if clips else ''}{_place(device, dtype)}"
    untried = _without_trial(device, requested)
    if untried:
        return _logged(place, "torch", untried)
    refuse_capture(device, f"the first step with {place}")
    try:
        from scaler_triton.kernels import probe

        with unnoticed(device):  # else that mode's error would be the reason why Triton does not work
            (probe.probe_clipping if clips else probe.probe)(device, dtype)
    except torch.OutOfMemoryError:
        raise  # says nothing about Triton: the next call tries again
    except Exception as cause:
        reason = f"{type(cause).__name__}: {cause}"
        if requested == "triton":
            remedy = f"backend='auto' or {ENV_VARIABLE}=auto takes torch's ops there"
            raise RuntimeError(f"backend='triton' does not work for {place}: {reason}; {remedy}") from cause
        _warn_once(device, f"Triton does not work for {place}, so torch's own ops are used there ({reason})")
        return _logged(place, "torch", reason)
    return _logged(place, "triton", f"{requested}, and a trial run was right")


def _place(device: torch.device, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} on {device}"


def _warn_once(device: torch.device, text: str) -> None:
    if device not in _warned:
        _warned.add(device)
        warnings.warn(text, RuntimeWarning, stacklevel=callers.stacklevel())


def _logged(place: str, backend: Backend, reason: str) -> tuple[Backend, str]:
    _log.debug("%s is served by %s: %s", place, backend, reason)
    return backend, reason
