#!/usr/bin/env bash
# triton 3.7.1 (its interpreter, TRITON_INTERPRET=1), torch 2.13.0 (CPU), Python 3.11
#
# Behaviour: a kernel stores its integer argument to int64 memory. From 2^31 to 2^32 - 1 only four of the eight bytes are
#   written: the upper half of the old number stays, so that 2^31 stored over -1 reads -2^31. An annotation `tl.int64`
#   and `.to(tl.int64)` change nothing, as the argument has that type by name already; only its NumPy array is uint32.
#   Smaller and larger numbers are right, and so is every one over zeros, on which most tests store; a sum with an int64
#   zero is right, too.
# Guess: what a kernel stores to int64 memory is eight bytes, at the latest where the argument says `tl.int64`.
# Output seen:
#   plain: 2147483647 2147483647, 2147483648 -2147483648, 4294967295 -1, 4294967296 4294967296
#   annotated: 2147483647 2147483647, 2147483648 -2147483648, 4294967295 -1, 4294967296 4294967296
#   cast: 2147483647 2147483647, 2147483648 -2147483648, 4294967295 -1, 4294967296 4294967296
#   sum: 2147483647 2147483647, 2147483648 2147483648, 4294967295 4294967295, 4294967296 4294967296
#   annotated, over zeros: 2147483647 2147483647, 2147483648 2147483648, 4294967295 4294967295, 4294967296 4294967296
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/pip" install --quiet --no-deps triton==3.7.1
cat > "$folder/program.py" << 'PROGRAM'
import torch
import triton
import triton.language as tl


@triton.jit
def plain(memory, number):
    tl.store(memory, number)


@triton.jit
def annotated(memory, number: tl.int64):
    tl.store(memory, number)


@triton.jit
def cast(memory, number):
    tl.store(memory, number.to(tl.int64))


@triton.jit
def sum_with_zero(memory, number):
    tl.store(memory, number + tl.zeros((), tl.int64))


NUMBERS = [2**31 - 1, 2**31, 2**32 - 1, 2**32]


def stored(kernel, before):
    """Return what is in memory after each number was stored over `before`."""
    found = []
    for number in NUMBERS:
        memory = torch.full((1,), before, dtype=torch.int64)
        kernel[(1,)](memory, number)
        found.append(memory.item())
    return found


seen = {"plain": stored(plain, -1), "annotated": stored(annotated, -1), "cast": stored(cast, -1)}
seen |= {"sum": stored(sum_with_zero, -1), "annotated, over zeros": stored(annotated, 0)}
for name, found in seen.items():
    print(f"{name}: " + ", ".join(f"{number} {there}" for number, there in zip(NUMBERS, found)))
half = [2**31 - 1, -(2**31), -1, 2**32]
assert list(seen.values()) == [half, half, half, NUMBERS, NUMBERS], seen
PROGRAM
TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/program.py"
