"""Closures: an optimizer may call one in its step, where no scaler sees the gradients that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scaler_triton.core.warning import warn_once

if TYPE_CHECKING:
    from scaler_triton.core.check import Checks

_SCALED = (
    "A closure that was passed to step() has scaled its loss: the optimizer uses its gradients before anybody has "
    "divided or checked them. Leave scaler.scale() out of the closure, or divide them there."
)


def watched(checks: Checks, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a step, a closure among them watched; raise torch's error for one by its name."""
    if "closure" in kwargs:
        raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
    if not (args and callable(args[0])):
        return args
    closure, steps = args[0], checks.steps

    def watch(*options: Any, **named: Any) -> Any:
        before = steps.unfinished, steps.on_scale
        steps.unfinished, steps.on_scale = True, lambda: warn_once(checks.warned, "ST02", _SCALED)
        try:
            return closure(*options, **named)
        finally:
            steps.unfinished, steps.on_scale = before

    return watch, *args[1:]
