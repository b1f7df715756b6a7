"""What is measured: gradients, the two scalers, optimizers that do nothing; and the check that both scalers agree."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import scaler_triton
from perf.measure import require

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SCALE = 2.0**16
Wrap = Callable[[Tensor, Any], Tensor]  # makes what a parameter holds of a local tensor, like what it held before


class Gradients:
    """Parameters with gradients of given sizes, which can be put back or replaced between two timed calls."""

    def __init__(
        self, numels: Sequence[int], dtype: Any = torch.float32, device: str = "cpu", wrap: Any = None
    ) -> None:
        self._numels, self._wrap = list(numels), wrap or (lambda local, like: local)
        generator = torch.Generator(device).manual_seed(0)
        self.values = torch.randn(sum(numels), generator=generator, device=device).to(dtype)
        self._held: list[Any] = [None] * len(numels)
        self._memories: list[list[Tensor]] = []  # two, the older one first
        self.parameters = [nn.Parameter(torch.empty_like(self._wrap(piece, None))) for piece in self.pieces()]
        self.renew()

    def pieces(self) -> list[Tensor]:
        """Return the original values as views, gradient by gradient."""
        return list(self.values.split(self._numels))

    def restore(self) -> None:
        """Write the original values back, where the gradients are."""
        torch._foreach_copy_(self.locals, self.pieces())

    def renew(self) -> None:
        """Give every parameter a new gradient, as `zero_grad` and a backward pass do.

        It lies where the one before the last lay, as in most loops on a GPU (results/*/addresses.txt).
        """
        is_new = len(self._memories) < 2
        memory = [piece.clone() for piece in self.pieces()] if is_new else self._memories.pop(0)
        self._memories.append(memory)
        self.locals = [each.data for each in memory]
        self.restore()
        self._held = [self._wrap(local, like) for local, like in zip(self.locals, self._held, strict=True)]
        for parameter, held in zip(self.parameters, self._held, strict=True):
            parameter.grad = held


def still(parameters: Sequence[Tensor], *, fused: bool = False) -> Any:
    """Return an AdamW whose step is only counted: of an optimizer of torch's own kind a scaler may know more."""
    optimizer: Any = torch.optim.AdamW(parameters, fused=fused)
    optimizer.steps = 0

    @functools.wraps(optimizer.step)  # torch's scaler asks for its signature in each step
    def step() -> None:
        optimizer.steps += 1

    optimizer.step = step
    return optimizer


def scalers(device: str, *, backend: str | None = None, scale: float = SCALE) -> dict[str, Any]:
    """Return a scaler of torch's and one of ours, which has that backend, ready for their first step.

    "torch" comes first, as it is what ours must equal. The scale grows only after more steps than are ever timed.
    """
    pair = {
        "torch": torch.amp.GradScaler(device, init_scale=scale, growth_interval=10**6),
        "ours": scaler_triton.GradScaler(device, init_scale=scale, growth_interval=10**6, backend=backend),
    }
    for scaler in pair.values():
        scaler.scale(torch.zeros((), device=device))  # makes the scale
    return pair


def require_equal(case: str, parameters: Sequence[Tensor], device: str, fused: bool = False, unscale: bool = False):
    """Raise WrongResult unless both scalers leave the same: once with the gradients as they are, once with an infinity.

    Gradients are compared by their bits; scale and growth tracker, which show the flag, and whether the step was taken.
    """
    with torch.no_grad():  # what this rank holds, in the gradients' own memory
        gradients = [g.to_local() if hasattr(g, "to_local") else g for p in parameters if (g := p.grad) is not None]
    before = [gradient.clone() for gradient in gradients]
    for overflows in (False, True):
        results: list[list[Any]] = []
        for scaler in scalers(device).values():
            torch._foreach_copy_(gradients, before)
            if overflows:
                gradients[-1].reshape(-1)[-1:].fill_(math.inf)
            optimizer = still(parameters, fused=fused)
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            results.append([optimizer.steps, scaler.state_dict(), *map(bits, gradients)])
        for number, (right, ours) in enumerate(zip(*results, strict=True)):
            same = torch.equal(right, ours) if isinstance(ours, Tensor) else right == ours
            what = ("steps", "state")[number] if number < 2 else f"gradient {number - 2}"
            require(same, f"{case}{', an infinity' * overflows}: another {what} than torch's")
    torch._foreach_copy_(gradients, before)


def bits(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's memory as bytes: NaNs can be compared."""
    return tensor.detach().clone().reshape(-1).view(torch.uint8)


@contextmanager
def sharded(ranks: int, device: str) -> Iterator[Wrap]:
    """Yield what makes DTensors of local tensors, as in FSDP2, on a mesh of pretended ranks: nothing is sent."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def wrap(shard: Tensor, like: Any) -> Tensor:
        if like is None:
            return DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)
        return DTensor(shard, like._spec, requires_grad=False)  # a gradient keeps its spec

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        mesh = init_device_mesh(device, (ranks,))
        yield wrap
    finally:
        dist.destroy_process_group()


def lists(device: str, quick: bool) -> dict[str, list[int]]:
    """Return the elements of lists of gradients: many small ones, a model's mixture, large spans."""
    if quick:
        return {"10 x 64": [64] * 10}
    width, square = 768, 768**2
    block = [width, width, 3 * square, 3 * width, square, width, width, width, 4 * square, 4 * width, 4 * square, width]
    gpt2 = [50257 * width, 1024 * width, *12 * block, width, width]
    if device == "cpu":
        eighth = [numel // 8 for numel in gpt2]
        return {"2000 x 1k": [1024] * 2000, "GPT-2 124M, 1 of 8 shards": eighth, "20 x 1M": [1_000_000] * 20}
    count = min(200, torch.cuda.mem_get_info()[0] // 200_000_000)  # 1e9 elements, in ten copies, where they fit
    large = {f"{count} x 5M": [5_000_000] * count}
    return {"2000 x 1k": [1024] * 2000, "500 x 64k": [65_536] * 500, "GPT-2 124M": gpt2, **large}
