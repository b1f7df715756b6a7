"""What must hold of the reports of all ranks: they agree bit by bit, and they are right."""

from collections.abc import Iterable, Sequence

from cases import GROWTH_INTERVAL, INIT_SCALE, STEPS, Report


def scale_model(bad_steps: Iterable[int], steps: int = STEPS) -> tuple[list[str], list[int]]:
    """Scales (as hex) and trackers after each update, from the definition."""
    scale, tracker, scales, trackers = INIT_SCALE, 0, [], []
    for step in range(steps):
        if step in bad_steps:
            scale, tracker = scale * 0.5, 0
        else:
            tracker += 1
            if tracker >= GROWTH_INTERVAL:
                scale, tracker = scale * 2.0, 0
        scales.append(scale.hex())
        trackers.append(tracker)
    return scales, trackers


def assert_agreed(
    reports: Sequence[Report],
    *bad_steps: Iterable[int],
    collectives: int = 1,
    steps: int = STEPS,
) -> None:
    """Every rank took and skipped the right steps, at the right scale, for `collectives` a step and optimizer.

    Args:
        bad_steps: for each optimizer, the steps it has to skip.
    """
    scales, trackers = scale_model({step for each in bad_steps for step in each}, steps)
    for rank, report in enumerate(reports):
        assert report.scales == scales, f"scale on rank {rank}"
        assert report.trackers == trackers, f"tracker on rank {rank}"
        assert report.finite, f"a parameter on rank {rank} is not finite"
        assert_skipped(rank, report, bad_steps, steps)
        assert report.collectives == [(collectives,) * len(bad_steps)] * steps, f"collectives on rank {rank}"
        assert report.update_collectives == [0] * steps, f"update() on rank {rank} communicates"


def assert_skipped(rank: int, report: Report, bad_steps: Sequence[Iterable[int]], steps: int) -> None:
    """One rank stepped with every optimizer except at its bad steps, and the step counts say the same."""
    for index, bad in enumerate(bad_steps):
        for step, stepped in enumerate(report.stepped):
            wanted = step not in bad
            assert stepped[index] in (None, wanted), f"rank {rank}, optimizer {index}, step {step}"
        good = steps - len(list(bad))
        assert report.step_counts[index] in ([], [good]), f"step count on rank {rank}, optimizer {index}"
