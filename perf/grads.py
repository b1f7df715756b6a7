"""Parameters whose gradients can be put back, moved, dropped and spoilt between two timed calls."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Wrap = Callable[[Tensor, Tensor | None], Tensor]


class Gradients:
    """Parameters with gradients of given sizes.

    Args:
        numels: elements of each gradient.
        device, dtype: of all of them.
        wrap: makes what a parameter holds of a local tensor, like the one it held before if it held one.
        adjacent: the gradients are views of one flat buffer, as DDP's buckets have them.
    """

    def __init__(
        self,
        numels: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        *,
        wrap: Wrap = lambda local, like: local,
        adjacent: bool = False,
    ) -> None:
        self._numels = list(numels)
        self._wrap = wrap
        generator = torch.Generator(device).manual_seed(0)
        self.values = torch.randn(sum(numels), generator=generator, device=device).to(dtype)
        self.locals = self._pieces(self.values.clone())
        if not adjacent:
            self.locals = [piece.clone() for piece in self.locals]
        self._held = [wrap(local, None) for local in self.locals]
        self.parameters = [nn.Parameter(torch.empty_like(held)) for held in self._held]
        self.choose(range(len(numels)))

    def restore(self) -> None:
        """Write the original values back, where the gradients are."""
        torch._foreach_copy_(self.locals, self.pieces())

    def renew(self) -> None:
        """Give every parameter a new gradient at a new address, as `zero_grad` and a backward pass do."""
        self.locals = [piece.clone() for piece in self.pieces()]  # the old ones are still there
        self._held = [self._wrap(local, like) for local, like in zip(self.locals, self._held, strict=True)]
        self.choose(range(len(self._held)))

    def choose(self, present: Iterable[int]) -> None:
        """Leave only these gradients in place; the others become None."""
        chosen = set(present)
        for index, (parameter, held) in enumerate(zip(self.parameters, self._held, strict=True)):
            parameter.grad = held if index in chosen else None

    @contextmanager
    def spoilt(self, spoilt: bool = True) -> Iterator[None]:
        """Make the last element of the original values infinite for a while."""
        finite = self.values[-1].clone()
        if spoilt:
            self.values[-1] = math.inf
        yield
        self.values[-1] = finite

    def pieces(self, *, only_present: bool = False) -> list[Tensor]:
        """Return the original values as views, gradient by gradient; of those in place, or of all."""
        return self._chosen(self._pieces(self.values)) if only_present else self._pieces(self.values)

    def present(self) -> list[Tensor]:
        """Return the local tensors of the gradients that are in place."""
        return self._chosen(self.locals)

    def _chosen(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor for tensor, p in zip(tensors, self.parameters, strict=True) if p.grad is not None]

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        return list(flat.split(self._numels))


class Still:
    """An optimizer whose step does nothing, so that only the scaler is timed.

    Args:
        fused: it would take scale and flag on the device, so that the scaler only checks.
    """

    def __init__(self, parameters: Sequence[Tensor], *, fused: bool = False) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self._step_supports_amp_scaling = fused

    def step(self, *args: Any) -> None:
        """Do nothing."""


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, in the tensor's own memory."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor
