"""The hash of a replica sees every bit, and only values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scaler_triton.auditing import fingerprint


def mixed(word: int) -> int:
    """The mixing of one word, in Python's integers."""
    for shift, factor in zip(fingerprint.SHIFTS, (*fingerprint.FACTORS, 1), strict=True):
        word = (word ^ (word >> shift)) * factor % 2**64
    return word


def expected(data: bytes, empty: int) -> int:
    """The definition, beside the hash of an empty tensor of the same dtype and shape."""
    words = [int.from_bytes(data[at : at + 8].ljust(8, b"\0"), "little") for at in range(0, len(data), 8)]
    return (empty + sum(mixed((w + (i + 1) * fingerprint.STEP) % 2**64) for i, w in enumerate(words))) % 2**64


def hashed(tensor: Tensor) -> int:
    return int(fingerprint.fingerprint(tensor), 16)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 63, 64, 65, 200])
@pytest.mark.parametrize("chunk", [8, 64, 2**24])
def test_the_hash_is_its_definition_whatever_the_chunk(size: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "CHUNK", chunk)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    kind = fingerprint.zlib.crc32(f"torch.uint8 {(size,)}".encode())
    assert hashed(data) == expected(bytes(data.tolist()), kind)


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0)])
def test_every_flipped_bit_is_seen(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape).to(dtype)
    before = hashed(tensor)
    data = tensor.reshape(-1).view(torch.uint8)
    for byte in range(data.numel()):
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert hashed(tensor) != before, (byte, bit)
            data[byte] ^= 1 << bit
    assert hashed(tensor) == before


def test_two_changes_do_not_cancel() -> None:
    """Flipped signs would in a plain weighted sum: 2^63 twice is 2^64."""
    tensor = torch.arange(1.0, 65.0, dtype=torch.float64)
    seen = {hashed(tensor)}
    for first in range(64):
        for second in range(first):
            changed = tensor.clone()
            changed[[first, second]] *= -1
            swapped = tensor.clone()
            swapped[[first, second]] = tensor[[second, first]]
            seen |= {hashed(changed), hashed(swapped)}
    assert len(seen) == 1 + 2 * 64 * 63 // 2


def test_values_count_and_not_how_they_are_stored() -> None:
    tensor = torch.randn(6, 4)
    strided = torch.empty(4, 6).t().copy_(tensor)
    assert (
        hashed(strided) == hashed(tensor) == hashed(torch.nn.Parameter(tensor)) == hashed(torch.cat([tensor] * 2)[6:])
    )
    assert len({hashed(torch.zeros(shape)) for shape in [(4,), (2, 2), (4, 1), (0,), (5,)]}) == 5
    assert hashed(torch.zeros(2)) != hashed(torch.zeros(2, dtype=torch.int32))
    assert hashed(torch.ones(2, dtype=torch.complex64).conj()) == hashed(
        torch.ones(2, dtype=torch.complex64).conj().clone()
    )
