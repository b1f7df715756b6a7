"""torch.distributed.checkpoint: a scaler loads a checkpoint that has other extras than its own, or none."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from scaler_triton.policy import KEY


class ScalerLoadPlanner(DefaultLoadPlanner):
    """DCP's default planner, but a scaler's extras are read as the checkpoint has them, for `load_state_dict` to judge.

    DCP asks for what the scaler itself would save, and raises if the checkpoint has less. Everything else is loaded as
    by `DefaultLoadPlanner`, whose arguments it takes: a missing key of the model raises.
    """

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        """Called by DCP on every rank: replace what is asked for beneath each scaler's key by what was saved there."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        for tracker in [path for path in self.mappings.values() if path[-1] == "_growth_tracker"]:
            scaler = tracker[:-1]
            beneath = ".".join(map(str, (*scaler, KEY, "")))
            for name in [name for name in self.mappings if name.startswith(beneath)]:
                del self.state_dict[name], self.mappings[name]
            fields: Any = reduce(operator.getitem, scaler, state_dict)  # type: ignore[arg-type]
            if KEY in fields:
                fields[KEY] = {}
            for name in metadata.state_dict_metadata:
                if name.startswith(beneath):
                    self.state_dict[name] = None
                    self.mappings[name] = (*scaler, KEY, *name.removeprefix(beneath).split("."))
