"""Whole training runs under every wrapper: what README.md's table shows, and what one process does."""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

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
    scaler = cases.torch_scaler(row.kind) if whose == "torch" else cases.new_scaler(row.kind)
    model = models.WRAPPERS[row.wrapper](Net())
    faults = [Fault(2, at, param) for at, param in row.faults]
    try:
        return models.train(rank, model, scaler, optimizer, faults, clip=unscale)
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
CLIP = pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])


def assert_like_one_process(outcomes, limit=FP32_DISTANCE, collectives=1):
    """The ranks agree, took the reference's steps, and ended where it did."""
    assert_agreed([outcome.report for outcome in outcomes], BAD_STEPS, collectives=collectives, steps=STEPS)
    assert_agreed([outcome.reference for outcome in outcomes], BAD_STEPS, collectives=0, steps=STEPS)
    assert max(outcome.distance for outcome in outcomes) <= limit


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
@pytest.mark.parametrize("wrapper", FSDP1_TWO)
def test_fsdp1_on_two_ranks(two, wrapper, name, clip):
    outcomes = two.run(against_one_process, "sharded", wrapper, name, one_rank_at_a_time(2), clip=clip)
    assert_like_one_process(outcomes)


@pytest.mark.parametrize("name", ["sgd-fused", "adamw-fused", "adam"])
@pytest.mark.parametrize("wrapper", FSDP1_FOUR)
def test_fsdp1_on_four_ranks(four, wrapper, name):
    assert_like_one_process(four.run(against_one_process, "sharded", wrapper, name, one_rank_at_a_time(4)))


@CLIP
@NAMES
@KINDS
def test_fsdp2(ranks, kind, name, clip):
    faults = one_rank_at_a_time(ranks.world_size)
    assert_like_one_process(ranks.run(against_one_process, kind, "fsdp2", name, faults, clip=clip))


@NAMES
@KINDS
@pytest.mark.parametrize("wrapper", ["hsdp2", "fsdp2-tp"])
def test_fsdp2_on_two_dimensions(four, kind, wrapper, name):
    assert_like_one_process(four.run(against_one_process, kind, wrapper, name, one_rank_at_a_time(4)))


@pytest.mark.parametrize("wrapper", ["fsdp1-full", "fsdp1-full-flat", "fsdp1-no-shard", "fsdp2"])
@cases.NAMES
def test_fp16_compute(two, wrapper, name):
    outcomes = two.run(against_one_process, "sharded", wrapper, name, one_rank_at_a_time(2), half=True)
    assert_like_one_process(outcomes, limit=FP16_DISTANCE)
    assert max(outcome.distance for outcome in outcomes) > FP32_DISTANCE, "nothing was computed in fp16"


def zero_beside_whole(rank: int, kind: str, *, fused: bool) -> tuple[list[float], list[float], bool]:
    """Train under DDP with our scaler and optimizer states split over the ranks, then with torch's and whole states.

    Returns: the scales of both, and whether they ended with the same parameters, to the bit.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its module scripts other optimizers
        from torch.distributed.optim import ZeroRedundancyOptimizer

    nets = Net(), Net()
    nets[1].load_state_dict(nets[0].state_dict())
    options = {"lr": cases.LEARNING_RATE, "fused": fused}
    zero = ZeroRedundancyOptimizer(nets[0].parameters(), torch.optim.AdamW, **options)
    whole = torch.optim.AdamW(nets[1].parameters(), **options)
    ours = _scales_under_ddp(rank, nets[0], zero, cases.new_scaler(kind))
    theirs = _scales_under_ddp(rank, nets[1], whole, cases.torch_scaler("grad"))
    pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    return ours, theirs, all(torch.equal(one, other) for one, other in pairs)


def _scales_under_ddp(rank: int, net: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> list[float]:
    """Train; the loss of the last rank is infinite at two steps. Returns the scale after every step."""
    model, scales = nn.parallel.DistributedDataParallel(net), []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = models.batch(step, (rank, 2))
        loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss * float("inf") if step in BAD_STEPS and rank else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@KINDS
def test_ddp_with_optimizer_states_split_over_the_ranks(two, kind, fused):
    """`ZeroRedundancyOptimizer`: each rank steps its part of the parameters, and sends it to the others."""
    results = two.run(zero_beside_whole, kind, fused=fused)
    scales, _, _ = results[0]
    assert [later < earlier for earlier, later in pairwise(scales)].count(True) == len(BAD_STEPS)
    assert results == [(scales, scales, True)] * 2


# Difference 10: a plain GradScaler on FSDP1 warns once.


def warned_about(rank: int, kind: str, wrapper: str) -> tuple[list[str], list[Report]]:
    """Use one scaler on two wrapped models; the warnings it gave, and what became of an inf in each."""
    scaler = cases.new_scaler(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reports = []
        for _ in range(2):
            scaler.load_state_dict(cases.new_scaler(kind).state_dict())
            model = models.WRAPPERS[wrapper](Net())
            reports.append(models.train(rank, model, scaler, "adamw", [Fault(2, 1)]))
    texts = [str(warning.message) for warning in caught if warning.category is UserWarning]
    return [text for text in texts if "Scaler" in text], reports


@pytest.mark.parametrize("wrapper", ["fsdp1-full", "fsdp1-full-flat"])
def test_grad_scaler_on_fsdp1_warns_once_and_is_right_with_a_process_group(two, wrapper):
    for (text,), _ in two.run(warned_about, "grad", wrapper):
        assert "ShardedGradScaler" in text
        assert "process_group" in text
    results = two.run(warned_about, "world", wrapper)
    assert [texts for texts, _ in results] == [[], []]
    for reports in zip(*(reports for _, reports in results), strict=True):
        assert_agreed(reports, [2], steps=STEPS)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_grad_scaler_does_not_warn_about_ddp_or_fsdp2(two, wrapper):
    assert [texts for texts, _ in two.run(warned_about, "grad", wrapper)] == [[], []]
