"""The attributes of a scaler, declared once for all of its mixins."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from scaler_triton import dispatch, limits
from scaler_triton.records import Records
from scaler_triton.stats import Counters, Lagging

if TYPE_CHECKING:
    from scaler_triton.flag_buffer import FlagBuffer
    from scaler_triton.kernels.update_scale import DevicePolicy
    from scaler_triton.limits import Limits

    _Base = torch.amp.GradScaler
else:
    _Base = object


class ScalerAttributes(_Base):
    """A scaler's settings, its state, and what it caches of its optimizers."""

    if TYPE_CHECKING:  # else typing.get_type_hints() would look for names that are imported for it only
        _is_sharded: bool  # whether all ranks of the process group must agree, whatever the parameters are
        _allow_fp16: bool  # whether unscale_ takes fp16 gradients
        process_group: Any  # the ranks that must agree; None: the default group, or the parameters' meshes
        _backend: str
        _limits: Limits
        _check_unscaled: bool
        _warned_fsdp1: bool
        _warned_apart: bool

        # fp32, one element; None before the first `scale`: who reads it calls `_require_scale` or `_make_scale` first.
        _scale: Tensor
        _growth_tracker: Tensor | None  # int32, one element
        _counters: Counters
        _lagging: Lagging
        _device_policies: dict[torch.device, DevicePolicy]

        _per_optimizer_states: Any  # this step's StepStates, by the optimizer's id
        _records: Records
        _flag_buffers: dict[torch.device, FlagBuffer]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Public subclasses have an `__init__` of their own, which sets what torch's class has.
        self = super().__new__(cls)
        vars(self).update(defaults())
        return self


def fresh() -> dict[str, Any]:
    """Return the attributes that are created anew for each scaler, copies included."""
    return {
        "_counters": Counters(),
        "_lagging": Lagging(),
        "_device_policies": {},
        "_per_optimizer_states": defaultdict(_refresh_per_optimizer_state),
        "_records": Records(),
        "_flag_buffers": {},
    }


def defaults() -> dict[str, Any]:
    """Return what a scaler has that torch's does not, as `__init__` leaves it by default, and what is `fresh`."""
    settings = {"_limits": limits.NO_LIMITS, "_check_unscaled": False, "process_group": None}
    warned = {"_warned_fsdp1": False, "_warned_apart": False}
    return {"_backend": dispatch.usual_backend(), **settings, **warned, **fresh()}
