"""How a scaler is copied and pickled: with its settings, scale and counters, without its optimizers' states."""

from __future__ import annotations

import copy
from typing import Any, Self

from scaler_triton import attributes, collectives
from scaler_triton.attributes import ScalerAttributes
from scaler_triton.stats import Counters

_COUNTED = "_counted"  # what the counters read, in a state


class CopyingMixin(ScalerAttributes):
    """Copying and pickling."""

    def __getstate__(self) -> dict[str, Any]:
        # torch raises unless an enabled scaler's states are empty. Attributes that are created anew are left out: a
        # pickle would name the modules of their classes. A subclass may put the others back by itself.
        fresh = attributes.fresh()
        kept = {name: value for name, value in super().__getstate__().items() if name not in fresh}
        return {**kept, _COUNTED: self._counters.read(), "process_group": collectives.picklable(self.process_group)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if _COUNTED in state:
            kept = {name: value for name, value in state.items() if name != _COUNTED}
            state = {**kept, **attributes.fresh(), "_counters": Counters(state[_COUNTED])}
        else:  # a scaler of torch's, pickled before `patch_torch` replaced its class
            ours: Any = next(cls for cls in type(self).__mro__ if "_is_sharded" in vars(cls))
            ours.__init__(self, state["_device"], enabled=False)
        super().__setstate__(state)

    def __copy__(self) -> Self:
        return self._fill(type(self).__new__(type(self)), self.__getstate__())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        clone = memo[id(self)] = type(self).__new__(type(self))  # first: its attributes may refer to it
        return self._fill(clone, copy.deepcopy(self.__getstate__(), memo))

    def _fill(self, clone: Self, state: dict[str, Any]) -> Self:
        clone.__setstate__(state)
        clone.process_group = self.process_group  # a group is shared, it cannot be copied
        return clone
