"""The choice between Triton and torch for a device; CUDA graph capture, one-time waits and compiled callers."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor

Backend = Literal["triton", "torch"]
Task = str  # a trial of `kernels/trial.py`; that of "unscaling" comes before any other

if torch.__version__ < "2.10.0a0":
    raise ImportError(f"scaler_triton needs torch 2.10 or newer, got {torch.__version__}: pip install 'torch>=2.10'")

ENV_VARIABLE = "SCALER_TRITON_BACKEND"
_CHOICES = ("auto", "triton", "torch")
# What to do about errors of Triton and torch, by a part of their text.
_REMEDIES = (
    ("no module named 'triton'", "pip install triton, on Windows triton-windows"),
    ("c compiler", "install a C compiler, such as gcc, or name one in the environment variable CC"),
    ("no kernel image", "this torch was built without this GPU: install one from an index that has it"),
    ("ptxas", "this triton does not compile for this GPU: triton 3.6 to 3.9 do from sm_70 on"),
)

# What `os.environ` looks into, which is private to it: asking it takes as long as torch's op on a gradient.
_variables: Mapping[Any, Any] | None = getattr(os.environ, "_data", None)
_KEY = os.environ.encodekey(ENV_VARIABLE)

# Whether the current GPU's stream is captured, asked several times a step: this is what torch's Python calls.
is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)

_log = logging.getLogger(__name__)
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):  # else a child may wait for ever for what another thread of its parent held
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]
_chosen: dict[tuple[torch.device, torch.dtype, str, Task], tuple[Backend, str]] = {}  # with the reason
_warned: set[torch.device] = set()


def check_backend(backend: str | None) -> str:
    """Return the backend asked for: the argument, else the environment's, else "auto"; raise ValueError if unknown."""
    if backend is None and _variables is not None and _KEY not in _variables:
        return "auto"
    source, value = ("backend", backend) if backend is not None else (ENV_VARIABLE, os.environ.get(ENV_VARIABLE))
    value = value or "auto"
    if value not in _CHOICES:
        raise ValueError(f"{source} must be one of {', '.join(_CHOICES)}, got {value!r}")
    return value


def usual_backend() -> str:
    """Return the backend that the environment asks for, "auto" if it names none or an unknown one."""
    value = os.environ.get(ENV_VARIABLE)
    return value if value in _CHOICES else "auto"


def choose(device: torch.device, dtype: torch.dtype, requested: str, *, task: Task = "unscaling") -> Backend:
    """Return the backend of a task for tensors of `dtype` on `device`, by a trial run.

    Raises: RuntimeError with the cause if "triton" was requested and does not work there; torch.OutOfMemoryError if the
        trial ran out of memory, which decides nothing.
    """
    key = (device, dtype, requested, task)
    choice = _chosen.get(key)
    if choice is not None:
        return choice[0]
    if task != "unscaling" and choose(device, dtype, requested) == "torch":
        return "torch"
    with _lock:
        if key not in _chosen:
            name = str(dtype).removeprefix("torch.")
            place = f"{name if task == 'unscaling' else f'{task} {name}'} on {device}"
            backend, reason = _chosen[key] = _decide(*key, place)
            _log.debug("%s is served by %s: %s", place, backend, reason)
        return _chosen[key][0]


def choose_for_scale(scale: Tensor, requested: str) -> Backend:
    """Return the backend that updates `scale`: a kernel needs a plain fp32 tensor."""
    if scale.dtype is not torch.float32 or type(scale) is not Tensor:
        return "torch"
    return choose(scale.device, scale.dtype, requested)


def stream_of(scale: Tensor, requested: str) -> Callable[[], int | None]:
    """Return a function that returns the handle of the current stream, None where no kernel updates the scale."""
    if not scale.is_cuda or choose_for_scale(scale, requested) == "torch":
        return type(None)  # calling it returns None
    query: Callable[[], int] = kernels().launch.stream_query(scale.device)
    return query


def backend_so_far(kind: str, requested: str) -> str:
    """Return the backend chosen for devices of a type ("cuda"), without trying any: "auto" before the first choice."""
    backends = {
        backend for (device, *key), (backend, _) in [*_chosen.items()] if (device.type, key[1]) == (kind, requested)
    }
    if backends:
        return " and ".join(sorted(backends, reverse=True))
    return "torch" if requested == "auto" and kind != "cuda" else requested


