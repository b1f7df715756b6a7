"""LaunchConfig: how many elements one program processes, and with how many warps. Imports no triton."""

from dataclasses import dataclass, fields

# The lanes of a "warp" here, on every GPU: `launcher` uses fewer on one with wider warps.
WARP_LANES = 32
# The widest access that one lane can make.
VECTOR_BYTES = 16

# A configuration is chosen for a mode, the pass that writes or the one that only reads, and bytes per element.
MODES = ("unscale", "check")
ITEMSIZES = (2, 4, 8)

_LARGEST = {"num_warps": 32, "vectors": 8, "unroll": 16}


@dataclass(frozen=True)
class LaunchConfig:
    """The shape of one program: `num_warps` warps, `unroll` steps, `vectors` 16-byte accesses per lane and step.

    By default a program processes 16 KB of gradients and, compiled for sm_90, takes at most 40 registers per lane: 48
    of a multiprocessor's 64 warps are resident, or all of them in passes that only read, with 32 registers.

    Args:
        num_warps: of 32 lanes; a power of two, at most 32.
        vectors: a power of two, at most 8.
        unroll: 1 to 16.

    Raises: ValueError naming the number that is out of range.
    """

    num_warps: int = 8
    vectors: int = 2
    unroll: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            value, largest = getattr(self, field.name), _LARGEST[field.name]
            if type(value) is not int or not 1 <= value <= largest:
                raise ValueError(f"{field.name} must be an int from 1 to {largest}, got {value!r}")
            if field.name != "unroll" and value & (value - 1):  # Triton's blocks are powers of two
                raise ValueError(f"{field.name} must be a power of two, got {value}")

    def __str__(self) -> str:
        return f"{self.num_warps} x {self.vectors} x {self.unroll}"

    def block_elements(self, itemsize: int) -> int:
        """Return how many elements a program processes in one step, for elements of `itemsize` bytes."""
        return WARP_LANES * self.num_warps * self.vectors * (VECTOR_BYTES // itemsize)

    def chunk_elements(self, itemsize: int) -> int:
        """Return how many elements a program processes in all its steps, for elements of `itemsize` bytes."""
        return self.block_elements(itemsize) * self.unroll


DEFAULT = LaunchConfig()

# What `tune` tries. tests/kernels/test_aot.py checks that none of them spills registers.
CANDIDATES = tuple(
    LaunchConfig(*numbers)
    for numbers in ((4, 1, 2), (4, 2, 1), (8, 1, 2), (8, 2, 1), (8, 1, 4), (8, 2, 2), (8, 4, 1), (16, 1, 2), (8, 2, 4))
)


def check_pass(mode: str, itemsize: int) -> None:
    """Raise ValueError for an unknown mode or element size."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if type(itemsize) is not int or itemsize not in ITEMSIZES:
        raise ValueError(f"itemsize must be one of {', '.join(map(str, ITEMSIZES))} bytes, got {itemsize!r}")
