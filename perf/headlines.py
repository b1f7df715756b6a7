"""The front page's table of costs: of the budget what a user feels first, as far as it was measured."""

import re
from collections.abc import Sequence

from tabulate import tabulate

from perf.goals import Answer
from perf.table import number

HEAD = ("", "torch", "ours", "ours / torch", "measured on")
PATH = r", (cpu|cuda|stub)$"
# What a goal's question is called for somebody who does not know the budget.
LABELS = {
    "whole step, eager, over none": "a whole training step at its worst",
    "500 FSDP2, unscale_, host": "500 parameters under FSDP2: `unscale_`, host time",
    "500 FSDP2, unscale + clip, host": "500 parameters under FSDP2: unscale and clip, host time",
    "500 plain, unscale_, host": "500 plain parameters: `unscale_`, host time",
    "10 to 2000 plain, a step, host": "a step's scaler at its worst, host time",
    "2000 small, one unscale_, wall": "2000 small gradients: `unscale_`",
    "check before fused, large": "the check before a fused optimizer",
    "unscale + clip, any optimizer": "unscale and clip 1e9 elements",
    "unscale + clip + fused AdamW": "unscale, clip and fused AdamW on 1e9 elements",
    "CPU: adjacent gradients, small": "2000 adjacent small gradients: `unscale_` on the CPU",
    "CPU: unscale + clip, plain": "unscale and clip at its worst, on the CPU",
}


def costs(answers: Sequence[Answer]) -> str:
    """Return the table, by the worst case of each; what was not measured has no line."""
    lines = [_line(answer) for answer in answers if answer.goal.question in LABELS and answer.rows]
    return str(tabulate(lines, HEAD, tablefmt="github", disable_numparse=True))


def _line(answer: Answer) -> list[str]:
    rows = answer.rows
    case = rows["ours"].case
    place = f"{answer.device}, GPU path on a stub driver" if case.endswith("stub") else answer.device
    label = LABELS[answer.goal.question]
    if " at its worst" in label:
        label += f" ({re.sub(PATH, '', case)})"
    return [label, *(number(rows[name]) for name in ("torch", "ours", "ours / torch")), place]
