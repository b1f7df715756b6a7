"""How many collectives a piece of code starts, however it starts them."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives that reach torch's dispatcher, plain (c10d) and functional, in this thread."""

    NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
    NOT_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []

    @property
    def count(self) -> int:
        """How many collectives were started since this object was made."""
        return len(self.calls)

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # DTensor runs first and turns into the collectives that we count.
        name = func._schema.name
        namespace, _, op = name.partition("::")
        if namespace in self.NAMESPACES and op not in self.NOT_COLLECTIVES:
            self.calls.append(name)
        return func(*args, **(kwargs or {}))
