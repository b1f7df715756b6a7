"""The state of `patch_torch` that the scalers read: which classes are replaced, and `isinstance` meanwhile."""

from __future__ import annotations

from abc import ABCMeta
from typing import TYPE_CHECKING

from typing_extensions import Protocol  # torch's Stateful is one of these; it is typing's in newer Pythons

# The metaclass of protocols, so that subclasses may also derive from ABC or a protocol, as those of torch's class may.
if TYPE_CHECKING:
    _Base = ABCMeta
else:
    _Base = type(Protocol)

# Written by patch.py only.
originals: dict[type, type] = {}  # ours -> torch's, while patched
strict = False  # whether a GradScaler refuses FSDP1 parameters instead of warning


class StandIn(_Base):
    """The metaclass of our scalers: while torch is patched, torch's class and its subclasses count as ours.

    So scalers made before `patch_torch` are still instances of `torch.amp.GradScaler`, and so is a
    `ShardedGradScaler`. Otherwise by inheritance only: ABCMeta's registry and cache would outlive the patch.
    """

    def __subclasscheck__(cls, subclass: type) -> bool:  # isinstance() comes here, too
        return type.__subclasscheck__(cls, subclass) or issubclass(subclass, originals.get(cls, ()))
