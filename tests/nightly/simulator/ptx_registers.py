"""What instructions read and write: registers of all threads of a block, special ones, and numbers in the code."""

import numpy as np
from ptx_ops import UNSIGNED, decode, encode, width_of


class Registers:
    """Bits, `[threads]` or one for all: bool for a predicate, else unsigned integers of the register's width."""

    def __init__(self, widths, threads, block):
        """`widths`: of the registers whose names begin so."""
        self.all_threads = np.ones(threads, dtype=np.bool_)
        self._threads = threads
        unwritten = np.full(threads, 0xA5A5A5A5A5A5A5A5)  # nothing to rely on
        self._unwritten = {f"%{prefix}": unwritten.astype(UNSIGNED[width]) for prefix, width in widths.items()}
        self._constants = {}
        self._held = {
            "%tid.x": np.arange(threads, dtype=np.uint32),
            "%ctaid.x": np.full(threads, block, dtype=np.uint32),
            "global_smem": np.zeros(threads, dtype=np.uint32),  # shared memory begins at 0
        }

    def held(self, name):
        found = self._held.get(name)
        return self._unwritten[name.rstrip("0123456789")] if found is None else found

    def bits(self, operand, width):
        """The operand's lowest `width` bits."""
        if operand[0] in "%g":
            return self.held(operand).astype(UNSIGNED[width], copy=False)
        if (operand, width) not in self._constants:
            number = int(operand[2:], 16) if operand[:2] in ("0f", "0d") else int(operand.rstrip("U"), 0)
            self._constants[operand, width] = np.full(self._threads, number % (1 << width), dtype=UNSIGNED[width])
        return self._constants[operand, width]

    def read(self, operand, kind):
        """The operand's numbers of a type such as s32."""
        return decode(self.bits(operand, width_of(kind)), kind)

    def write_bits(self, name, bits, active):
        """Set a register's bits in the threads that are active; `_` is no register. No array is written to again."""
        if name != "_":
            old = self.held(name)
            assert bits.dtype == old.dtype, f"{name} is of {old.dtype}, not {bits.dtype}"
            assert bits.shape == old.shape or active is not self.all_threads
            self._held[name] = bits if active is self.all_threads else np.where(active, bits, old)

    def write(self, name, numbers, kind, active):
        """As `write_bits`, of numbers as wide as the type or wider."""
        self.write_bits(name, encode(numbers, kind), active)
