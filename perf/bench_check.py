"""On a GPU: what does the check before a fused optimizer cost, which need not write what it reads?"""

from collections.abc import Iterator

from perf.compare import checking
from perf.context import Context, Section
from perf.gpu import ColdClock
from perf.lists import checked_lists
from perf.measure import interleaved
from perf.rows import Row, bandwidth_rows, time_rows


def sections(context: Context) -> list[Section]:
    """Return the one part, on a GPU."""
    if context.gpu:
        return [Section("check", lambda: measure(context))]
    context.leave_out("check before a fused optimizer", "needs a GPU")
    return []


def measure(context: Context) -> Iterator[Row]:
    """Time every list: the device's work, and the wait for it."""
    device, wall = ColdClock(device_only=True), ColdClock(device_only=False)
    effort = context.effort(0.6, 9)
    for case, gradients, subjects in checked_lists(context, "check", checking):
        times = interleaved(subjects, effort, clock=device)
        size = gradients.values.nbytes  # torch's pass writes as much again
        moved = {name: size if name == "ours" else 2 * size for name in times}
        yield from time_rows("check", case, "device", times)
        yield from bandwidth_rows("check", case, moved, times)
        yield from time_rows("check", case, "wall", interleaved(subjects, effort, clock=wall))
