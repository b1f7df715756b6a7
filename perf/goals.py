"""The budget: what is to be reached, and whether the rows reach it."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perf.rows import FARTHER, Entry, Row

EVEN = 1.02  # 2 % apart counts as equally fast

GPU, FULL = "needs a GPU", "needs a full run"


class Cause(NamedTuple):
    """Why a goal is missed, and what was tried against it: phrases, each from a measurement."""

    why: str
    tried: str


UNKNOWN = Cause("not known yet", "nothing yet")


@dataclass(frozen=True)
class Goal:
    """One row of the budget.

    Args:
        question: in words.
        bench, cases, metric: which rows answer it; `cases` is a pattern, and the worst of them counts.
        limit: what `subject`'s median must not pass.
        subject: the number that is compared with the limit.
        at_least: the limit is a lower one.
        needs: why a machine may not have measured it.
        because: why it is missed where it is.
    """

    question: str
    bench: str
    cases: str
    metric: str
    limit: float
    subject: str = "ours / torch"
    at_least: bool = False
    needs: str = GPU
    because: Cause = UNKNOWN

    def is_met_by(self, value: float) -> bool:
        """Tell whether a value is within the limit."""
        return value >= self.limit if self.at_least else value <= self.limit

    def text(self) -> str:
        """Return the limit as the table shows it."""
        limit = f"{self.limit / 1e3:g} ms" if self.bench == "import" else f"{self.limit:.4g}"
        return f"{'>=' if self.at_least else '<='} {limit}"


NUMBERS = "numpy or Python in place of torch's ops on single numbers, kept wherever it was quicker"
FIXED = Cause("a fixed cost per step, whatever the number of gradients", NUMBERS)
FEW = FIXED._replace(
    why=f"{FIXED.why}: it pays off with 50, not with 10; of torch's time its op, and a GPU's launches, are left out",
    tried=f"{NUMBERS}; no route by size to torch's op, whose own launches would come on top of the same fixed cost",
)
COLD = FIXED._replace(
    why=f"{FIXED.why}: larger than in a loop of its own, as backward leaves none of the scaler's code in the caches",
)
CALLS = Cause(
    "torch has no call that only reads a list of tensors, and reading a large one takes one core nearly as long as "
    "writing it back: small ones are copied together and summed",
    "sums, norms, extremes and sums by rows, none of which reads faster than a tensor's product with itself",
)
LARGE = Cause("large gradients cost their bytes, merged or not", "nothing: no pass can move fewer")
WALK = Cause(
    "both walk every parameter and gradient; this walk is most of our time, and takes longer where caches are slow",
    "maps in place of loops, no quicker; torch's grouping helper in place of its guards, slower; the public comparison "
    "of shapes and strides, much slower",
)
NOISE = Cause(
    "a scaler's calls (`host` in the CSV) take under 2 % of such a step, torch's and ours: more is the machine's noise",
    "three runs instead of one, whose medians move by as much",
)
EXACT = Cause(
    "16-bit gradients are converted to fp32 for an exact norm; torch's norm is rounded to 16 bits",
    "dot products, whose errors exceed 1e-6; converting by integer shifts or into a reused buffer, no quicker; larger "
    "pieces, quicker only where caches are large",
)
WAIT = Cause(
    "a plain optimizer begins when the host has read the flag, and the GPU is idle until its first launches arrive; "
    "with torch's scaler, too",
    "nothing: only the host can keep such an optimizer from stepping",
)
BYTES = Cause(
    "each gradient is read once more, and torch's fused step, which divides it, writes it back",
    "nothing: no check can read less",
)
ENDS = Cause(
    "tensors of 200 KB end in a chunk that is not full",
    "smaller and larger chunks, none of which is quicker on both of `tune`'s workloads",
)

HOST, WHOLE = "unscale_", "scale + unscale_ + step + update"
CLIP, CLIPPED_STEP = "unscale + clip", "unscale + clip + fused AdamW"
GOALS = (
    Goal(
        "whole step, eager, over none",
        "step",
        r"(GPT-2|LoRA|FSDP2)(?!.*cpu).*",
        "step",
        1.005,
        "ours / none",
        because=WAIT,
    ),
    Goal("whole step, captured, over none", "step", r".*captured", "step", 1.001, "ours / none", because=BYTES),
    Goal("whole step, CPU offload", "step", r"CPU offload.*", "step", EVEN),
    Goal("whole step, small, on the CPU", "step", r".*cpu.*", "step", EVEN, needs=FULL, because=NOISE),
    Goal("GPU idle, farther from none than torch", "step", r".*AdamW.*", "idle", EVEN, FARTHER, because=WAIT),
    Goal("a step's scaler in training, host", "step", r".*AdamW.*", "host", EVEN, because=COLD),
    Goal("500 FSDP2, unscale_, host", "host", r"500 DTensor, .*(cuda|stub)", HOST, 0.25, needs=FULL),
    Goal("the same on the CPU, as a whole", "host", r"500 DTensor, .*cpu", HOST, 0.25, needs=FULL, because=WALK),
    Goal("500 FSDP2, unscale + clip, host", "clip", r"500 DTensor, .*(cuda|stub)", CLIP, 0.1, needs=FULL),
    Goal("500 FSDP2, unscale + clip, CPU", "clip", r"500 DTensor, .*cpu", CLIP, 0.2, needs=FULL),
    Goal("500 plain, unscale_, host", "host", r"500 plain, same.*(cuda|stub)", HOST, 0.4, needs=FULL, because=WALK),
    Goal("the same, new addresses", "host", r"500 plain, new.*(cuda|stub)", HOST, 0.5, needs=FULL, because=WALK),
    Goal("500 plain, unscale_, on the CPU", "host", r"500 plain, .*cpu", HOST, 0.5, needs=FULL, because=WALK),
    Goal("500 plain, a step, host", "host", r"500 plain, same.*(cuda|stub)", WHOLE, 0.4, needs=FULL, because=FIXED),
    Goal("10 to 2000 plain, a step, host", "host", r"\d+ plain, .*(cuda|stub)", WHOLE, EVEN, needs=FULL, because=FEW),
    Goal("grads come and go, a step, host", "host", r"(MoE|LoRA|GAN).*(cuda|stub)", WHOLE, EVEN, needs=FULL),
    Goal("2000 small, one unscale_, wall", "unscale", r"2000 x (64|1k) fp32", "wall", 1 / 3, because=WALK),
    Goal("check before fused, large", "check", r"(GPT-2|Llama|ViT|2000 x 100k).*", "device", 1 / 1.9),
    Goal("unscale + clip, any optimizer", "clip", r"\d+ x 5M fp32, cuda", f"{CLIP}, device", 1 / 1.6),
    Goal("unscale + clip + fused AdamW", "clip", r"\d+ x 5M fp32, cuda", f"{CLIPPED_STEP}, device", 1 / 1.15),
    Goal("the same with defer=True", "clip", r"\d+ x 5M fp32, cuda", f"{CLIPPED_STEP}, deferred, device", 1 / 1.3),
    Goal(
        "share of copy bandwidth, large",
        "unscale",
        r"(Llama|2000 x 100k).*",
        "device",
        0.95,
        "copy / ours",
        at_least=True,
        because=ENDS,
    ),
    Goal("added launches, one dtype", "launches", r"(plain|fused) AdamW", "launches", 3, "ours - none"),
    Goal("added launches, with clipping", "launches", r".* AdamW, clip", "launches", 5, "ours - none"),
    Goal("collectives of a clip", "clip", r".* ranks.*", "collectives", 1, "ours", needs=FULL),
    Goal("CPU: unscale", "cpu", r".*", "unscale", EVEN, needs=FULL),
    Goal("CPU: a step", "host", r".*, cpu", WHOLE, EVEN, needs=FULL, because=FIXED),
    Goal("CPU: adjacent gradients, small", "cpu", r"2000 x 64 .*", "unscale, adjacent", 0.5, needs=FULL, because=WALK),
    Goal("CPU: adjacent gradients, 1k", "cpu", r"2000 x 1k .*", "unscale, adjacent", 0.5, needs=FULL, because=LARGE),
    Goal("CPU: adjacent gradients, others", "cpu", r".*", "unscale, adjacent", EVEN, needs=FULL, because=LARGE),
    Goal("CPU: unscale + clip, plain", "clip", r"(?!.*DTensor).*, cpu", CLIP, 1 / 1.2, needs=FULL, because=EXACT),
    Goal("CPU: check, over 1 MB each", "cpu", r"20 x 1M.*", "check", 1 / 1.2, needs=FULL, because=CALLS),
    Goal("CPU: check, smaller ones too", "cpu", r".*", "check", EVEN, needs=FULL, because=CALLS),
    Goal("import, over import torch", "import", r".*", "import", 50_000, "ours", needs=FULL),
)


class Answer(NamedTuple):
    """A goal, and the worst case that was measured for it; no rows if none was."""

    goal: Goal
    rows: dict[str, Row]
    device: str = ""

    @property
    def value(self) -> float | None:
        """What is compared with the limit."""
        return self.rows[self.goal.subject].p50 if self.rows else None

    @property
    def met(self) -> str:
        """Return "yes", "no" or "not measured"."""
        if self.value is None:
            return "not measured"
        return "yes" if self.goal.is_met_by(self.value) else "no"


def answers(entries: Iterable[Entry], goals: Sequence[Goal] = GOALS) -> list[Answer]:
    """Return every goal's answer from every device that has one; a goal without any is answered by no rows."""
    found: list[Answer] = []
    by_device: dict[str, list[Row]] = {}
    for entry in entries:
        by_device.setdefault(entry.machine.device, []).append(entry.row)
    for goal in goals:
        here = [
            Answer(goal, rows, device) for device, all_rows in by_device.items() if (rows := _worst(goal, all_rows))
        ]
        found += here or [Answer(goal, {})]
    return found


def _worst(goal: Goal, rows: Iterable[Row]) -> dict[str, Row]:
    """Return the rows, by subject, of the case that is furthest from the goal."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        if (row.bench, row.metric) == (goal.bench, goal.metric) and re.fullmatch(goal.cases, row.case):
            cases.setdefault(row.case, {})[row.subject] = row
    decided = [case for case in cases.values() if goal.subject in case]
    pick = min if goal.at_least else max
    return pick(decided, key=lambda case: case[goal.subject].p50, default={})
