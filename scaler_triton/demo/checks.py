"""Did the ranks agree? Judged from what they went through, nothing assumed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scaler_triton.demo.trace import Trace

# How far the ranks' parameters may end from the single process's, relative to how far training moved them.
# Only the order of fp32 sums differs, but a last bit there can tip a weight or an activation to the next fp16
# number, 2**-11 away, and later steps carry that on: noise of 1e-7 on the gradients ends below 1e-3 after 100
# steps (and above the tolerance after 300). One step too few or too many ends above 2e-2. On a CPU the two runs
# are equal to the bit, or nearly so.
TOLERANCE = 2.0**-8

# A run this short may well bring the loss down by a third; noise between micro-batches is a few percent.
LOSS_MUST_FALL_BY = 0.1


@dataclass(frozen=True)
class Check:
    """One question and its answer."""

    ok: bool
    text: str


def judge(ranks: Sequence[Trace], reference: Trace) -> list[Check]:
    """Return all checks of a run."""
    return [
        scaler_enabled(ranks),
        scales_equal(ranks),
        step_counts_equal(ranks),
        same_decisions(ranks, reference),
        parameters_match(ranks, reference),
        loss_fell(ranks),
    ]


def scaler_enabled(ranks: Sequence[Trace]) -> Check:
    """Check that the scaler is on: a disabled one would pass many of the other checks."""
    off = [str(rank) for rank, trace in enumerate(ranks) if not trace.enabled]
    return Check(not off, f"the scaler is disabled on rank {', '.join(off)}" if off else "the scaler is enabled")


def scales_equal(ranks: Sequence[Trace]) -> Check:
    """Check that all ranks hold the same scale, bit for bit, at every step and at the end."""
    by_step = list(zip(*([scale.hex() for scale in trace.scales] for trace in ranks), strict=True))
    split = [step for step, scales in enumerate(by_step) if len(set(scales)) > 1]
    if split:
        final = ", ".join(f"{trace.scales[-1]:g}" for trace in ranks)
        return Check(False, f"the scales of the ranks split after step {split[0]}; at the end: {final}")
    return Check(True, f"scales are bitwise equal on {_all_ranks(ranks)}, at all {len(by_step) - 1} steps")


def step_counts_equal(ranks: Sequence[Trace]) -> Check:
    """Check that the optimizers of all ranks, and all their parameters, have taken the same number of steps."""
    counts = [trace.step_counts for trace in ranks]
    same = len(set(counts)) == 1 and len(counts[0]) == 1
    shown = str(counts[0][0]) if same else ", ".join("/".join(map(str, count)) for count in counts)
    return Check(same, f"optimizer step counts {f'are equal on {_all_ranks(ranks)}' if same else 'differ'}: {shown}")


def same_decisions(ranks: Sequence[Trace], reference: Trace) -> Check:
    """Check that every rank skipped the steps that had to be skipped, and moved its scale as it had to."""
    scales_right = all(trace.scales == reference.scales for trace in ranks)
    wrong = {step + 1 for trace in ranks for step in _differences(trace.skipped, reference.skipped)}
    if wrong:
        steps = f"step{'s' if len(wrong) > 1 else ''} {', '.join(map(str, sorted(wrong)))}"
        return Check(False, f"wrongly skipped or wrongly taken: {steps}")
    skips = f"{sum(reference.skipped)} bad steps were skipped, no other"
    return Check(scales_right, f"{skips}; scales {'match' if scales_right else 'do NOT match'} a single process")


def parameters_match(ranks: Sequence[Trace], reference: Trace) -> Check:
    """Check that the gathered parameters, as every rank sees them, match the single process's."""
    ends = [trace.end.astype(np.float64) for trace in ranks]
    moved = np.linalg.norm(reference.end.astype(np.float64) - reference.start)
    distance = max(float(np.linalg.norm(end - reference.end) / moved) for end in ends)
    ok = bool(distance <= TOLERANCE)  # False for NaN
    equal = all(trace.end.tobytes() == reference.end.tobytes() for trace in ranks)
    found = "bitwise" if equal else f"relative distance {distance:.1e}, allowed {TOLERANCE:.1e}"
    return Check(ok, f"gathered parameters {'match' if ok else 'do NOT match'} a single process: {found}")


def loss_fell(ranks: Sequence[Trace]) -> Check:
    """Check that the model has learnt something."""
    losses = mean_losses(ranks)
    tail = losses[-max(1, len(losses) // 8) :]
    last = float(np.mean(tail))
    ok = last < losses[0] * (1 - LOSS_MUST_FALL_BY)
    of = f", the mean of the last {len(tail)}" if len(tail) > 1 else ""
    return Check(ok, f"the loss {'fell' if ok else 'did NOT fall'}: {losses[0]:.2f} -> {last:.2f}{of}")


def mean_losses(ranks: Sequence[Trace]) -> list[float]:
    """Return the loss of each step, averaged over the ranks' micro-batches."""
    return [float(np.mean(losses)) for losses in zip(*(trace.losses for trace in ranks), strict=True)]


def _differences(ours: Sequence[bool], theirs: Sequence[bool]) -> list[int]:
    return [step for step, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]


def _all_ranks(ranks: Sequence[Trace]) -> str:
    return "1 rank" if len(ranks) == 1 else f"all {len(ranks)} ranks"
