"""How many elements one program visits, and with how many warps. Imports no triton."""

from dataclasses import dataclass

# The lanes that a "warp" has here, on every card: `launcher` asks a card with wider ones for fewer.
WARP_LANES = 32
# The widest access that one lane can make.
VECTOR_BYTES = 16


@dataclass(frozen=True)
class LaunchConfig:
    """The shape of one program: `num_warps` warps, `unroll` steps, `vectors` 16-byte accesses a lane and step.

    The default keeps 16 KB of gradient in a program and, compiled for sm_90, 31 or 32 registers a lane: all
    64 warps of a multiprocessor stay resident.
    """

    num_warps: int = 8
    vectors: int = 1
    unroll: int = 4

    def block_elements(self, itemsize: int) -> int:
        """Elements that a program visits in one step, for elements of `itemsize` bytes."""
        return WARP_LANES * self.num_warps * self.vectors * (VECTOR_BYTES // itemsize)

    def chunk_elements(self, itemsize: int) -> int:
        """Elements that a program visits in all its steps, for elements of `itemsize` bytes."""
        return self.block_elements(itemsize) * self.unroll


DEFAULT = LaunchConfig()
