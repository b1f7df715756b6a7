"""One update of the scale for each loss, however many of a framework's optimizers are stepped on it.

A framework updates after each optimizer's step. The next one's gradients must still be divided by the scale that their
loss was multiplied by, so the update waits for it:

    begin    before a loss is scaled: any optimizer that trains a parameter may be stepped on it
    step     scaler.step(optimizer); then update if all of these have been stepped, else put it off
    finish   run an update that was put off: before the next loss is scaled, or the scaler's state is saved or loaded

Which gradients this rank holds plays no part: on another rank a small optimizer's may all be None. An update may wait
longer on one rank than on another, but on none does it come between two steps on the same loss.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from scaler_triton.core.dispatch import is_captured
from scaler_triton.core.step import READY, STEPPED, parameters_of

# What a scaler does only after an update that was put off. Reading its scale or counters is not among them: one rank
# alone may log them between two steps.
_NEEDS_UPDATE = ("scale", "update", "state_dict", "load_state_dict", "__getstate__")


class _Window:
    """What may be stepped on the losses that came since the last update."""

    __slots__ = ("is_put_off", "modules", "optimizers", "replaced")

    def __init__(self) -> None:
        self.optimizers: dict[int, Callable[[], Any]] = {}  # returns each, None once it is freed; by its step's id
        self.modules: list[Callable[[], Any]] = []  # the same for modules whose optimizers are not known yet
        self.is_put_off = False
        self.replaced: dict[str, Any] = {}  # what the scaler itself had under the names of these methods

    def put_off(self, scaler: Any) -> None:
        """Let the scaler's next use that needs the update run it."""
        if self.is_put_off:
            return
        held = vars(scaler)  # of this scaler alone, and until then: others pay nothing
        self.replaced = {name: held[name] for name in _NEEDS_UPDATE if name in held}
        held.update({name: functools.partial(_call_after_update, scaler, name) for name in _NEEDS_UPDATE})
        self.is_put_off = True

    def awaits_another(self, scaler: Any) -> bool:
        """Return whether an optimizer may still be stepped."""
        if not (self.optimizers or self.modules):
            return False
        steps = scaler._ours.steps
        if steps.replayed or is_captured(scaler._scale):  # no call announces the loss of a replay
            return False
        held = [optimizer for owner in self.optimizers.values() if (optimizer := owner()) is not None]
        if not all(steps.open(optimizer).phase is STEPPED for optimizer in held):
            return True
        modules = [module for reference in self.modules if (module := reference()) is not None]
        if not modules:
            return False
        owners = [step.owner() for step in steps.all() if step.phase is STEPPED]
        stepped = {id(each) for each in parameters_of(*(owner for owner in owners if owner is not None))}
        left = [each for module in modules for each in module.parameters() if id(each) not in stepped]
        return _trains(left)


# Only of scalers that have several optimizers.
_windows: weakref.WeakKeyDictionary[Any, _Window] = weakref.WeakKeyDictionary()


def begin(scaler: Any, optimizers: Sequence[Any] | None = None) -> None:
    """Run an update that was put off, and note which of the `optimizers` may be stepped on the loss that comes now.

    They are a framework's; None: those that the scaler knows, which are all that it has stepped or unscaled.
    """
    finish(scaler)
    steps = scaler._ours.steps
    if optimizers is None:
        optimizers = [owner for step in steps.all() if (owner := step.owner()) is not None]
    if len(optimizers) < 2 or not scaler._enabled or _updates_by_itself(scaler):
        return
    window = _windows.setdefault(scaler, _Window())
    for optimizer in optimizers:
        if _trains(parameter for group in optimizer.param_groups for parameter in group["params"]):
            step = steps.open(optimizer)
            window.optimizers[id(step)] = step.owner


def expect(scaler: Any, module: nn.Module) -> None:
    """Until the next update expect a step for each of the module's parameters that requires a gradient."""
    if scaler._enabled and not _updates_by_itself(scaler):
        _windows.setdefault(scaler, _Window()).modules.append(weakref.ref(module))


def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what `scaler.step` does; update after the last optimizer's step."""
    result = scaler.step(optimizer, *args, **kwargs)
    _update(scaler)
    return result


def finish(scaler: Any) -> None:
    """Run the update that was put off, if there is one; RuntimeError while a graph is captured."""
    window = _windows.get(scaler)
    if window is None or not window.is_put_off:
        return
    if is_captured(scaler._scale):  # each replay would repeat it
        text = "an update that was put off cannot be captured in a graph: call the scaler's update() before the capture"
        raise RuntimeError(text)
    _close(scaler)
    # Nothing is left to count if the steps were reset meanwhile.
    if any(step["found_inf_per_device"] for step in [*scaler._ours.steps.values()]):
        scaler.update()


def left_to_unscale(scaler: Any, optimizers: Iterable[Any]) -> list[Any]:
    """Return the optimizers; while an update is put off, only those whose gradients are still scaled."""
    window = _windows.get(scaler)
    is_put_off = window is not None and window.is_put_off
    return [each for each in optimizers if not is_put_off or scaler._ours.steps.open(each).phase is READY]


def _update(scaler: Any) -> None:
    window = _windows.get(scaler)
    if window is not None:
        if window.awaits_another(scaler):
            window.put_off(scaler)
            return
        _close(scaler)
    scaler.update()


def _close(scaler: Any) -> None:
    """Forget what may be stepped; the scaler's methods are its own again."""
    window = _windows.pop(scaler, None)
    if window is not None and window.is_put_off:
        for name in _NEEDS_UPDATE:
            del vars(scaler)[name]
        vars(scaler).update(window.replaced)


def _call_after_update(scaler: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call the scaler's own method; `update()` is the one that was put off."""
    if name == "update" and not (args or kwargs):
        _close(scaler)
    else:
        finish(scaler)
    return getattr(scaler, name)(*args, **kwargs)


def _updates_by_itself(scaler: Any) -> bool:
    """Return whether the scaler is a guard, of which each step ends with its own update."""
    return not scaler._ours.scales


def _trains(parameters: Iterable[Tensor]) -> bool:
    return any(parameter.requires_grad for parameter in parameters)
