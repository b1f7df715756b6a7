"""The names that the parameters of optimizers have in their model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from scaler_triton.placement import DDP_SPEC, is_dtensor, local_tensor

# What FSDP1, activation checkpointing and torch.compile add to the names of wrapped modules.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_NO_NAMES = "model must be a module or what its named_parameters() gives"


def named_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's parameters by name: those that optimizers hold, also while modules hold others.

    From a forward until the end of backward, FSDP2's modules may hold unsharded parameters instead; from the first
    forward on, those of DDP over tensor parallel hold DTensors over its parameters' memory.

    Args:
        model: any module; left as it is.
    """
    shards = _shards(model) if "torch.distributed.fsdp" in sys.modules else {}
    for name, parameter in model.named_parameters():
        yield name, shards.get(id(parameter), parameter)
    yield from _named_by_ddp(model)


def names_by_id(model: nn.Module | Iterable[tuple[str, Tensor]] | None) -> dict[int, str]:
    """Return parameters' names by their ids, without the parts that wrappers add.

    Args:
        model: a module, or what its `named_parameters()` gives; None: there are no names.

    Raises: TypeError naming `model` for what is neither.
    """
    named = named_parameters(model) if isinstance(model, nn.Module) else () if model is None else model
    if not isinstance(named, Iterable):
        raise TypeError(f"{_NO_NAMES}, got {type(named).__name__}")
    return dict(map(_checked_pair, named))


def _checked_pair(pair: Any) -> tuple[int, str]:
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
        raise TypeError(f"{_NO_NAMES}, got {type(pair).__name__} for a name and a tensor")
    name, parameter = pair
    if not isinstance(name, str):  # such as a number, of `enumerate`
        raise TypeError(f"{_NO_NAMES}, got {type(name).__name__} for a name")
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return id(parameter), name


def _shards(model: nn.Module) -> dict[int, Tensor]:
    """Return FSDP2's sharded parameters by the ids of the modules' current ones; empty if this torch lacks the API."""
    try:
        places = [(each._module_info, each.sharded_param) for module in model.modules() for each in _sharded_in(module)]
        return {id(getattr(place.module, place.param_name)): shard for place, shard in places}
    except (ImportError, AttributeError):
        return {}


def _sharded_in(module: nn.Module) -> Iterator[Any]:
    from torch.distributed._composable_state import _get_module_state

    state: Any = _get_module_state(module)
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        if group is not None:
            yield from group.fsdp_params


def _named_by_ddp(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield DDP's parameters that are shards of tensor parallelism, once modules hold DTensors in their place."""
    parameters = [each for module in model.modules() for each in getattr(module, "_module_parameters", ())]
    shards = {each.data_ptr(): each for each in parameters if hasattr(each, DDP_SPEC)}
    for path, module in model.named_modules() if shards else ():
        for name, held in vars(module).items():
            if is_dtensor(held) and local_tensor(held).data_ptr() in shards:
                yield f"{path}.{name}", shards[local_tensor(held).data_ptr()]
