"""How far gradients are from overflow, and how many are lost below: what the checking passes measure on their way.

Each flag has a row (fp64, see `kernels.abi`) of what its last check measured, on the scale's device. Ranks add theirs
up in the check's own reduction: counts as they are, the largest gradient as a histogram, since a sum has no maximum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from scaler_triton.flag import Flag
from scaler_triton.kernels.abi import LARGEST, MEASURED_AT, SEEN, SUBNORMAL, ZEROS
from scaler_triton.text import count_of

FP16_MAX = 65504.0
# From here on `Headroom` advises another scale.
_SPARE_BITS, _LOST = 3.0, 1e-3


@dataclass(frozen=True)
class Headroom:
    """What the last checks have measured, over all optimizers and ranks; `str` of it is a sentence to act on.

    Args:
        largest: the largest finite abs(gradient), unscaled; over several ranks rounded down to a power of 2 times the
            scale. 0 if there is none.
        bits: log2(65504 / the same as scaled): by how many powers of 2 the scale could grow; inf if `largest` is 0.
        zeros: the share of elements that are 0.
        subnormal: the share that fp16 holds with fewer bits, 0 < abs(gradient) < 2^-14 as scaled.
        seen: how many elements were checked.
    """

    largest: float
    bits: float
    zeros: float
    subnormal: float
    seen: int

    def __str__(self) -> str:
        if not self.seen:
            return "no gradients were measured yet"
        many = f"{self.seen / 1e6:.3g} M gradients" if self.seen >= 1e6 else count_of(self.seen, "gradient")
        if self.zeros == 1.0:
            return f"all of {many} are zero"
        if self.bits == math.inf:
            return f"{self.zeros:.1%} of {many} are zero, no other is finite".replace("%", " %")
        shares = f"{self.zeros:.1%} of {many} are zero, {self.subnormal:.1%} subnormal"
        if self.bits >= _SPARE_BITS and self.subnormal >= _LOST:
            advice = "a larger scale would help"
        else:
            advice = "the scale fits" if self.bits >= 1.0 else "an overflow is near"
        return f"{count_of(round(self.bits), 'bit')} of headroom, {shares}: {advice}".replace("%", " %")


class Reader:
    """Reads the rows of a scaler's flags, with one wait or with none."""

    def __init__(self) -> None:
        self._known = Headroom(0.0, math.inf, 0.0, 0.0, 0)

    def read(self, flags: Sequence[Flag]) -> Headroom:
        """Return what these have measured, waiting for the device."""
        held = [flag.measured for flag in flags if flag.measured is not None]
        together = [each.to(held[-1].device) for each in held]  # an earlier scale may have been elsewhere
        self._known = _summary(torch.stack(together).tolist() if held else [])
        return self._known

    def newest(self, flags: Sequence[Flag]) -> Headroom:
        """Return the newest values that have arrived on the host, and start the next copy; never waits on CUDA."""
        rows = next((flag.rows for flag in flags if flag.rows is not None), None)
        table = None if rows is None or rows.measured is None else rows.measured_copy.newest(rows.measured)
        if table is not None:
            self._known = _summary([table[flag.row] for flag in flags if flag.rows is rows])
        return self._known


def _summary(rows: Iterable[Sequence[float]]) -> Headroom:
    largest = scaled = zeros = subnormal = seen = 0.0
    for row in rows:
        if row[SEEN]:
            largest, scaled = max(largest, row[LARGEST] / row[MEASURED_AT]), max(scaled, row[LARGEST])
            zeros, subnormal, seen = zeros + row[ZEROS], subnormal + row[SUBNORMAL], seen + row[SEEN]
    bits = math.log2(FP16_MAX / scaled) if scaled else math.inf
    return Headroom(largest, bits, zeros / max(seen, 1.0), subnormal / max(seen, 1.0), int(seen))
