"""On a GPU: how near does unscaling come to the card's copy bandwidth, and how long does a user wait for it?"""

from collections.abc import Iterator

import torch

from perf.compare import unscaling
from perf.context import Context, Section
from perf.gpu import ColdClock
from perf.grads import Gradients
from perf.lists import checked_lists
from perf.measure import Subject, interleaved
from perf.rows import Row, bandwidth_rows, time_rows


def sections(context: Context) -> list[Section]:
    """Return the one part, on a GPU."""
    if context.gpu:
        return [Section("unscale", lambda: measure(context))]
    context.leave_out("unscale, against the card's copy bandwidth", "needs a GPU")
    return []


def measure(context: Context) -> Iterator[Row]:
    """Time every list: the device's work, and the wait for it; a copy of as many bytes beside it."""
    device, wall = ColdClock(device_only=True), ColdClock(device_only=False)
    effort = context.effort(0.6, 9)
    for case, gradients, subjects in checked_lists(context, "unscale", unscaling):
        everyone = subjects | {"copy": copying(gradients)}
        times = interleaved(everyone, effort, clock=device)
        n_bytes = 2 * gradients.values.nbytes
        yield from time_rows("unscale", case, "device", times)
        yield from bandwidth_rows("unscale", case, dict.fromkeys(times, n_bytes), times)
        yield from time_rows("unscale", case, "wall", interleaved(subjects, effort, clock=wall))


def copying(gradients: Gradients) -> Subject:
    """Return the copy of one buffer as large as all gradients: it reads and writes what unscaling does."""
    target = torch.empty_like(gradients.values)
    return Subject(lambda: target.copy_(gradients.values))
