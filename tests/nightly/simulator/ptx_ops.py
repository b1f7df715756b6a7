"""What PTX instructions compute, for all threads at once.

Source: "Parallel Thread Execution ISA", NVIDIA. Not modelled: which NaN comes out, and the last bit of an fp64 fma.
"""

import functools
import operator

import numpy as np

UNSIGNED = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_NUMBERS = {"f16": np.float16, "f32": np.float32, "f64": np.float64, "pred": np.bool_, "bf16": np.float32}
for _bits in (16, 32, 64):
    _NUMBERS |= dict.fromkeys((f"b{_bits}", f"u{_bits}"), UNSIGNED[_bits]) | {f"s{_bits}": getattr(np, f"int{_bits}")}


@functools.cache
def width_of(kind):
    """Bits of a type such as f32, or of a predicate's."""
    return 1 if kind == "pred" else int(kind.lstrip("bsuf"))


def decode(bits, kind):
    """The numbers of a type that bits of its width are; bf16 as fp32."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(_NUMBERS[kind])


def encode(numbers, kind):
    """The bits of numbers; floats that are wider than the type are rounded to nearest even, integers wrap."""
    if kind != "bf16":
        return numbers.astype(_NUMBERS[kind]).view(UNSIGNED[width_of(kind)])
    bits = numbers.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(numbers), 0x7FFF, rounded).astype(np.uint16)


def halves(bits):
    """The two fp32 numbers in each 64-bit register, `[threads, 2]`."""
    return bits.view(np.float32).reshape(-1, 2)


def joined(low, high):
    """Registers of twice the width."""
    return np.stack([low, high], axis=-1).view(UNSIGNED[16 * low.itemsize]).ravel()


def fma(a, b, c):
    """A product and a sum, rounded once."""
    return (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(c.dtype)


def _extremum(of_floats, of_integers):
    """Of two numbers or three, which newer GPUs take at once."""
    return lambda *numbers: functools.reduce(of_floats if numbers[0].dtype.kind == "f" else of_integers, numbers)


ARITHMETIC = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "rem": np.fmod,  # the sign is that of the dividend
    "and": operator.and_,
    "or": operator.or_,
    "not": operator.invert,
    "neg": operator.neg,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "fma": fma,
    "min": _extremum(np.fmin, np.minimum),  # of a number and a NaN the number
    "max": _extremum(np.fmax, np.maximum),
}

_ORDERED = {"eq": operator.eq, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}


def compare(test, a, b):
    """`setp`: a test of floats that ends in u is true where one is NaN, every other one is false there."""
    unordered = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else np.zeros_like(a, dtype=np.bool_)
    if test in ("nan", "num"):
        return unordered if test == "nan" else ~unordered
    if test in ("ne", "neu"):
        return (a != b) & (~unordered | (test == "neu"))
    if test in _ORDERED:
        return _ORDERED[test](a, b) & ~unordered
    return _ORDERED[test.removesuffix("u")](a, b) | unordered


def shift(name, numbers, amounts):
    """`shl`, `shr`: all bits are shifted out where the amount is the width or more; the sign is shifted in."""
    width = 8 * numbers.itemsize
    far = amounts >= width
    amounts = np.where(far, 0, amounts).astype(numbers.dtype)
    if name == "shl":
        return np.where(far, 0, numbers << amounts).astype(numbers.dtype)
    return np.where(far, np.where(numbers < 0, -1, 0), numbers >> amounts).astype(numbers.dtype)


def extract_field(bits, start, length):
    """`bfe.u32`, of fields that end within the register."""
    assert (start + length <= 32).all()
    return (bits >> start) & ((np.uint64(1) << length.astype(np.uint64)) - np.uint64(1)).astype(np.uint32)


def permute_bytes(a, b, selector):
    """`prmt.b32`: byte n of the result is the one of (a, b) that digit n of the selector names."""
    pool = np.stack([a, b], axis=-1).view(np.uint8)
    digits = (selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & np.uint32(0xF)
    assert (digits < 8).all()  # above, a byte's sign is meant
    return np.take_along_axis(pool, digits.astype(np.int64), axis=1).view(np.uint32).ravel()
