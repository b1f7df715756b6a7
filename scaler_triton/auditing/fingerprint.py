"""A hash of a tensor's bits, computed on the tensor's own device."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 2**20  # bytes hashed at a time on the CPU, so that they stay in its cache
LAUNCH = 16  # times as many on other devices; a few times that much memory is needed
STEP = 0x9E3779B97F4A7C15 - 2**64  # odd, so that every position gets its own number
FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)  # odd, so that multiplying is one to one
SHIFTS = (30, 27, 31)


def fingerprint(tensor: Tensor) -> str:
    """Return the sum of mix(word + position * STEP) over the tensor's 64-bit words, mod 2^64, in hexadecimal.

    `mix` is one to one on 64-bit numbers, so two tensors that differ in one word always get different sums; tensors
    that differ in more words collide with probability 2^-64. Dtype and shape count. All devices give the same number.

    Args:
        tensor: strided, any dtype, on any device; read in chunks, and copied there if it is not contiguous.
    """
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    total = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    chunk = CHUNK if tensor.device.type == "cpu" else CHUNK * LAUNCH
    for start in range(0, data.numel(), chunk):
        piece = data[start : start + chunk]
        words = pad(piece, (0, -piece.numel() % 8)).view(torch.int64)
        positions = torch.arange(1, words.numel() + 1, device=words.device) + start // 8
        total += int(_mix(words + positions * STEP).sum())
    return f"{total % 2**64:016x}"


def _mix(words: Tensor) -> Tensor:
    """Apply the last step of the splitmix64 generator; `words` is written."""
    for shift, factor in zip(SHIFTS, (*FACTORS, 1), strict=True):
        words ^= (words >> shift) & (2 ** (64 - shift) - 1)  # int64's >> repeats the sign bit
        words *= factor
    return words
