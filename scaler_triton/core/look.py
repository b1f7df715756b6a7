"""Looks: what a check does with each batch of gradients, and what it adds to the message of the ranks.

Most checks take one, `Divide` or `Read`. Rooms add theirs; nothing here knows which there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from scaler_triton.core.passes import Pass, bind_check, bind_unscale, check_batch, unscale_batch_

if TYPE_CHECKING:
    from scaler_triton.core.flag import Flag
    from scaler_triton.core.plan import Batch, GradPlan, Layout
    from scaler_triton.core.ranks import Ranks


class Look:
    """One of the looks of a check; of several the first ones see the gradients before a later one writes them.

    `n_sums` is how many numbers it adds to the ranks' message, which is a sum then. None: none, their largest flag is
    enough. `totals` are the message's own numbers (`kernels.abi`), if the look computes them on its way.
    """

    n_sums: int | None = None
    totals: Tensor | None = None

    def begin(
        self, plan: GradPlan, parameters: Sequence[Tensor], peers: Ranks | None, flag: Flag, scale: Tensor
    ) -> None:
        """Prepare for one optimizer's batches; `peers` must agree, `flag` and `scale` are as of `run`."""

    def run(self, batch: Batch, scale: Tensor, flag: Flag) -> None:
        """Look at a batch: set `flag.found_inf_on(device)` if it is not finite; `scale` has one element, at home."""
        raise NotImplementedError

    def bind(self, layout: Layout, scale: Tensor, found_inf: Tensor) -> Pass | None:
        """Return what `run` does with batches of a layout in which no gradient is missing; None: `run` must do it."""
        return None

    def numbers(self, flags: Sequence[Flag]) -> Tensor:
        """Return this rank's numbers, `wide_dtype` [n_sums], on the flags' device."""
        raise NotImplementedError

    def agreed(self, flags: Sequence[Flag], numbers: Tensor) -> None:
        """Take the sums of `numbers` over the ranks."""

    def judge(self, flags: Sequence[Flag], peers: Ranks | None) -> None:
        """Set flags by what all ranks together have; the last word of a check."""


class Divide(Look):
    """found_inf = any gradient is NaN or Inf; g *= 1 / scale, but for Partial ones."""

    def run(self, batch: Batch, scale: Tensor, flag: Flag) -> None:
        """Check a batch and divide it."""
        found_inf = flag.found_inf_on(batch.layout.device)
        if batch.is_partial:
            check_batch(batch, found_inf)
        else:
            flag.written = True
            unscale_batch_(batch, scale, found_inf)

    def bind(self, layout: Layout, scale: Tensor, found_inf: Tensor) -> Pass | None:
        """Return the pass that divides."""
        return bind_unscale(layout, scale, found_inf)


class Read(Look):
    """found_inf = any gradient is NaN or Inf."""

    def run(self, batch: Batch, scale: Tensor, flag: Flag) -> None:
        """Check a batch."""
        check_batch(batch, flag.found_inf_on(batch.layout.device))

    def bind(self, layout: Layout, scale: Tensor, found_inf: Tensor) -> Pass | None:
        """Return the pass that checks."""
        return bind_check(layout, found_inf)
