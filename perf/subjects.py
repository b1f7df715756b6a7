"""What is measured: gradients, the two scalers, an optimizer that does nothing; and the check that both agree."""

import functools
import math
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import scaler_triton
from perf.measure import require

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SCALE = 2.0**16
Wrap = Callable[[Tensor, Any], Tensor]
Call = Callable[[Any, Any], Any]  # of a scaler and an optimizer


class Gradients:
    """Parameters with gradients of given sizes, which can be put back or replaced between two timed calls.

    Args:
        numels: elements of each gradient.
        dtype, device: of all of them.
        wrap: makes what a parameter holds of a local tensor, like the one it held before if it held one.
    """

    def __init__(
        self,
        numels: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        wrap: Wrap = lambda local, like: local,
    ) -> None:
        self._numels, self._wrap = list(numels), wrap
        generator = torch.Generator(device).manual_seed(0)
        self.values = torch.randn(sum(numels), generator=generator, device=device).to(dtype)
        self.locals = [piece.clone() for piece in self.pieces()]
        self._held = [wrap(local, None) for local in self.locals]
        self.parameters = [nn.Parameter(torch.empty_like(held)) for held in self._held]
        self._place()

    def pieces(self) -> list[Tensor]:
        """Return the original values as views, gradient by gradient."""
        return list(self.values.split(self._numels))

    def restore(self) -> None:
        """Write the original values back, where the gradients are."""
        torch._foreach_copy_(self.locals, self.pieces())

    def renew(self) -> None:
        """Give every parameter a new gradient at a new address, as `zero_grad` and a backward pass do."""
        self.locals = [piece.clone() for piece in self.pieces()]  # the old ones are still there
        self._held = [self._wrap(local, like) for local, like in zip(self.locals, self._held, strict=True)]
        self._place()

    def _place(self) -> None:
        for parameter, held in zip(self.parameters, self._held, strict=True):
            parameter.grad = held


class Still:
    """An optimizer whose step does nothing, so that only the scaler is timed.

    Args:
        fused: it would take scale and flag on the device, so that the scaler only checks.
    """

    def __init__(self, parameters: Sequence[Tensor], *, fused: bool = False) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self._step_supports_amp_scaling = fused
        self.steps = 0

    def step(self) -> None:
        """Count."""
        self.steps += 1


def resting_adamw(parameters: Sequence[Tensor], *, fused: bool) -> torch.optim.AdamW:
    """Return an AdamW whose step does nothing: of an optimizer of torch's own kind a scaler may know more."""
    optimizer = torch.optim.AdamW(parameters, fused=fused)

    @functools.wraps(optimizer.step)  # torch's scaler asks for its signature in each step
    def step(closure: Any = None) -> None:
        pass

    optimizer.step = step  # type: ignore[method-assign]
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


def unscale_then_step(scaler: Any, optimizer: Any) -> None:
    """All that a step asks of the scaler, `unscale_` by hand included."""
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def step(scaler: Any, optimizer: Any) -> None:
    """Step and update."""
    scaler.step(optimizer)
    scaler.update()


def require_equal(case: str, parameters: Sequence[Tensor], device: str, call: Call = step, *, fused: bool) -> None:
    """Raise WrongResult unless both scalers leave the same: once with the gradients as they are, once with an infinity.

    Gradients are compared by their bits; scale and growth tracker, which show the flag, and whether the step was taken.
    """
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    before = [gradient.clone() for gradient in gradients]
    for overflows in (False, True):
        expected: list[Any] = []
        for name, scaler in scalers(device).items():
            torch._foreach_copy_(gradients, before)
            if overflows:
                gradients[-1].reshape(-1)[-1:].fill_(math.inf)
            optimizer = Still(parameters, fused=fused)
            call(scaler, optimizer)
            state = scaler.state_dict()
            found = [optimizer.steps, state["scale"], state["_growth_tracker"], *map(bits, gradients)]
            expected = expected or found
            for number, (right, mine) in enumerate(zip(expected, found, strict=True)):
                same = torch.equal(right, mine) if isinstance(mine, Tensor) else right == mine
                require(same, f"{case}: {name} leaves another {_name(number)}{', of an infinity' * overflows}")
    torch._foreach_copy_(gradients, before)


def _name(number: int) -> str:
    return ("number of steps", "scale", "tracker")[number] if number < 3 else f"gradient {number - 3}"


def bits(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's memory as flat integers: all NaNs are compared."""
    return tensor.detach().clone().reshape(-1).view(INTEGERS[tensor.element_size()])


def local(tensor: Any) -> Tensor:
    """Return what this rank holds of a tensor, in the tensor's own memory."""
    with torch.no_grad():
        result: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return result


def sharded(mesh: DeviceMesh) -> Wrap:
    """Return what makes DTensors sharded over `mesh` of local tensors; as in FSDP2 a gradient keeps its spec."""
    from torch.distributed.tensor import DTensor, Shard

    def wrap(shard: Tensor, like: Any) -> Tensor:
        if like is None:
            return DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)
        return DTensor(shard, like._spec, requires_grad=False)

    return wrap


@contextmanager
def one_rank(device: str) -> Iterator[DeviceMesh]:
    """Join a group of this process alone and yield its mesh on `device`: what DTensors need."""
    # A machine without a network has nothing but the loopback.
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")][:1]
    variables = {variable: name for name in loopback for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {**variables, **os.environ}):
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield init_device_mesh(device, (1,))
        finally:
            dist.destroy_process_group()


def gpt2(shards: int = 1) -> list[int]:
    """Return the elements of GPT-2's 148 tensors, 124 million, as one of `shards` ranks holds them."""
    width, context, words = 768, 1024, 50257
    norm = [width, width]
    attention = [width * 3 * width, 3 * width, width * width, width]
    mlp = [width * 4 * width, 4 * width, 4 * width * width, width]
    every = [words * width, context * width, *(12 * [*norm, *attention, *norm, *mlp]), *norm]
    return [numel // shards for numel in every]
