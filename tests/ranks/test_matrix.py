"""Whole training runs under every wrapper: what docs/agreement.md's table shows, and what one process does."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from ranks import cases, models
from ranks.cases import Fault, Report, assert_agreed
from ranks.models import STEPS, Net, against_one_process

pytestmark = pytest.mark.distributed

PAGE = Path(__file__).parents[2] / "docs/agreement.md"


# The page's yes/no table: do all ranks agree on a step that overflows, with torch's class and with ours?


# How the page names it: the wrapper, the class its users take, and where an overflow shows up by itself.
ROWS: dict[str, tuple[str, str, list[Fault]]] = {
    "DDP, `GradScaler`": ("ddp", "grad", [Fault(2, rank) for rank in range(4)]),  # gradients are equal
    "FSDP1, `ShardedGradScaler`": ("fsdp1-full", "sharded", [Fault(2, 1)]),
    "FSDP2, `GradScaler`": ("fsdp2", "grad", [Fault(2, 1)]),
    "HSDP (FSDP2), `GradScaler`": ("hsdp2", "grad", [Fault(2, 1), Fault(2, 3)]),  # on both replicas
    "TP + FSDP2, `GradScaler`": ("fsdp2-tp", "grad", [Fault(2, 1, 2)]),
}


def row_run(
    rank: int, wrapper: str, kind: str, faults: list[Fault], classes: dict[str, Any], optimizer: str, clip: str
) -> Report | str:
    """Train a few steps, one of them overflowing; what is left, or the error if the scaler raised."""
    model, scaler = models.WRAPPERS[wrapper](Net()), cases.new_scaler(kind, classes)
    try:
        return models.train(rank, model, scaler, optimizer, faults, clip=clip)[0]
    except RuntimeError as error:
        return str(error)


def agreed(reports: list[Report | str]) -> bool:
    """Whether nobody raised, and all ranks hold the same scale, took the same steps and have finite parameters."""
    if not all(isinstance(report, Report) for report in reports):
        return False
    traces = {(tuple(report.scales), tuple(report.stepped)) for report in reports}
    return len(traces) == 1 and all(report.finite for report in reports)


def test_readme_matrix(four):
    lines = ["| | torch, plain | torch, fused | ours, plain | ours, fused |", "| --- | --- | --- | --- | --- |"]
    for name, row in ROWS.items():
        # With unscale_ and without; TP's local clip would mix meshes, which torch refuses.
        clips = [""] if row[0] == "fsdp2-tp" else ["", "torch"]
        cells = []
        for classes, optimizer in itertools.product((cases.TORCHS, cases.OURS), ("adamw", "adamw-fused")):
            is_right = all(agreed(four.run(row_run, *row, classes, optimizer, clip)) for clip in clips)
            cells.append("yes" if is_right else "**no**")
        assert cells[2:] == ["yes", "yes"], name
        lines.append(f"| {name} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    assert f"<!-- matrix -->\n{table}\n<!-- /matrix -->" in PAGE.read_text(), f"measured was:\n{table}"


# Beside one process that skips the same steps.

# Gradients are averaged over ranks in another order than over one batch: an ulp of fp32 each, which Adam's
# division by sqrt(v) carries into 8 updates of 2^-4.
FP32_DISTANCE = 2e-5

BAD_STEPS = [2, 5]
FSDP1 = [f"fsdp1-{how}{flat}" for how in ("full", "grad-op", "no-shard") for flat in ("", "-flat")]
FSDP1_ON_FOUR = ["fsdp1-full", "fsdp1-full-flat", "fsdp1-hybrid", "fsdp1-hybrid-flat"]
NAMES = ["sgd", "adamw", "adamw-fused"]
BOTH = ["grad", "sharded"]
BY_ANY, BY_OURS = ["", "torch", "ours"], ["", "ours"]  # in two dimensions torch's clip would mix meshes
RUNS = [  # how many ranks, wrappers, scalers, optimizers, and how they clip
    ("two", ["ddp"], BOTH, NAMES, BY_ANY),
    ("two", FSDP1, ["sharded"], NAMES, BY_ANY),
    ("two", ["fsdp1-full", "fsdp1-full-flat"], ["world"], NAMES, BY_ANY),
    ("four", FSDP1_ON_FOUR, ["sharded"], ["sgd-fused", "adamw-fused", "adam"], BY_OURS),
    ("two", ["fsdp2"], BOTH, NAMES, BY_ANY),
    ("four", ["fsdp2"], BOTH, NAMES, BY_ANY),
    ("four", ["hsdp2", "fsdp2-tp"], BOTH, NAMES, BY_OURS),
]


@pytest.mark.parametrize(
    ("world", "wrapper", "kind", "name", "clip"),
    [(world, *each) for world, *lists in RUNS for each in itertools.product(*lists)],
)
def test_like_one_process(request, world, wrapper, kind, name, clip):
    """The ranks agree, clipped by the norms of the one process, and end where it does."""
    ranks = request.getfixturevalue(world)
    equal = (wrapper, kind) == ("ddp", "grad")  # reduced gradients overflow everywhere
    bad_ranks = [(0, 1), (0, 1)] if equal else [(1,), (ranks.world_size - 1,)]
    faults = [Fault(step, rank) for step, bad in zip(BAD_STEPS, bad_ranks, strict=True) for rank in bad]
    outcomes = ranks.run(against_one_process, kind, wrapper, name, faults, clip)
    assert_agreed([outcome.report for outcome in outcomes], BAD_STEPS, collectives=0 if equal else 1, steps=STEPS)
    for outcome in outcomes:
        assert outcome.distance <= FP32_DISTANCE
        good = [step for step in range(STEPS) if outcome.norms and step not in BAD_STEPS]
        norms, expected = ([of[step] for step in good] for of in (outcome.norms, outcome.expected_norms))
        assert norms == pytest.approx(expected, rel=FP32_DISTANCE)
