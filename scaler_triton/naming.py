"""What the parameters that optimizers hold are called in their model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def named_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's parameters by name: FSDP2's shards, which optimizers hold, also while they are gathered.

    From a forward on, FSDP2's modules may hold whole parameters in their place until the next backward has ended.

    Args:
        model: any module; left as it is.
    """
    shards = dict(_shards(model)) if "torch.distributed.fsdp" in sys.modules else {}
    for name, parameter in model.named_parameters():
        yield name, shards.get(id(parameter), parameter)


def _shards(model: nn.Module) -> Iterator[tuple[int, Tensor]]:
    """Yield FSDP2's shards by the ids of what modules hold now."""
    from torch.distributed._composable_state import _get_module_state

    for module in model.modules():
        state: Any = _get_module_state(module)
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for each in (each for group in groups if group is not None for each in group.fsdp_params):
            place = each._module_info
            yield id(getattr(place.module, place.param_name)), each.sharded_param
