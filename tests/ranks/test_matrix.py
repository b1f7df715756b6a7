"""Whole training runs under every wrapper: what README.md's table shows, and what one process does."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ranks import cases, models
from ranks.cases import KINDS, Fault, Report, assert_agreed
from ranks.models import STEPS, Net, against_one_process

pytestmark = pytest.mark.distributed

README = Path(__file__).parents[2] / "README.md"


# README.md's yes/no table: do all ranks agree on a step that overflows, with torch's class and with ours?


class Row(NamedTuple):
    """One way to spread a model, the class its users take, and where an overflow shows up by itself."""

    name: str
    wrapper: str
    kind: str
    faults: tuple[tuple[int, int], ...]  # (rank, parameter): DDP's gradients are equal, HSDP's on both replicas


ROWS = [
    Row("DDP", "ddp", "grad", ((0, 0), (1, 0), (2, 0), (3, 0))),
    Row("FSDP1", "fsdp1-full", "sharded", ((1, 0),)),
    Row("FSDP2", "fsdp2", "grad", ((1, 0),)),
    Row("HSDP (FSDP2)", "hsdp2", "grad", ((1, 0), (3, 0))),
    Row("TP + FSDP2", "fsdp2-tp", "grad", ((1, 2),)),
]
CLASS_NAMES = {"grad": "GradScaler", "sharded": "ShardedGradScaler"}
# TP's local clip would mix meshes, which torch refuses: there `unscale_` is called without it.
UNSCALE = {"fsdp2-tp": [False]}


def row_run(rank: int, row: Row, whose: str, optimizer: str, unscale: bool) -> Report | str:
    """Train a few steps, one of them overflowing; what is left, or the error if the scaler raised."""
    scaler = cases.new_scaler(row.kind, classes)
    model = models.WRAPPERS[row.wrapper](Net())
    faults = [Fault(2, at, param) for at, param in row.faults]
    try:
        return models.train(rank, model, scaler, optimizer, faults, clip="torch" if unscale else "")[0]
    except RuntimeError as error:
        return str(error)


def agreed(reports: list[Report | str]) -> bool:
    """Whether nobody raised, and all ranks hold the same scale, took the same steps and have finite parameters."""
    if not all(isinstance(report, Report) for report in reports):
        return False
    traces = {(tuple(report.scales), tuple(report.stepped)) for report in reports}
    return len(traces) == 1 and all(report.finite for report in reports)


def cell(four: Any, row: Row, whose: str, optimizer: str) -> str:
    """ "yes" if the ranks agree with and without `unscale_`."""
    ways = UNSCALE.get(row.wrapper, [False, True])
    return "yes" if all(agreed(four.run(row_run, row, whose, optimizer, way)) for way in ways) else "**no**"


def test_readme_matrix(four):
    lines = ["| | torch, plain | torch, fused | ours, plain | ours, fused |", "| --- | --- | --- | --- | --- |"]
    for row in ROWS:
        cells = [cell(four, row, whose, name) for whose in ("torch", "ours") for name in ("adamw", "adamw-fused")]
        assert cells[2:] == ["yes", "yes"], row.name
        lines.append(f"| {row.name}, `{CLASS_NAMES[row.kind]}` | {' | '.join(cells)} |")
    text = README.read_text()
    begin, end = "<!-- matrix -->\n", "\n<!-- /matrix -->"
    shown = text[text.index(begin) + len(begin) : text.index(end)]
    assert shown == "\n".join(lines), "README.md's table is not what was measured:\n" + "\n".join(lines)


# Beside one process that skips the same steps.

# Gradients are averaged over ranks in another order than over one batch: an ulp of fp32 each, which Adam's
# division by sqrt(v) carries into 8 updates of 2^-4.
FP32_DISTANCE = 2e-5
# fp16 weights and activations in forward and backward against fp32 ones: 2^-11 relative, the same amplification.
FP16_DISTANCE = 2e-2

BAD_STEPS = [2, 5]
FSDP1_TWO, FSDP1_FOUR = (
    [f"fsdp1-{how}{flat}" for how in hows for flat in ("", "-flat")]
    for hows in (["full", "grad-op", "no-shard"], ["full", "hybrid"])
)
NAMES = pytest.mark.parametrize("name", ["sgd", "adamw", "adamw-fused"])
CLIP = pytest.mark.parametrize("clip", ["", "torch", "ours"])
CLIP_BY_OURS = pytest.mark.parametrize("clip", ["", "ours"])  # torch's would mix meshes


def assert_like_one_process(outcomes, limit=FP32_DISTANCE, collectives=1):
    """The ranks agree, took the reference's steps, clipped by its norms, and ended where it did."""
    assert_agreed([outcome.report for outcome in outcomes], BAD_STEPS, collectives=collectives, steps=STEPS)
    assert_agreed([outcome.reference for outcome in outcomes], BAD_STEPS, collectives=0, steps=STEPS)
    for outcome in outcomes:
        assert outcome.distance <= limit
        good = [step for step in range(STEPS) if outcome.norms and step not in BAD_STEPS]
        norms, expected = ([of[step] for step in good] for of in (outcome.norms, outcome.expected_norms))
        assert norms == pytest.approx(expected, rel=limit)


