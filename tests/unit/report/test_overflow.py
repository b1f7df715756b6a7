"""The report: names and text, what follows from it, all ranks'."""

import math
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import Place
from report_cases import CPU, PLACES, Run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from scaler_triton import GradScaler
from scaler_triton.core import ranks
from scaler_triton.core.gradients import DTYPES
from scaler_triton.report import overflow as report
from scaler_triton.report.overflow import BadGradient, BadParameter, OverflowReport, Spike

ROOT = Path(__file__).parents[3]


# Names


def test_names_are_a_models_without_what_wrappers_add() -> None:
    run = Run(Place("cpu", "torch"))
    run.step(_0_bias=[math.inf])
    wrap = "_orig_mod.a._fsdp_wrapped_module.b._checkpoint_wrapped_module."
    for model, want in (
        (None, "optimizer 0, parameter 1"),
        (run.model.named_parameters(), "0.bias"),
        (None, "optimizer 0, parameter 1"),  # only modules are remembered
        (run.model, "0.bias"),
        (None, "0.bias"),
        ([(wrap + name, each) for name, each in run.model.named_parameters()], "a.b.0.bias"),
    ):
        assert [each.name for each in run.scaler.overflow_report(model).bad] == [want]


def test_a_given_model_is_not_kept_alive() -> None:
    run = Run(Place("cpu", "torch"))
    run.step(_0_bias=[math.inf])
    run.scaler.overflow_report(run.model)
    gone = weakref.ref(run.model)
    del run.model
    assert gone() is None
    assert [each.name for each in run.scaler.overflow_report().bad] == ["optimizer 0, parameter 1"]


def test_a_model_that_was_given_to_a_clip_names_too() -> None:
    """As FSDP1 asks for it; its plan remembers it."""
    run = Run(Place("cpu", "torch"))
    run.give(_0_bias=[math.inf])
    with mock.patch.object(ranks, "several_ranks", return_value=True):
        run.scaler.clip_grad_norm_(run.optimizer, 1.0, model=run.model)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    assert [each.name for each in run.scaler.overflow_report().bad] == ["0.bias"]


@pytest.mark.parametrize(
    ("model", "got"),
    [
        (3, "int"),
        ("net", "str for a name and a tensor"),
        ([torch.ones(2)], "Tensor for a name and a tensor"),
        (enumerate([torch.ones(2)]), "int for a name"),
    ],
)
def test_what_gives_no_names_is_refused(model: Any, got: str) -> None:
    with pytest.raises(TypeError, match=rf"^model must be a module or what its named_parameters\(\) gives, got {got}$"):
        GradScaler("cpu").overflow_report(model)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("has_private", [True, False])
def test_fsdp2s_modules_may_hold_other_parameters_than_the_optimizer(has_private: bool, monkeypatch: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 4))
    fully_shard(model)
    shards = dict(model.named_parameters())
    model.unshard()
    if not has_private:
        monkeypatch.delattr("torch.distributed._composable_state._get_module_state")
    named = dict(report.named_parameters(model))
    assert {name: each is named[name] for name, each in shards.items()} == dict.fromkeys(shards, has_private)


