"""What the scalers know of `patch_torch`: which classes ours stand in for, and what that means for `isinstance`."""

from __future__ import annotations

from abc import ABCMeta

# Written by patch.py only.
originals: dict[type, type] = {}  # ours -> torch's, while ours is found under its name
strict = False  # whether a GradScaler refuses FSDP1 parameters instead of warning


class StandIn(ABCMeta):  # ABCMeta, so that a subclass may derive from ABC as well, as one of torch's class may
    """The type of our scaler classes: torch's class and its subclasses count as ours while ours stands in for it.

    So scalers made before `patch_torch` are still instances of `torch.amp.GradScaler`, and so is a
    `ShardedGradScaler`. Otherwise inheritance alone tells: what ABCMeta remembers would outlive the patch.
    """

    def __subclasscheck__(cls, subclass: type) -> bool:  # isinstance() comes here, too
        return type.__subclasscheck__(cls, subclass) or issubclass(subclass, originals.get(cls, ()))
