"""DDP's communication hooks that keep gradients from step to step: after an overflow, every later step overflows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from scaler_triton.text import one_line

_POISONED = (
    "[ST10] The communication hook {} keeps NaN or Inf of an earlier step in {}, and adds it to every later one: after "
    "each skip clear them on all ranks, {}"
)


def poisoned_hooks(model: Any) -> list[str]:
    """Return a line for each communication hook of a model's DDP whose state is not finite; waits for the device.

    PowerSGD's is the one that torch has: it feeds back errors, and starts from the factors of the step before.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    hooks = [each for module in modules for each in getattr(module, "_comm_hooks", ())]  # private to DDP
    lines = []
    for hook, state in hooks:
        slots = [name for each in type(state).__mro__ for name in getattr(each, "__slots__", ())]
        kept = {name: getattr(state, name, None) for name in (*getattr(state, "__dict__", {}), *slots)}
        bad = [name for name, value in kept.items() if isinstance(value, dict) and not _is_finite(value.values())]
        if bad:
            clear = ", ".join(f"state.{name}.clear()" for name in bad)
            lines.append(_POISONED.format(one_line(getattr(hook, "__name__", hook)), " and ".join(bad), clear))
    return lines


def _is_finite(kept: Iterable[Any]) -> bool:
    return all(bool(each.isfinite().all()) for each in kept if isinstance(each, Tensor))