@pytest.mark.usefixtures("two_ranks")
def test_ddp_over_tensor_parallel_leaves_dtensors_in_modules() -> None:
    model, shard = nn.Sequential(nn.Linear(2, 4, bias=False)), nn.Parameter(torch.ones(2, 2))
    held = DTensor.from_local(shard.detach(), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
    shard._st_info = held  # type: ignore[attr-defined]
    del model[0].weight
    vars(model[0])["weight"] = held
    model._module_parameters = [shard]  # type: ignore[assignment]
    assert [(name, each is shard) for name, each in report.named_parameters(model)] == [("0.weight", True)]


# Text

BAD, OTHER = BadGradient("up\x1b[2J\nweight", "NaN", 3, rank=1), BadGradient("b", "Inf", 12, rank=0)
SPIKES = (Spike(41.21, 7.9),)
TABLE = """
rank  parameter      holds  numel
----  -------------  -----  -----
   1  up?[2J weight  NaN        3"""
LONGER = f"{TABLE}".replace("-----\n", "-----\n   0  b              Inf       12\n")
AND_SPIKE = f"{TABLE}\nAnother optimizer: spike: norm 41.2, limit 7.9."
READS = [
    (OverflowReport(None, (), True), "No step was skipped."),
    (OverflowReport(None, (), True, ("rank 0 raised",)), "No step was skipped.\nNot covered: rank 0 raised."),
    (OverflowReport(2, (), True), "The last skip, at update 2: nothing known on any rank."),
    (OverflowReport(None, (), False, pending=True), "The last skip: nothing known on this rank; ask with gather=True."),
    (OverflowReport(3, (), True, spikes=SPIKES), "The last skip, at update 3: spike: norm 41.2, limit 7.9."),
    (
        OverflowReport(3, (BAD,), True, spikes=SPIKES),
        f"The last skip, at update 3: 1 bad gradient on rank 1.{AND_SPIKE}",
    ),
    (OverflowReport(39, (BAD, OTHER), True), f"The last skip, at update 39: 2 bad gradients on ranks 0-1.{LONGER}"),
]


ALIKE = tuple(BadGradient(f"{i}.w", "NaN", 4, rank) for rank in (0, 1, 3) for i in range(9))
LONG = (*ALIKE, BadGradient("9.w", "Inf", 4, 1), *(BadGradient(f"{i}.b", "NaN and Inf", 1, 0) for i in range(12)))
GROUPED = """
The last skip, at update 3: 40 bad gradients on ranks 0-1, 3.
  rank  parameter  holds        numel
------  ---------  -----------  -----
     1  9.w        Inf              4"""
GROUPED += "".join(f"\n     0  {i}.b{'':7}{' ' * (i < 10)}NaN and Inf      1" for i in range(12))
GROUPED += "".join(f"\n0-1, 3  {i}.w        NaN              4" for i in range(7))
READS += [(OverflowReport(3, LONG, True), f"{GROUPED[1:]}\n... and 6 more: 6 NaN.")]


@pytest.mark.parametrize(("given", "text"), READS)
def test_as_a_person_reads_it(given: OverflowReport, text: str) -> None:
    assert str(given) == text


def test_the_pages_show_a_report_as_it_is() -> None:
    bad = BadGradient("positions", "Inf", 2048, rank=1)
    shown = OverflowReport(39, (bad,), gathered=True, checked=29, ranks=2)
    for page in ("README.md", "docs/why-skipped.md", "docs/after-a-skip.md"):
        assert f"\n{shown}\n```" in (ROOT / page).read_text()


# What follows from a report

START = "so was the loss, or the first gradient that backward made from it."
WHERE = "no single layer is at fault, backward overflowed where it began or everywhere."
SUMS = "if these are sums over ranks, it may have been the batch of any."


def found(*names: str, kinds: str = "Inf", ranks: Any = (0,), is_shared: bool = False) -> tuple[BadGradient, ...]:
    return tuple(BadGradient(name, kinds, 1, rank, is_shared) for rank in ranks for name in names)


CONCLUSIONS = [
    # all of them
    (found("a", "b", kinds="NaN"), {"checked": 2}, f"All 2 gradients are NaN: {START} Look at the batch."),
    (found("a", "b"), {"checked": 2}, f"All 2 gradients are Inf: {WHERE}"),
    (found("a", kinds="NaN") + found("b"), {"checked": 2}, f"All 2 gradients are Inf or NaN: {WHERE}"),
    (
        found("a", "b", kinds="NaN"),
        {"checked": 2, "not_covered": ("a thing",)},
        f"All 2 gradients that are covered are NaN: {START} Look at the batch.",
    ),
    (found("a", "b", kinds="NaN"), {"checked": 2, "gathered": False}, f"All 2 gradients of rank 0 are NaN: {START}"),
    (
        found("a", "b", kinds="NaN", ranks=(0, 1)),
        {"checked": 4, "ranks": 2},
        f"All 4 gradients of ranks 0-1 are NaN: {START} On all ranks: {SUMS}",
    ),
    (
        found("a", "b", kinds="NaN", ranks=(1,)),
        {"checked": 2, "ranks": 2},
        f"All 2 gradients of rank 1 are NaN: {START} Only rank 1: look at its batch, or what only it holds.",
    ),
    # a part of the model
    (found("layers.7.mlp.up", "layers.7.mlp.down"), {"checked": 9}, "Only layers.7.mlp: overflow there."),
    (found("layers.7.mlp.up", kinds="NaN"), {"checked": 9}, "Only layers.7.mlp.up: NaN there."),
    (found("layers.7.up", kinds="NaN") + found("layers.7.b"), {"checked": 9}, "Only layers.7: overflow there."),
    (
        found("layers.0.w", "layers.1.w", "layers.2.w", "layers.5.w"),
        {"checked": 9},
        "Only layers.0-2, 5: overflow there.",
    ),
    (found("0.w", "0.b"), {"checked": 9}, "Only module 0: overflow there."),
    (found("0.w", "1.w"), {"checked": 9}, "Only modules 0-1: overflow there."),
    (found("head.w", "embed.w"), {"checked": 9}, "Only embed, head: overflow there."),
    (found("a.w", "b.w", "c.w", "d.w"), {"checked": 9}, ""),
    (found("a.w"), {"checked": 1}, "Only a.w: overflow there."),
    (found("a\nb"), {"checked": 9}, "Only a b: overflow there."),
    (found("a.w"), {"checked": 9, "gathered": False}, "On this rank only a.w: overflow there."),
    (
        found("a.w", ranks=(1,)),
        {"checked": 9, "ranks": 3, "not_covered": ("a thing",)},
        "Only a.w, of those that are covered: overflow there.",  # the others may be bad on another rank
    ),
    (
        found("optimizer 0, parameter 1", "b"),
        {"checked": 9},
        "2 of 9 gradients: overflow_report(model) names them.",
    ),
    # a part of the ranks
    (
        found("a.w", ranks=(1, 2)),
        {"checked": 9, "ranks": 4},
        "Only a.w: overflow there. Only ranks 1-2: look at their batches, or what only they hold.",
    ),
    (
        found("a.w", ranks=(3,), is_shared=True),
        {"checked": 9, "ranks": 4},
        "Only a.w: overflow there. Only on rank 3, but these are sums over ranks: it may have been the batch of any.",
    ),
    (found("a.w"), {}, ""),  # how many were checked is unknown
]


@pytest.mark.parametrize(("bad", "known", "text"), CONCLUSIONS)
def test_a_report_concludes_no_more_than_it_knows(bad: Any, known: Any, text: str) -> None:
    given = OverflowReport(3, bad, **{"gathered": True, **known})
    assert given.conclusion == text
    assert str(given).splitlines()[1] == (text or "rank  parameter  holds  numel")


NAN_WEIGHT, INF_WEIGHT = BadParameter("a", "NaN", 0), BadParameter("b", "Inf", 1)


@pytest.mark.parametrize(
    ("spoiled", "text"),
    [
        ((NAN_WEIGHT,), "a itself holds NaN: go back to a checkpoint."),
        ((NAN_WEIGHT, BadParameter("a", "NaN", 1)), "a itself holds NaN: go back to a checkpoint."),
        ((INF_WEIGHT, NAN_WEIGHT), "b and 1 more themselves hold NaN or Inf: go back to a checkpoint."),
    ],
)
@pytest.mark.parametrize("bad", [(), found("a", "b", kinds="NaN")])
def test_a_weight_that_is_not_finite_explains_all(spoiled: Any, bad: Any, text: str) -> None:
    assert str(OverflowReport(3, bad, True, checked=2, bad_parameters=spoiled)).splitlines()[1] == text


@PLACES
def test_what_a_report_concludes_from(place: Place) -> None:
    run = Run(place)
    run.step(_1_bias=[math.inf])
    assert run.scaler.overflow_report().conclusion == "1 of 4 gradients: overflow_report(model) names them."
    last = run.scaler.overflow_report(run.model)
    assert (last.checked, last.ranks, last.bad_parameters) == (4, 1, ())
    assert run.scaler.overflow_report().conclusion == "Only 1.bias: overflow there."
    run.step(**{f"_{name}": [math.nan] for name in ("0_weight", "0_bias", "1_weight", "1_bias")})
    assert run.scaler.overflow_report().conclusion == f"All 4 gradients are NaN: {START} Look at the batch."
    frozen = nn.Parameter(torch.full((3,), math.nan, device=place.device))  # no optimizer's
    run.model.frozen = frozen
    with torch.no_grad():
        run.model[1].weight[1, 2] = math.inf
    assert run.scaler.overflow_report().bad_parameters == (BadParameter("1.weight", "Inf", 0),)
    with torch.no_grad():
        run.model[1].weight[0, 2] = math.nan
    assert run.scaler.overflow_report().conclusion == "1.weight itself holds NaN: go back to a checkpoint."


def test_before_a_skip_no_weight_is_looked_at() -> None:
    run = Run(Place("cpu", "torch"))
    with torch.no_grad():
        run.model[0].weight.fill_(math.nan)
    run.step()
    assert str(run.scaler.overflow_report(run.model)) == "No step was skipped."
    assert run.scaler.overflow_report().bad_parameters == ()


def test_a_weights_largest_number_needs_no_wider_dtype() -> None:
    """The largest of each dtype, and tensors that a norm refuses."""
    held = [torch.full((2,), torch.finfo(dtype).max, dtype=dtype) for dtype in DTYPES]
    held += [torch.ones(0), torch.ones(3, device="meta"), torch.ones(2, dtype=torch.int8)]
    held += [torch.tensor([1.0, each], dtype=torch.float64) for each in (-math.inf, math.nan)]
    assert report._not_finite(dict(enumerate(held))) == {7: "Inf", 8: "NaN"}


def test_a_parameter_that_is_gone_tells_nothing_of_whose_batch_it_was() -> None:
    run = Run(Place("cpu", "torch"))
    run.step(_0_bias=[math.inf])
    run.optimizer.param_groups[0]["params"][1] = nn.Parameter(torch.ones(7))
    (bad,) = run.scaler.overflow_report().bad
    assert (bad.name, bad.numel, bad.is_shared) == ("optimizer 0, parameter 1", 0, True)


# All ranks


@pytest.fixture
def peer(two_ranks: None, monkeypatch: Any) -> list[Any]:
    """What this rank sends to rank 1, which reports."""
    theirs = {
        "bad": [{"name": "b", "kinds": "Inf", "numel": 2, "rank": 1, "is_shared": True}],
        "bad_parameters": [{"name": "b", "kind": "NaN", "rank": 1}],
        "not_covered": ["a thing"],
        "checked": 3,
    }
    sent: list[Any] = []

    def gather_bytes(call: str, data: bytes, group: Any, home: torch.device) -> list[bytes]:
        assert call == "overflow_report(gather=True)"
        sent.append((report.json.loads(data), group, home))
        return [data, report.json.dumps(theirs).encode()]

    monkeypatch.setattr(ranks, "gather_bytes", gather_bytes)
    return sent


def test_a_gathered_report_is_of_all_ranks(peer: list[Any]) -> None:
    run = Run(Place("cpu", "torch"))
    run.step(_0_bias=[math.inf])
    assert run.found() == [("0.bias", "Inf")]
    assert "on rank 0, the only one asked." in str(run.scaler.overflow_report())
    last = run.scaler.overflow_report(run.model, gather=True)
    assert [(each.name, each.rank) for each in last.bad] == [("0.bias", 0), ("b", 1)]
    assert (last.gathered, last.not_covered) == (True, ("a thing",))
    assert (last.checked, last.ranks, last.bad_parameters) == (7, 2, (BadParameter("b", "NaN", 1),))
    assert [each.is_shared for each in last.bad] == [False, True]
    assert [each[1:] for each in peer] == [(dist.group.WORLD, CPU)]


def test_a_rank_that_raises_joins_the_others_first(peer: list[Any]) -> None:
    with pytest.raises(TypeError, match="^model must be"):
        GradScaler("cpu").overflow_report(3, gather=True)  # type: ignore[arg-type]
    ((mine, _, _),) = peer
    assert mine == {"bad": [], "bad_parameters": [], "not_covered": [mock.ANY], "checked": 0, "causes": []}
    assert mine["not_covered"][0].startswith("rank 0 raised TypeError: model must be a module")


def test_a_rank_that_raises_alone_raises_its_own_error(two_ranks: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(ranks, "gather_bytes", mock.Mock(side_effect=TimeoutError))
    with pytest.raises(TypeError, match="^model must be"):
        GradScaler("cpu").overflow_report(3, gather=True)  # type: ignore[arg-type]


def test_one_rank_alone_gathers_nothing() -> None:
    last = GradScaler("cpu").overflow_report(gather=True)
    assert (last.gathered, last.bad) == (True, ())


@pytest.mark.parametrize(
    ("enabled", "used", "where"), [(True, False, "meta"), (True, True, "meta"), (False, False, "cpu")]
)
def test_a_bare_group_gathers_where_it_reduces(enabled: bool, used: bool, where: str, monkeypatch: Any) -> None:
    """torchft's NCCL groups take no host tensors."""
    gathered = mock.Mock(side_effect=ConnectionError)
    monkeypatch.setattr(dist, "all_gather", gathered)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    group: Any = SimpleNamespace(allreduce=None, rank=lambda: 0)
    scaler = GradScaler("cpu", enabled=enabled, process_group=group)
    scaler._device = "meta"  # stands for a GPU
    if used:
        scaler._scale = torch.ones((), device="meta")
    with pytest.raises(ConnectionError):
        scaler.overflow_report(gather=True)
    parts, mine = gathered.call_args.args
    assert {each.device.type for each in (*parts, mine)} == {where}
