"""Batches of tensors at a place, as a plan makes them of gradients."""

from collections.abc import Sequence

import torch
from helpers import Place, on_device
from torch import Tensor

from scaler_triton.core.plan import Batch, choose_backends, group


def number(value: float, place: Place) -> Tensor:
    return torch.tensor(value, device=place.device)


def batches_of(tensors: Sequence[Tensor], place: Place) -> list[Batch]:
    batches = group({index: on_device(tensor, place.device) for index, tensor in enumerate(tensors)})
    choose_backends(batches, place.backend)
    return batches


def batch_of(tensors: Sequence[Tensor | None], place: Place) -> Batch:
    """Return one batch, with an empty slot for each None."""
    like = next(tensor for tensor in tensors if tensor is not None)
    (batch,) = batches_of([like[:1] if tensor is None else tensor for tensor in tensors], place)
    kept = [None if tensor is None else there for tensor, there in zip(tensors, batch.tensors, strict=True)]
    return Batch(batch.layout, kept, [tensor for tensor in kept if tensor is not None])