def reason_for(device: torch.device, dtype: torch.dtype, requested: str) -> str:
    """Return the reason for the choice that `choose` made."""
    return _chosen[device, dtype, requested, "unscaling"][1]


class _Kernels:
    """The kernels' modules, imported on first use: triton is slow to import and may be missing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        module = import_module(f"scaler_triton.kernels.{name}")
        setattr(self, name, module)
        return module


_kernels = _Kernels()


def kernels() -> Any:
    """Return the kernels' modules as attributes."""
    return _kernels


def _decide(device: torch.device, dtype: torch.dtype, requested: str, task: Task, place: str) -> tuple[Backend, str]:
    if requested == "torch":
        return "torch", "asked for"
    if requested == "auto" and device.type != "cuda":
        return "torch", "Triton is chosen for CUDA only"
    refuse_capture(device, f"the first step with {place}")
    try:
        with sync_allowed(device):
            getattr(kernels().trial, task)(device, dtype)
    except torch.OutOfMemoryError:
        raise  # this says nothing about Triton: the next call tries again
    except Exception as cause:
        remedy = next((text for sign, text in _REMEDIES if sign in f"{type(cause).__name__} {cause}".lower()), "")
        reason = f"{remedy}{remedy and '; '}{type(cause).__name__}: {cause}"  # a cause may be long, and cut where shown
        if requested == "triton":
            instead = f"backend='auto' or {ENV_VARIABLE}=auto takes torch's ops there"
            raise RuntimeError(f"backend='triton' does not work for {place}: {reason}; {instead}") from cause
        if device not in _warned:
            _warned.add(device)
            text = f"Triton does not work for {place}, so torch's own ops are used there ({reason})"
            warnings.warn(text, RuntimeWarning, stacklevel=stacklevel())
        return "torch", reason
    return "triton", f"{'asked for' if requested == 'triton' else requested}, and a trial run was right"


def is_captured(tensor: Tensor) -> bool:
    """Return whether ops on `tensor` are being captured into a CUDA graph instead of run."""
    return tensor.is_cuda and is_capturing()


def refuse_capture(device: torch.device, what: str) -> None:
    """Raise RuntimeError while a graph is captured on `device`: `what` must have run once before."""
    if device.type == "cuda" and torch.cuda.is_available() and is_capturing():
        raise RuntimeError(f"{what} cannot be captured in a graph: take one step like it before")


def outside_transforms() -> AbstractContextManager[object]:
    """Return a context in which torch.func's transforms do not see tensors: in them new ones would have no address."""
    module = sys.modules.get("torch._functorch.pyfunctorch")
    leave: Any = getattr(module, "temporarily_clear_interpreter_stack", nullcontext)  # private to torch
    return leave()  # type: ignore[no-any-return]


@contextmanager
def sync_allowed(device: torch.device) -> Iterator[None]:
    """Permit a one-time wait, so that `torch.cuda.set_sync_debug_mode` shows only waits inside the training loop."""
    asked = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    mode = torch.cuda.get_sync_debug_mode() if asked else 0
    if mode:
        torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        if mode:
            torch.cuda.set_sync_debug_mode(mode)


def stacklevel(*packages: str) -> int:
    """Return the `stacklevel` with which a warning names the innermost line outside this package, or these."""
    level, frame = 1, sys._getframe(1)
    inside = packages or ("scaler_triton",)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in inside:
        level, frame = level + 1, frame.f_back
    return level


_NOT_TRACED = "a scaler runs beside compiled code, not in it; compiled callers have scaler_triton.ops"


def skip_tracing(cls: type) -> None:
    """Make the methods of a class run uncompiled under `torch.compile`, as a plan's addresses must not enter a graph.

    Equivalent PyTorch: `torch.compiler.disable` on each method, but without a wrapper around every call and without
    importing Dynamo. A compiled function, such as an optimizer's step, still runs compiled within them. Names such as
    `__init__` are left out, as Dynamo treats them specially.
    """
    for name, member in vars(cls).items():
        if not isinstance(member, FunctionType) or name.startswith("__"):
            continue
        vars(member).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_NOT_TRACED)
        with suppress(ImportError):  # private to torch, and needed only for torch.compile
            from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

            set_code_exec_strategy(member.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
