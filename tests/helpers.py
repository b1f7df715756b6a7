"""What the tests share: optimizers with known gradients, bitwise comparison, a torch scaler beside ours."""

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

# Options of a Python whose warnings are errors, but for one that torch's import meets where that package is.
STRICT = ["-W", "error", "-W", "ignore:The pynvml package is deprecated:FutureWarning"]


@dataclass(frozen=True)
class Place:
    """Where a test runs: a device and the backend that serves it there."""

    device: str
    backend: str

    def __str__(self) -> str:
        return f"{self.device}-{self.backend}"


def places() -> list[Place]:
    """Return every device and backend of this machine; without a GPU Triton's interpreter serves the CPU."""
    if os.environ.get("PLACES") in ("torch", "mps"):  # the second is pretended: see `no_fp64`
        return [Place("cpu" if os.environ["PLACES"] == "torch" else "mps", "torch")]
    if torch.cuda.is_available():
        return [Place("cpu", "torch"), Place("cuda", "triton"), Place("cuda", "torch")]
    return [Place("cpu", "torch"), Place("cpu", "triton")]


def wide(place: Place) -> torch.dtype:
    """Return the dtype of sums and norms: Apple's GPU has no fp64."""
    return torch.float32 if place.device == "mps" else torch.float64


PLACES = pytest.mark.parametrize("place", places(), ids=str)
KERNELS = pytest.mark.parametrize("place", [place for place in places() if place.backend == "triton"], ids=str)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def bits(tensor: Tensor) -> Tensor:
    """Return the tensor's bits as integers, all NaNs made one."""
    tensor = tensor.detach().cpu().clone()
    if tensor.is_floating_point():  # an integer takes no NaN, not even nowhere
        tensor[tensor.isnan()] = float("nan")
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()]) if tensor.dim() else bits(tensor.reshape(1))


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Assert equality to the bit, NaN as NaN."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    same = bits(ours) == bits(theirs)
    assert same.all(), f"{(~same).sum()} of {same.numel()} differ, the first at {(~same).nonzero()[0].tolist()}"


def assert_all_same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    """Assert that two lists of tensors are equal to the bit, NaN as NaN."""
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, other)


def randn(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normally distributed values."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sum_of_squares(tensors: Iterable[Tensor], weights: Iterable[float] | None = None) -> float:
    """Return the weighted sum by Python: fp64 products, exact sums."""
    sums = [math.fsum(x * x for x in tensor.double().flatten().tolist()) for tensor in tensors]
    return sum(sums) if weights is None else sum(map(float.__mul__, sums, weights))


def parameters(grads: Iterable[Tensor | None], device: str) -> list[torch.nn.Parameter]:
    """Return a parameter for each gradient, on `device`, with a copy of it (same strides) as `.grad`."""
    made = []
    for grad in grads:
        like = torch.zeros(3) if grad is None else grad
        shape, dtype = like.shape, like.dtype
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        if grad is not None:
            parameter.grad = on_device(grad, device)
        made.append(parameter)
    return made


def on_device(grad: Tensor, device: str) -> Tensor:
    """Return a copy of `grad` with its strides and its place within its storage."""
    if grad.layout is not torch.strided:
        return grad.clone().to(device)
    storage = torch.empty(0, dtype=grad.dtype).set_(grad.untyped_storage())
    return storage.clone().to(device).as_strided(grad.shape, grad.stride(), grad.storage_offset())


def started(cls: type, device: str, **kwargs: Any) -> Any:
    """Return a scaler that has scaled a loss, as every scaler has before `unscale_`."""
    scaler = cls(device, **kwargs)
    scaler.scale(torch.ones((), device=device))
    return scaler


def flags(scaler: Any, optimizer: Any) -> list[float]:
    """Return the flags a scaler recorded for an optimizer."""
    return [flag.item() for flag in scaler._found_inf_per_device(optimizer).values()]


def grads(optimizer: Any) -> list[float]:
    """Return the first element of each gradient."""
    return [parameter.grad[0].item() for parameter in optimizer.param_groups[0]["params"]]


def params_of(optimizer: Any) -> list[Any]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def values(optimizer: Any) -> list[float]:
    """Return the first element of each parameter."""
    return [parameter[0].item() for parameter in optimizer.param_groups[0]["params"]]


def sgd(grads: Sequence[Tensor | None], device: str = "cpu", **kwargs: Any) -> torch.optim.SGD:
    """Return SGD over one parameter a gradient."""
    return torch.optim.SGD(parameters(grads, device), lr=0.5, **kwargs)


class Wrapper:
    """As frameworks wrap an optimizer: its own step, everything else the inner one's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return self.optimizer.step(*args, **kwargs)


class Slotted:
    """A wrapper that nothing can be set on, nor refer to weakly; its groups are those of the optimizer inside."""

    __slots__ = ("optimizer",)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> Any:
        return self.optimizer.step()


class Container(torch.optim.Optimizer):
    """As torchtitan's: optimizers that step together, hooks that run in its own step, and one group of its own."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.optimizers: list[Any] = []
        super().__init__([each for optimizer in optimizers for each in params_of(optimizer)], {})
        self.optimizers += optimizers

    def __iter__(self) -> Iterator[Any]:
        return iter(self.optimizers)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


class Chained(Container):
    """The same, whose groups are those of its optimizers, in a list that is made anew each time."""

    @property
    def param_groups(self) -> Any:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        pass


WAYS = ("step", "unscale_", "clip")


def take_step(scaler: Any, optimizer: Any, how: str, *, updates: bool = True) -> None:
    """Take a step in one of WAYS, and update."""
    if how == "unscale_":
        scaler.unscale_(optimizer)
    elif how != "step":
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    if updates:
        scaler.update()


@contextmanager
def waits_raise() -> Iterator[None]:
    """Make every operation that waits for the GPU raise."""
    with warnings.catch_warnings():  # as an error it would leave the mode on, for every test after this one
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def stepped(name: str = "AdamW", steps: int = 1, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer of one parameter that took some steps."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = getattr(torch.optim, name)([parameter], **options)
    for _ in range(steps):
        parameter.grad = torch.ones(3)
        optimizer.step()
    return optimizer


EXTRAS: dict[str, Any] = {"min_scale": 0.25, "max_scale": 512.0, "hysteresis": 3, "max_consecutive_skips": 50}


def trained(cls: type, **extras: Any) -> Any:
    """Return a scaler after five updates, of which the second and the last overflowed."""
    scaler = started(cls, "cpu", init_scale=64.0, growth_interval=2, **extras)
    for bad in (False, True, False, False, True):
        update(scaler, bad)
    return scaler


def update(scaler: Any, bad: bool) -> float:
    """Take a step that overflows or not, of an optimizer of its own; return the scale after it."""
    scaler.step(sgd([torch.tensor([math.inf if bad else 1.0])]))
    scaler.update()
    return float(scaler.get_scale())
