"""The registry of torch's known defects: `--prove` runs it, the README's table is made from it."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import frexp

from scaler_triton.demo import case_steps as steps
from scaler_triton.demo.case_steps import START, Outcome
from scaler_triton.demo.scalers import Scalers
from scaler_triton.text import rank_names

HALVED = START / 2


def shown(scale: float) -> str:
    """Return a scale as people write it: 2^127, not 1.70141e+38."""
    mantissa, exponent = frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 and exponent > 20 else f"{scale:g}"


@dataclass(frozen=True)
class Right:
    """What every rank has to hold in the end.

    Args:
        stepped: whether the parameters must have changed.
        scale: the scale.
    """

    stepped: bool
    scale: float

    def __str__(self) -> str:
        return f"every rank {'steps' if self.stepped else 'skips the step'} and holds scale {shown(self.scale)}"

    def wrong(self, outcomes: Sequence[Outcome]) -> str:
        """Return what is not so, in words; empty if all is right."""
        said = []
        if len({(outcome.scale, outcome.stepped) for outcome in outcomes}) > 1:
            said.append("the ranks split")
        if bad := [rank for rank, outcome in enumerate(outcomes) if not outcome.finite]:
            said.append(f"NaN or Inf in the weights of {rank_names(bad)}")
        if not said and outcomes[0].scale != self.scale:
            said.append(f"the scale is {shown(outcomes[0].scale)} instead of {shown(self.scale)}")
        if not said and outcomes[0].stepped != self.stepped:
            said.append(f"the step was {'taken' if outcomes[0].stepped else 'skipped'}")
        return "; ".join(said)


@dataclass(frozen=True)
class Case:
    """One defect.

    Args:
        name: what `--prove` takes.
        summary: the situation, in one line.
        torch: what torch does, in one line.
        ours: what we do, in one line.
        run: runs on every rank, `run(rank, scalers) -> Outcome`.
        right: what must come out.
        issue: address of torch's own issue, where there is one.
    """

    name: str
    summary: str
    torch: str
    ours: str
    run: Callable[[int, Scalers], Outcome]
    right: Right
    issue: str = ""


CASES = {
    case.name: case
    for case in (
        Case(
            "fsdp1-fused",
            "FSDP1, fused AdamW, ShardedGradScaler; one rank's gradient shard overflows",
            "the ranks split for good: one skips the step and backs off, the others step",
            "every rank skips the step",
            steps.fsdp1_fused,
            Right(stepped=False, scale=HALVED),
        ),
        Case(
            "fused-clip",
            "FSDP1, fused SGD, `unscale_` and clipping; two ranks overflow in the same step",
            "the step is taken: NaN or Inf in the weights",
            "every rank skips the step",
            steps.fused_clip,
            Right(stepped=False, scale=HALVED),
        ),
        Case(
            "fused-adam-unscale",
            "fused AdamW, ShardedGradScaler, `unscale_` before the step; nothing overflows",
            "`step` raises RuntimeError, always",
            "every rank steps",
            steps.fused_adam_unscale,
            Right(stepped=True, scale=START),
            issue="https://github.com/pytorch/pytorch/issues/140514",
        ),
        Case(
            "tp-first-replicated",
            "GradScaler on DTensors: the first parameter is replicated, the shard of another overflows on one rank",
            "the ranks split: one skips, the other steps",
            "every rank skips the step",
            steps.tp_first_replicated,
            Right(stepped=False, scale=HALVED),
        ),
        Case(
            "dtensor-beside-plain",
            "GradScaler, sharded and plain parameters in one optimizer (FSDP2's `ignored_params`)",
            "`step` raises RuntimeError about mixed tensors",
            "every rank skips the bad step",
            steps.dtensor_beside_plain,
            Right(stepped=False, scale=HALVED),
        ),
        Case(
            "rank-without-grads",
            "fused AdamW, ShardedGradScaler; one rank got no gradients, those of another overflow",
            "the ranks split: their scales differ from here on",
            "every rank skips the step",
            steps.rank_without_grads,
            Right(stepped=False, scale=HALVED),
        ),
        Case(
            "rank-without-grads-dtensor",
            "GradScaler on sharded experts; those of one rank got no gradients, those of another overflow",
            "one rank raises AssertionError, the other hangs in a collective",
            "every rank skips the step",
            steps.rank_without_grads_dtensor,
            Right(stepped=False, scale=HALVED),
        ),
        Case(
            "scale-to-inf",
            "ShardedGradScaler on the CPU; the scale grows for as long as nothing overflows",
            "the scale becomes inf and every later step is skipped",
            "the scale stays at the largest power of two, training goes on",
            steps.scale_to_inf,
            Right(stepped=True, scale=2.0**127),
        ),
        Case(
            "tracker-past-interval",
            "GradScaler; `set_growth_interval` to fewer good steps than were already counted",
            "the scale never grows again until a step is skipped",
            "the scale grows at the next good step",
            steps.tracker_past_interval,
            Right(stepped=True, scale=4 * START),
        ),
        Case(
            "failed-step",
            "GradScaler; `optimizer.step` runs out of memory, the loop drops that batch, the next one overflows",
            "the next step neither unscales nor checks: NaN or Inf in the weights",
            "the next step checks its gradients, and is skipped",
            steps.failed_step,
            Right(stepped=False, scale=HALVED),
        ),
        Case(
            "fused-then-plain",
            "ShardedGradScaler; a fused optimizer steps before a plain one",
            "`update` raises RuntimeError",
            "both step on every rank",
            steps.fused_then_plain,
            Right(stepped=True, scale=START),
        ),
    )
}


def list_cases(columns: int | None = None) -> str:
    """Return the names and summaries, a line each, or several of at most `columns` characters."""
    width = max(map(len, CASES)) + 2
    lines = [f"{case.name:{width}}{case.summary}" for case in CASES.values()]
    if columns is None:
        return "\n".join(lines)
    return "\n".join(textwrap.fill(line, max(columns, 2 * width), subsequent_indent=" " * width) for line in lines)


def cases_table() -> str:
    """Return the registry as a Markdown table: the case, what happens with torch, with ours."""
    rows = ["| case | with torch | with scaler_triton |", "| --- | --- | --- |"]
    for case in CASES.values():
        known = f" ([known]({case.issue}))" if case.issue else ""
        rows.append(f"| `{case.name}`: {case.summary} | {case.torch}{known} | {case.ours} |")
    return "\n".join(rows)
