"""torch's names for scaler classes, what they mean with and without a patch, and scalers built of them."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded

from scaler_triton import GradScaler, ShardedGradScaler
from scaler_triton.patching import cpu_amp, cuda_amp

TorchPlain = torch.amp.GradScaler
TorchCuda = torch.cuda.amp.GradScaler
TorchCpu = torch.cpu.amp.GradScaler

NAMES = {
    "torch.GradScaler": (TorchPlain, GradScaler),
    "torch.amp.GradScaler": (TorchPlain, GradScaler),
    "torch.amp.grad_scaler.GradScaler": (TorchPlain, GradScaler),
    "torch.cuda.amp.GradScaler": (TorchCuda, cuda_amp.GradScaler),
    "torch.cuda.amp.grad_scaler.GradScaler": (TorchCuda, cuda_amp.GradScaler),
    "torch.cpu.amp.GradScaler": (TorchCpu, cpu_amp.GradScaler),
    "torch.cpu.amp.grad_scaler.GradScaler": (TorchCpu, cpu_amp.GradScaler),
    "torch.distributed.fsdp.sharded_grad_scaler.GradScaler": (TorchPlain, GradScaler),
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler": (TorchSharded, ShardedGradScaler),
}
OURS = dict(NAMES.values())


def scaler_names() -> dict[str, type]:
    """Return what every name of torch that means a scaler class means, wherever it is."""
    found = {}
    for module in [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "torch"]:
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if type in type(value).__mro__ and TorchPlain in value.__mro__:  # isinstance() would wake proxies
                found[f"{module.__name__}.{name}"] = value
    return found


def quietly(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build a scaler without hearing that its class is deprecated, or is for a GPU that is not there."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is (deprecated|enabled, but CUDA is not available)")
        return build(*args, **kwargs)


def built(cls: Any) -> Any:
    return quietly(cls, **no_device(cls), init_scale=8.0)


def no_device(cls: Any) -> dict[str, Any]:
    return {"device": "cpu"} if "device" in inspect.signature(cls).parameters else {}
