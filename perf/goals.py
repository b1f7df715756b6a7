"""What is to be reached, and whether the rows reach it: all goals are here."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from perf.bench_guard import NOT_FINITE, SPIKES
from perf.bench_host import ALL
from perf.bench_passes import OPS
from perf.rows import Entry

ABSENT = "not measured on this version"
LOOP, FSDP2, STUB = "in a training loop", "under FSDP2", "GPU path .*"
GPU, CPU = "(?!cpu).*", "cpu.*"
HOST = "by lists|on the host"  # where there is a GPU, its own time is another part
PLAIN, FUSED, UNSCALE, CLIP = ".*plain", ".*fused", "unscale_", "unscale + clip"
UPDATE = "`update` is Python where torch has one op; with thousands of new gradients both wait for memory"
NORM = "torch takes norms in the gradients' dtype, ours converts 16-bit ones; with few gradients our Python counts"
MANY = "what is left is Python: scale, step and update are some 25 calls"
BY_HAND = "by hand it is one norm and one `if`; the guard agrees over ranks, counts, and leaves marks"
MANY_CASES = "(?!10 ).*"
EACH = "one call of torch's guard recognises the list; for a single tensor that is as long as torch's op"


@dataclass(frozen=True)
class Goal:
    """A limit for the median of `subject` in the worst of the cases; `part`, `cases` and `devices` are patterns.

    Args:
        at_least: the limit is a lower one.
        why: why it is missed, where it is.
    """

    text: str
    question: str
    part: str
    cases: str
    metric: str
    limit: float
    subject: str = "ours / torch"
    devices: str = ".*"
    at_least: bool = False
    why: str = ""

    def is_met_by(self, value: float) -> bool:
        """Return whether a value is within the limit."""
        return value >= self.limit if self.at_least else value <= self.limit

    @property
    def limit_text(self) -> str:
        """The limit as tables show it."""
        return f"{'>=' if self.at_least else '<='} {self.limit:g}"

    def is_about(self, entry: Entry) -> bool:
        """Return whether a row is one of those that answer it."""
        row, machine = entry
        texts = (self.part, row.part), (self.cases, row.case), (self.devices, machine.device)
        exactly = (row.question, row.metric, row.subject) == (self.question, self.metric, self.subject)
        return exactly and all(re.fullmatch(pattern, text) for pattern, text in texts)


GOALS = (
    Goal("Python calls of a step, plain", "host", "Python calls.*", PLAIN, "calls", 26, "ours"),
    Goal("Python calls of a step, fused", "host", "Python calls.*", FUSED, "calls", 30, "ours"),
    *(
        Goal(f"a step on the GPU's path, {count} x 64, {kind}", "host", STUB, f"{count} .*{kind}", ALL, limit, why=MANY)
        for kind, limits in {"plain": (0.45, 0.42, 0.40), "fused": (0.28, 0.28, 0.36)}.items()
        for count, limit in zip((1, 10, 100), limits, strict=True)
    ),
    Goal("host time in a training loop on a GPU, plain", "host", LOOP, PLAIN, ALL, 0.65, devices=GPU),
    Goal("host time in a training loop on a GPU, fused", "host", LOOP, FUSED, ALL, 0.5, devices=GPU),
    Goal("`update` in a training loop, plain", "host", LOOP, PLAIN, "update", 1, why=UPDATE),
    Goal("host time in a training loop on the CPU", "host", LOOP, ".*", ALL, 0.75, devices=CPU, why=UPDATE),
    Goal("host time alone on the CPU", "host", "alone", ".*", ALL, 0.6, devices=CPU, why=UPDATE),
    Goal("500 FSDP2 parameters on a GPU: unscale_", "host", FSDP2, "500.*", UNSCALE, 0.22, devices=GPU),
    Goal("500 FSDP2 parameters on a GPU: unscale + clip", "host", FSDP2, "500.*", CLIP, 0.08, devices=GPU),
    Goal("500 FSDP2 parameters, GPU path: unscale_", "host", STUB, "500.*", UNSCALE, 0.2),
    Goal("500 FSDP2 parameters, GPU path: unscale + clip", "host", STUB, "500.*", CLIP, 0.08),
    Goal("unscale + clip, no more than torch's", "clip", ".*", ".*", CLIP, 1, why=NORM),
    Goal("a guard beside a check by hand, 10 gradients", "guard", ".*", "10 .*", NOT_FINITE, 1.5, why=BY_HAND),
    Goal("the same with spikes", "guard", ".*", "10 .*", SPIKES, 2, why=BY_HAND),
    Goal(
        "a guard beside a check by hand, 100 gradients and more",
        "guard",
        ".*",
        MANY_CASES,
        NOT_FINITE,
        1.2,
        why=BY_HAND,
    ),
    Goal("the same with spikes, 100 gradients and more", "guard", ".*", MANY_CASES, SPIKES, 1.3, why=BY_HAND),
    Goal("public ops on 1 to 2000 tensors, GPU", "passes", OPS, ".*", "unscale", 1.2, devices=GPU, why=EACH),
    Goal("public ops on 1 to 2000 tensors, CPU", "passes", OPS, ".*", "unscale", 2, devices=CPU, why=EACH),
    Goal("unscale's share of a copy", "passes", "by lists", "(?!2000).*", "unscale", 0.95, "copy / ours", GPU, True),
    Goal("check's share of the read rate", "passes", "by lists", "(?!2000).*", "check", 0.9, "read / ours", GPU, True),
    Goal("measure's share of a read", "passes", "by lists", "(?!2000).*", "measure", 0.9, "read / ours", GPU, True),
    Goal("launches of a step, 2000 gradients", "launches", "of a step.*", "plain|fused", "launches", 3, "ours"),
    Goal("launches of a step that clips", "launches", "of a step.*", ".*, clip", "launches", 5, "ours"),
    Goal("collectives of a step", "launches", "of DTensors.*", ".*", "collectives", 1, "ours"),
    Goal("bytes that a scaler holds on the device, 2000 gradients", "memory", "held.*", ".*", "bytes", 2**20, "ours"),
    Goal("a training loop's peak of memory", "memory", ".*peak", ".*", "bytes", 1.001),
    Goal("import over torch, ms", "import", ".*", "GradScaler", "import", 50, "ours"),
)
# What a user feels first. No goals: the pages show the best case and the worst, and 1 is as much as torch's takes.
HEADLINES = (
    Goal("a step's scaler in a training loop, plain optimizer", "host", LOOP, PLAIN, ALL, 1),
    Goal("a step's scaler in a training loop, fused optimizer", "host", LOOP, FUSED, ALL, 1),
    Goal("500 parameters under FSDP2, `unscale_`", "host", FSDP2, ".*", UNSCALE, 1),
    Goal("500 parameters under FSDP2, unscale and clip", "host", FSDP2, ".*", CLIP, 1),
    Goal("unscale and clip, fp32", "clip", HOST, ".*fp32", CLIP, 1),
    Goal("unscale and clip, bf16", "clip", HOST, ".*bf16", CLIP, 1),
    Goal("clipping and skipping what is not finite in bf16, `StepGuard`", "guard", ".*", ".*", NOT_FINITE, 1),
    Goal("the same, and spikes", "guard", ".*", ".*", SPIKES, 1),
    Goal("`scaler_triton.ops.unscale_` on a list of tensors", "passes", OPS, ".*", "unscale", 1),
)
# Those of them that the front page shows.
FIRST = {
    "a step's scaler in a training loop, fused optimizer",
    "500 parameters under FSDP2, unscale and clip",
    "clipping and skipping what is not finite in bf16, `StepGuard`",
}


class Answer(NamedTuple):
    """A goal and the rows of the best and the worst case that a machine measured for it; None if none did."""

    goal: Goal
    best: Any = None
    row: Any = None
    machine: Any = None

    @property
    def met(self) -> str:
        """Return "yes", "no" or that it was not measured."""
        return ABSENT if self.row is None else "yes" if self.goal.is_met_by(self.row.p50) else "no"


def answers(entries: Sequence[Entry], goals: Iterable[Goal] = GOALS) -> list[Answer]:
    """Return every goal's answer of every machine that has one; a goal that none has is answered by no row."""
    found: list[Answer] = []
    for goal in goals:
        by_device: dict[str, list[Entry]] = {}
        for entry in filter(goal.is_about, entries):
            by_device.setdefault(entry[1].device, []).append(entry)
        for those in by_device.values():
            first, *_, last = sorted(those * 2, key=lambda entry: entry[0].p50, reverse=goal.at_least)
            found.append(Answer(goal, first[0], *last))
        if not by_device:
            found.append(Answer(goal))
    return found
