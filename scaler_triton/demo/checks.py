"""Whether the ranks agreed, judged from what each of them went through."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from scaler_triton.demo.train import Trace

# How far the ranks' parameters may end from the single process's, relative to how far training moved them.
# Only the order of fp32 sums differs, but a last bit there can tip a weight or an activation to the next fp16
# number, 2**-11 away, and later steps carry that on: noise of 1e-7 on the gradients ends below 1e-3 after 100
# steps (and above the tolerance after 300). One step too few or too many ends above 2e-2. On a CPU the two runs
# are equal to the bit, or nearly so.
TOLERANCE = 2.0**-8

# A run this short may well bring the loss down by a third; noise between micro-batches is a few percent.
LOSS_MUST_FALL_BY = 0.1


class Check(NamedTuple):
    """One question and its answer."""

    ok: bool
    text: str


def judge(ranks: Sequence[Trace], reference: Trace) -> list[Check]:
    """Return whether the ranks agree with each other, and with the single process."""
    everywhere = "1 rank" if len(ranks) == 1 else f"all {len(ranks)} ranks"
    off = [rank for rank, trace in enumerate(ranks) if not trace.enabled]  # would pass many of the other checks
    by_step = list(zip(*(trace.scales for trace in ranks), strict=True))
    split = [step for step, scales in enumerate(by_step) if len(set(scales)) > 1]
    counts = ["/".join(map(str, trace.step_counts)) for trace in ranks]
    uneven = len(set(counts)) > 1 or len(ranks[0].step_counts) > 1
    pairs = [pair for trace in ranks for pair in enumerate(zip(trace.skipped, reference.skipped, strict=True), 1)]
    wrong = sorted({step for step, (skipped, right) in pairs if skipped != right})
    same = all(trace.scales == reference.scales for trace in ranks)
    return [
        Check(not off, f"the scaler is disabled on rank {_listed(off)}" if off else "the scaler is enabled"),
        Check(False, f"the scales of the ranks split after step {split[0]}; at the end: {_listed(by_step[-1])}")
        if split
        else Check(True, f"scales are bitwise equal on {everywhere}, at all {len(by_step) - 1} steps"),
        Check(False, f"optimizer step counts differ: {_listed(counts)}")
        if uneven
        else Check(True, f"optimizer step counts are equal on {everywhere}: {counts[0]}"),
        Check(False, f"wrongly skipped or wrongly taken: step{'s' if len(wrong) > 1 else ''} {_listed(wrong)}")
        if wrong
        else Check(same, f"{sum(reference.skipped)} bad steps were skipped, no other; scales {_match(same)}"),
        _parameters_match(ranks, reference),
        _loss_fell(mean_losses(ranks)),
    ]


def mean_losses(ranks: Sequence[Trace]) -> list[float]:
    """Return the loss of each step, averaged over the ranks' micro-batches."""
    return [float(np.mean(losses)) for losses in zip(*(trace.losses for trace in ranks), strict=True)]


def _parameters_match(ranks: Sequence[Trace], reference: Trace) -> Check:
    moved = np.linalg.norm(reference.end - reference.start)
    distance = float(np.max([np.linalg.norm(trace.end - reference.end) / moved for trace in ranks]))
    ok = distance <= TOLERANCE  # False for NaN
    equal = all(trace.end.tobytes() == reference.end.tobytes() for trace in ranks)
    found = "bitwise" if equal else f"relative distance {distance:.1e}, allowed {TOLERANCE:.1e}"
    return Check(ok, f"gathered parameters {_match(ok)}: {found}")


def _loss_fell(losses: Sequence[float]) -> Check:
    tail = losses[-max(1, len(losses) // 8) :]
    last = float(np.mean(tail))
    ok = last < losses[0] * (1 - LOSS_MUST_FALL_BY)
    of = f", the mean of the last {len(tail)}" if len(tail) > 1 else ""
    return Check(ok, f"the loss {'fell' if ok else 'did NOT fall'}: {losses[0]:.2f} -> {last:.2f}{of}")


def _match(ok: bool) -> str:
    return f"{'match' if ok else 'do NOT match'} a single process"


def _listed(items: Iterable[object]) -> str:
    return ", ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in items)
