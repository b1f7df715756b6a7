"""A tensor subclass as people write them."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only


class Pair(Tensor):
    """Two tensors that go through everything together, as a quantized weight and what belongs to it do."""

    left: Tensor
    right: Tensor

    @staticmethod
    def __new__(cls, left: Tensor, right: Tensor) -> Pair:
        made: Pair = Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype, device=left.device)
        made.left, made.right = left, right
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["left", "right"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _meta: None, _size: Any, _stride: Any) -> Pair:
        return Pair(**inner)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sides = [tree_map_only(Pair, attrgetter(side), args) for side in ("left", "right")]
        left, right = (func(*each, **(kwargs or {})) for each in sides)
        return cls(left, right) if isinstance(left, Tensor) and left.dim() else left
