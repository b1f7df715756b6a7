"""How much device memory does a scaler hold, and does it raise a training loop's peak? Counted, not timed.

On a GPU its allocator counts; without one, the tensors that the GPU's path makes over the stub driver.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perf import host_stub
from perf.measure import Context
from perf.models import mlp
from perf.rows import Place, Row
from perf.subjects import Gradients, scalers, still

COUNT, STEPS = 2000, 5
HELD, PEAK = f"held for {COUNT} gradients", "a training loop's peak"


def measure(context: Context) -> Iterator[Row]:
    """Yield all rows."""
    if context.device == "cuda":
        yield from rows(OfAllocator, "cuda")
    else:
        yield from host_stub.measure(context, "memory")


def by_tensors() -> Iterator[Row]:
    """Count the tensors of the GPU's path, in a process that has the stub driver."""
    yield from rows(OfTensors, "cpu")


def rows(counting: Callable[[], Any], device: str) -> Iterator[Row]:
    """Yield the bytes that each scaler holds, and the peak of a training loop with each, and their ratio."""
    for kind, fused in {"plain": False, "fused": True}.items():
        held = {name: held_by(name, counting, device, fused) for name in ("torch", "ours")}
        yield from Place("memory", HELD, kind).counts("bytes", held)
        peaks = {name: peak_with(name, counting, device, fused) for name in ("torch", "ours")}
        yield from Place("memory", PEAK, kind).counts("bytes", peaks)
        place = Place("memory", PEAK, kind)
        yield place.row("bytes", "ours / torch", "ratio", [peaks["ours"] / peaks["torch"]])


def new_scaler(name: str, device: str) -> Any:
    """Return a scaler, ours with kernels."""
    return scalers(device, **({} if device == "cuda" else {"backend": "triton"}))[name]


def held_by(name: str, counting: Callable[[], Any], device: str, fused: bool) -> int:
    """Return the bytes that a scaler has made and kept after some steps."""
    gradients = Gradients([64] * COUNT, device=device)
    optimizer, loss = still(gradients.parameters, fused=fused), torch.ones((), device=device)
    with counting() as memory:
        scaler = new_scaler(name, device)
        for _ in range(STEPS):
            scaler.scale(loss)
            scaler.step(optimizer)
            scaler.update()
        return int(memory.now())


def peak_with(name: str, counting: Callable[[], Any], device: str, fused: bool) -> int:
    """Return the largest number of bytes at once in a training loop."""
    torch.manual_seed(0)
    model, batch = mlp(100, 512).to(device), torch.ones(64, 512, device=device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=fused)
    with counting() as memory:
        scaler = new_scaler(name, device)
        for _ in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(nn.functional.mse_loss(model(batch), batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        return int(memory.peak()) + sum(each.nbytes for each in model.parameters())


class OfAllocator:
    """What CUDA's allocator has given since the beginning."""

    def __enter__(self) -> Any:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: Any) -> None:
        torch.cuda.synchronize()

    def now(self) -> int:
        """Return the bytes that are held."""
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - self._before

    def peak(self) -> int:
        """Return the most that were held at once."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self._before


class OfTensors(TorchDispatchMode):
    """The storages of the tensors that ops have made since the beginning, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self._held, self._most, self._known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count what an op has allocated."""
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and (key := made.untyped_storage()._cdata) not in given | self._known:
                size = made.untyped_storage().nbytes()
                self._known.add(key)
                self._held += size
                self._most = max(self._most, self._held)
                weakref.finalize(made.untyped_storage(), self._freed, key, size)
        return result

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._held -= size

    def now(self) -> int:
        """Return the bytes that are held."""
        return self._held

    def peak(self) -> int:
        """Return the most that were held at once."""
        return self._most
