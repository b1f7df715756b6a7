"""Memory as a kernel may see it: some tensors and nothing else; and who touched what."""

import ctypes

import numpy as np


class Fault(Exception):
    """A kernel did what is an error on a GPU, or undefined."""


class Memory:
    """The bytes of some tensors of this process, at their own addresses."""

    def __init__(self, spans):
        """`spans`: (address, bytes) of each tensor."""
        spans = sorted(span for span in spans if span[1])
        self._set_bounds(spans)
        size = max(start + size for start, size in spans) - spans[0][0]
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(spans[0][0]))

    def _set_bounds(self, spans):
        self._starts = np.array([start for start, _ in spans], dtype=np.uint64)
        self._ends = np.array([start + size for start, size in spans], dtype=np.uint64)

    def load(self, addresses, width):
        """`width` bytes from each address on, `[addresses, width]`."""
        return self._bytes[self._places(addresses, width)]

    def store(self, addresses, values):
        """Write a row of `values`, uint8 `[addresses, width]`, to each address."""
        self._bytes[self._places(addresses, values.shape[1])] = values

    def _places(self, addresses, width):
        span = np.searchsorted(self._starts, addresses, side="right").astype(np.int64) - 1
        outside = (span < 0) | (addresses + np.uint64(width) > self._ends[span])
        if outside.any():
            raise Fault(f"{width} bytes at {int(addresses[outside][0]):#x} belong to no tensor of the launch")
        if (addresses % np.uint64(width)).any():
            raise Fault(f"{width} bytes at an address that is no multiple of {width}")
        return (addresses - self._starts[0]).astype(np.int64)[:, None] + np.arange(width)


class Shared(Memory):
    """A block's shared memory, from address 0 on."""

    def __init__(self, size):
        self._set_bounds([(0, size)])
        self._bytes = np.full(size, 0xA5, dtype=np.uint8)


class Races:
    """Which warps of a block touched which bytes: two that do without a barrier between, one of them writing, race.

    Attributes:
        touched: {True: bytes written, False: bytes read}, each a list of sorted addresses.
    """

    def __init__(self):
        self.touched = {True: [], False: []}
        self.barrier()

    def barrier(self):
        self._since = []

    def note(self, addresses, warps, width, writes):
        """Each of these warps reads or writes `width` bytes at its address; how many different bytes that are.

        Addresses are multiples of `width`, or `Memory` has a Fault: two that differ share no byte.
        """
        starts, number = np.unique(addresses, return_inverse=True)
        places = (starts[:, None] + np.arange(width, dtype=np.uint64)).ravel()
        first, last = np.full(len(starts), 1024), np.full(len(starts), -1)
        np.minimum.at(first, number, warps)
        np.maximum.at(last, number, warps)
        first, last = first.repeat(width), last.repeat(width)
        for other, other_first, other_last, other_writes in self._since:
            if writes or other_writes:
                both, mine, its = np.intersect1d(places, other, assume_unique=True, return_indices=True)
                several = np.minimum(first[mine], other_first[its]) != np.maximum(last[mine], other_last[its])
                if several.any():
                    raise Fault(f"two warps touch {int(both[several][0]):#x} with no barrier between")
        self._since.append((places, first, last, writes))
        self.touched[writes].append(places)
        return len(places)


def check_programs(races):
    """Nobody writes what another program reads: programs run in any order, and at once."""
    written = [np.unique(np.concatenate([[], *each.touched[True]])) for each in races]
    read = [np.unique(np.concatenate([[], *each.touched[False]])) for each in races]
    by_all, times = np.unique(np.concatenate([[], *read]), return_counts=True)
    for mine, its_own in zip(written, read, strict=True):
        both, _, place = np.intersect1d(mine, by_all, assume_unique=True, return_indices=True)
        others = times[place] - np.isin(both, its_own)
        if others.any():
            raise Fault(f"a program writes {int(both[others > 0][0]):#x}, which another one reads")
