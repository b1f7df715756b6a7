"""A hash of a tensor's bits, found on the device that the tensor is on."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

CHUNK = 2**20  # bytes hashed at a time on the CPU, where they stay in its cache
LAUNCH = 16  # times as much elsewhere; beside the tensor a few times that is needed
STEP = 0x9E3779B97F4A7C15 - 2**64  # odd, so that every position has a number of its own
FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)  # odd, so that multiplying loses nothing
SHIFTS = (30, 27, 31)


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the sum of mix(word + position * STEP) over the tensor's 64-bit words, mod 2^64.

    `mix` maps the 64-bit numbers one to one, so two tensors that differ in one word always differ here; with more,
    they are equal by a chance of 2^-64. Dtype and shape count. The same bits give the same number on every device.

    Args:
        tensor: strided, any dtype, on any device; read in chunks, and copied there if it is not contiguous.

    Returns: int64, shape (), on the tensor's device; the host waits for nothing.
    """
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    kind = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    total = torch.full((), kind, dtype=torch.int64, device=tensor.device)
    chunk = CHUNK if tensor.device.type == "cpu" else CHUNK * LAUNCH
    for start in range(0, data.numel(), chunk):
        words = _words(data[start : start + chunk])
        positions = torch.arange(1, words.numel() + 1, device=words.device) + start // 8
        total += _mix(words + positions * STEP).sum()
    return total


def _words(data: Tensor) -> Tensor:
    """Return bytes as int64 words, the last one filled up with zeros."""
    words = data.new_zeros((data.numel() + 7) // 8 * 8)
    words[: data.numel()] = data
    return words.view(torch.int64)


def _mix(words: Tensor) -> Tensor:
    """Shift and multiply as the generator splitmix64 does in the end; `words` is written."""
    for shift, factor in zip(SHIFTS, (*FACTORS, 1), strict=True):
        words ^= (words >> shift) & (2 ** (64 - shift) - 1)  # int64's >> repeats the sign
        words *= factor
    return words