def one_rank_at_a_time(world_size):
    """An inf on rank 1 alone, later on the last rank alone."""
    return [Fault(BAD_STEPS[0], 1), Fault(BAD_STEPS[1], world_size - 1)]


@CLIP
@NAMES
@KINDS
def test_ddp(two, kind, name, clip):
    everywhere = [Fault(step, rank) for step in BAD_STEPS for rank in range(2)]  # as reduced gradients have it
    faults = everywhere if kind == "grad" else one_rank_at_a_time(2)
    outcomes = two.run(against_one_process, kind, "ddp", name, faults, clip=clip)
    assert_like_one_process(outcomes, collectives=0 if kind == "grad" else 1)


@CLIP
@NAMES
@pytest.mark.parametrize(
    ("kind", "wrapper"), [*(("sharded", each) for each in FSDP1_TWO), ("world", FSDP1_TWO[0]), ("world", FSDP1_TWO[1])]
)
def test_fsdp1_on_two_ranks(two, kind, wrapper, name, clip):
    assert_like_one_process(two.run(against_one_process, kind, wrapper, name, one_rank_at_a_time(2), clip=clip))


@CLIP_BY_OURS
@pytest.mark.parametrize("name", ["sgd-fused", "adamw-fused", "adam"])
@pytest.mark.parametrize("wrapper", FSDP1_FOUR)
def test_fsdp1_on_four_ranks(four, wrapper, name, clip):
    faults = one_rank_at_a_time(4)
    assert_like_one_process(four.run(against_one_process, "sharded", wrapper, name, faults, clip=clip))


@CLIP
@NAMES
@KINDS
def test_fsdp2(ranks, kind, name, clip):
    faults = one_rank_at_a_time(ranks.world_size)
    assert_like_one_process(ranks.run(against_one_process, kind, "fsdp2", name, faults, clip=clip))


@CLIP_BY_OURS
@NAMES
@KINDS
@pytest.mark.parametrize("wrapper", ["hsdp2", "fsdp2-tp"])
def test_fsdp2_on_two_dimensions(four, kind, wrapper, name, clip):
    assert_like_one_process(four.run(against_one_process, kind, wrapper, name, one_rank_at_a_time(4), clip=clip))


@pytest.mark.parametrize("wrapper", ["fsdp1-full", "fsdp1-full-flat", "fsdp1-no-shard", "fsdp2"])
@cases.NAMES
def test_fp16_compute(two, wrapper, name):
    outcomes = two.run(against_one_process, "sharded", wrapper, name, one_rank_at_a_time(2), half=True)
    assert_like_one_process(outcomes, limit=FP16_DISTANCE)
    assert max(outcome.distance for outcome in outcomes) > FP32_DISTANCE, "nothing was computed in fp16"
