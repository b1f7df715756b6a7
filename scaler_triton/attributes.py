"""The attributes of a scaler, named once for all of its mixins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from scaler_triton.last_steps import LastSteps
from scaler_triton.left_unscaled import LeftUnscaled
from scaler_triton.plan_cache import PlanCache
from scaler_triton.stats import Counters, Lagging

if TYPE_CHECKING:
    from scaler_triton.flag_buffer import FlagBuffer
    from scaler_triton.kernels.update_scale import DevicePolicy
    from scaler_triton.limits import Limits

    _Base = torch.amp.GradScaler
else:
    _Base = object


class ScalerAttributes(_Base):
    """What a scaler was told, what it is at, and what it knows of its optimizers."""

    _is_sharded: bool  # whether all ranks of the process group must agree, whatever the parameters are
    _allow_fp16: bool  # whether unscale_ takes fp16 gradients
    process_group: Any  # the ranks that must agree; None: the default group, or those that the parameters tell
    _backend: str
    _limits: Limits
    _max_consecutive_skips: int | None
    _check_unscaled: bool
    _warned_fsdp1: bool
    _warned_apart: bool

    # fp32, one element; None until first used: `_initialised_scale` or `_make_scale` comes before all who read it.
    _scale: Tensor
    _growth_tracker: Tensor | None  # int32, one element
    _counters: Counters
    _lagging: Lagging
    _device_policies: dict[torch.device, DevicePolicy]

    _per_optimizer_states: Any  # of this step, a StepState each, by the optimizer's id
    _plans: PlanCache
    _flag_buffers: dict[torch.device, FlagBuffer]
    _last_steps: LastSteps
    _left_unscaled: LeftUnscaled


def fresh(counters: Sequence[int] | None = None) -> dict[str, Any]:
    """Return what a new scaler begins with, and a copy, which has its own optimizers.

    Args:
        counters: what was counted so far; None: nothing.
    """
    return {
        "_counters": Counters() if counters is None else Counters(counters),
        "_lagging": Lagging(),
        "_device_policies": {},
        "_per_optimizer_states": defaultdict(_refresh_per_optimizer_state),
        "_plans": PlanCache(),
        "_flag_buffers": {},
        "_last_steps": LastSteps(),
        "_left_unscaled": LeftUnscaled(),
    }
