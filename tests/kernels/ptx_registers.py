"""What instructions read and write: registers of all threads of a block, special ones, and numbers in the code."""

import re

import numpy as np
from ptx_ops import UNSIGNED, decode, encode, width_of


class Registers:
    """Bits, `[threads]` or one for all: bool for a predicate, else unsigned integers of the register's width."""

    def __init__(self, widths, threads, block):
        """`widths`: of the registers whose names begin so."""
        self._widths = widths
        self._threads = threads
        self._held = {
            "%tid.x": np.arange(threads, dtype=np.uint32),
            "%ctaid.x": np.full(threads, block, dtype=np.uint32),
            "global_smem": np.zeros(threads, dtype=np.uint32),  # shared memory begins at 0
        }

    def held(self, name):
        if name not in self._held:  # nobody wrote it: nothing to rely on
            dtype = UNSIGNED[self._widths[re.match(r"%([a-z]+)", name)[1]]]
            self._held[name] = np.full(self._threads, 0xA5A5A5A5A5A5A5A5).astype(dtype)
        return self._held[name]

    def bits(self, operand, width):
        """The operand's lowest `width` bits."""
        if operand[0] in "%g":
            return self.held(operand).astype(UNSIGNED[width], copy=False)
        number = int(operand[2:], 16) if operand[:2] in ("0f", "0d") else int(operand.rstrip("U"), 0)
        return np.full(self._threads, number % (1 << width), dtype=UNSIGNED[width])

    def read(self, operand, kind):
        """The operand's numbers of a type such as s32."""
        return decode(self.bits(operand, width_of(kind)), kind)

    def write_bits(self, name, bits, active):
        """Set a register's bits in the threads that are active; `_` is no register."""
        if name != "_":
            old = self.held(name)
            assert bits.dtype == old.dtype, f"{name} is of {old.dtype}, not {bits.dtype}"
            self._held[name] = np.where(active, bits, old)

    def write(self, name, numbers, kind, active):
        """As `write_bits`, of numbers as wide as the type or wider."""
        self.write_bits(name, encode(numbers, kind), active)
