"""Which gradients made the last step be skipped: the marks of every path, their generations, names and text."""

import math
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import Place, parameters, places, sgd, started
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from scaler_triton import GradScaler, StepGuard
from scaler_triton.core import ranks
from scaler_triton.core.dispatch import kernels
from scaler_triton.core.plan import GradPlan
from scaler_triton.core.step import parameters_of
from scaler_triton.core.update import Counters
from scaler_triton.kernels.abi import COUNTERS, INF, NAN, SKIPPED
from scaler_triton.report import overflow as report
from scaler_triton.report.overflow import BadGradient, BadParameter, Marks, OverflowReport, Spike

ROOT = Path(__file__).parents[3]
# torch's op on a GPU leaves no marks.
PLACES = pytest.mark.parametrize("place", [each for each in places() if each != Place("cuda", "torch")], ids=str)
CPU = torch.device("cpu")


class Run:
    """A scaler and a model of two layers, whose gradients are ones but for what is said."""

    def __init__(self, place: Place, fused: bool = False) -> None:
        self.place = place
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(place.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, fused=fused)
        self.scaler = started(GradScaler, place.device, init_scale=8.0, backend=place.backend)

    def give(self, **bad: list[float]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = torch.ones_like(parameter)
            for index, value in enumerate(bad.get("_" + name.replace(".", "_"), [])):
                parameter.grad.view(-1)[index] = value

    def step(self, how: str = "step", **bad: list[float]) -> None:
        self.give(**bad)
        if how == "clip":
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def found(self) -> list[tuple[str, str]]:
        return [(each.name, each.kinds) for each in self.scaler.overflow_report(self.model).bad]

    def marks(self) -> Any:
        return self.scaler._ours.steps.last(self.optimizer).plan.marks


@PLACES
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("joint", [0, 1, 2])
@pytest.mark.parametrize("guards", [False, True])
def test_updates_between_check_and_step_lose_no_cause(place: Place, count: int, joint: int, guards: bool) -> None:
    """All of one batch; what is clipped together skips by the first one's overflow, or by the spike of all.

    With `joint` 2 the last one is then clipped again, alone.
    """
    options: dict[str, Any] = {"spike_sigma": 3.0, "window": 2} if guards else {"init_scale": 4.0}
    scaler: Any = (StepGuard if guards else GradScaler)(place.device, backend=place.backend, **options)
    scaler.scale(torch.ones((), device=place.device))
    held = [sgd([torch.ones(1)], place.device) for _ in range(count)]
    for size in (1.0, 2.0, 1.5, 1e6 if guards else math.inf, 1.0):
        for number, optimizer in enumerate(held):
            optimizer.param_groups[0]["params"][0].grad.fill_(1.0 if joint and not guards and number else size)
        scaler.clip_grad_norm_(held, 1.0) if joint else [scaler.clip_grad_norm_(each, 1.0) for each in held]
        if joint == 2:
            scaler.clip_grad_norm_(held[-1], 1.0, parameters=parameters_of(held[-1]))
        for optimizer in held:
            scaler.step(optimizer)
            scaler.update()
    last = scaler.overflow_report()
    assert (scaler.stats().skipped, last.update) == (count, 4 * count)  # good steps since do not change it
    found = last.spikes if guards else [each.name for each in last.bad]
    assert len(found) == 1
    assert guards or found == [f"optimizer {0 if joint else count - 1}, parameter 0"]


# Marks


@PLACES
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("how", ["step", "clip"])
def test_the_last_skip_is_reported_and_survives_good_steps(place: Place, fused: bool, how: str) -> None:
    run = Run(place, fused)
    for _ in range(2):
        run.step(how)
        assert str(run.scaler.overflow_report(run.model)) == "No step was skipped."
    assert not any(table.bits.any() for layout in run.marks().plan.layouts for table in layout.tables.values())
    run.step(how, _0_bias=[math.inf])
    assert run.found() == [("0.bias", "Inf")]
    run.scaler._ours.counters.values = run.scaler._ours.counters.values * 1  # as where the scale has moved
    for _ in range(3):
        run.step(how)
    bad = {"_1_weight": [math.nan, -math.inf], "_1_bias": [math.nan]}
    run.step(how, **bad)
    for _ in range(3):
        assert run.found() == [("1.weight", "NaN and Inf"), ("1.bias", "NaN")]
        run.step(how)
    last = run.scaler.overflow_report(run.model)
    assert str(last).startswith("The last skip, at update 7: 2 bad gradients on rank 0.\n")
    assert [each.numel for each in last.bad] == [21, 3]
    run.step(how, _0_weight=[math.nan])
    assert run.found() == [("0.weight", "NaN")]


@PLACES
@pytest.mark.parametrize("how", ["step", "clip"])
def test_what_only_unscaling_makes_infinite_is_not_reported(place: Place, how: str) -> None:
    run = Run(place)
    run.scaler._scale.fill_(2.0**-100)
    run.step(how, _0_bias=[math.inf], _1_bias=[1e30])
    assert run.found() == [("0.bias", "Inf")]


@PLACES
@pytest.mark.parametrize("change", ["form", "parameters", "checkpoint"])
def test_after_a_change_nothing_is_known_of_earlier_steps(place: Place, change: str) -> None:
    run = Run(place)
    saved = run.scaler.state_dict()
    run.step(_0_bias=[math.inf])
    run.give()
    if change == "form":
        weight = run.model[0].weight
        weight.grad = torch.ones(weight.shape[::-1], device=place.device).t()
    elif change == "parameters":
        run.optimizer.add_param_group({"params": parameters([torch.ones(1)], place.device)})
    else:
        run.scaler.load_state_dict(saved)
        assert run.found() == []
    run.scaler.step(run.optimizer)
    run.scaler.update()
    if place.backend == "triton" or change != "form":
        assert run.found() == []
    run.step(_1_bias=[math.nan])
    assert run.found() == [("1.bias", "NaN")]


@PLACES
def test_sparse_gradients_are_marked_or_said_not_to_be(place: Place) -> None:
    run, table = Run(place), nn.Parameter(torch.zeros(4, 2, device=place.device))
    optimizer = torch.optim.SGD([table], lr=0.1)
    for value in (1.0, math.inf):
        values, index = torch.full((1, 2), value, device=place.device), torch.tensor([[1]], device=place.device)
        table.grad = torch.sparse_coo_tensor(index, values, table.shape, check_invariants=True)
        run.scaler.step(optimizer)
        if value == 1.0:
            assert str(run.scaler.overflow_report()) == "No step was skipped."
            run.scaler.update()
    last = run.scaler.overflow_report([("table", table)])
    if place.backend == "torch":
        assert [(each.name, each.kinds) for each in last.bad] == [("table", "Inf")]
    else:
        assert last.not_covered == (f"sparse and Partial gradients on {table.device}",)


@PLACES
def test_a_carried_step_is_named_for_the_skip_that_it_caused_and_no_later_one(place: Place) -> None:
    scaler = started(GradScaler, place.device, backend=place.backend)
    carried, other = (sgd([torch.tensor([math.inf])], place.device) for _ in range(2))
    scaler.unscale_(carried)
    scaler.update()
    scaler._check_inf_per_device(carried)
    scaler.step(carried)
    scaler.update()
    assert [each.name for each in scaler.overflow_report().bad] == ["optimizer 0, parameter 0"]
    scaler.step(other)
    assert [each.name for each in scaler.overflow_report().bad] == ["optimizer 1, parameter 0"]
    scaler._ours.steps.open(carried).plan.marks.forget()
    assert scaler._ours.steps.open(carried).plan.marks.cause(-1) is None  # with no skip counted


def test_a_carried_step_that_another_ranks_gradient_skips_is_no_fault_of_another_optimizer() -> None:
    scaler = started(GradScaler, "cpu")
    carried, *others = (sgd([torch.tensor([number])]) for number in (1.0, 1.0, math.inf))
    scaler.clip_grad_norm_([carried, others[0]], 1.0)
    scaler._found_inf_per_device(carried)[CPU].fill_(1.0)
    for optimizer in (others[1], carried):
        scaler.step(optimizer)
        scaler.update()
    assert (scaler.stats().skipped, scaler.overflow_report().bad) == (2, ())


def test_the_host_keeps_a_few_generations() -> None:
    run = Run(Place("cpu", "torch"))
    for _ in range(9):
        run.step(_0_bias=[math.inf])
    assert [generation for generation in range(9) if run.marks().of([generation])] == [5, 6, 7, 8]


def marked(device: torch.device) -> tuple[Marks, Any, GradPlan]:
    """Return marks, a layout of gradients on `device`, and the plan that holds it, which the caller keeps alive."""
    plan = GradPlan(parameters([torch.ones(3), torch.ones(3)], "cpu"), "torch")
    (layout,) = plan.layouts
    layout.device = device
    return Marks(plan, Counters()), layout, plan


def test_a_kernel_reads_the_generation_on_the_scales_device_only() -> None:
    """One that reads another GPU's memory ends the process."""
    marks, layout, _plan = marked(CPU)
    layout.tables = {name: kernels().table.GradTable([3], torch.float32, CPU) for name in ("check", "norm")}
    for _ in range(2):
        marks.follow(layout, CPU)
        counters = marks.counters.on(CPU)
        for each in (layout, *layout.tables.values()):
            assert each.generation.data_ptr() == counters[SKIPPED].data_ptr()
        marks.counters.set([7] * COUNTERS)
    marks, layout, _plan = marked(torch.device("cuda", 1))
    marks.follow(layout, torch.device("cuda", 0))
    assert layout.generation is None
    assert list(marks.not_covered()) == ["gradients on cuda:1, where the scale is not"]


def test_a_generations_marks_are_told_from_others_in_their_place() -> None:
    marks, layout, _plan = marked(CPU)
    bits = torch.tensor([[5 << 2 | INF, 0, 2 << 2 | NAN, 0], [9 << 2 | NAN, 5 << 2 | NAN, 0, 0]], dtype=torch.int32)
    table = SimpleNamespace(bits=bits)
    layout.tables = {"check": table, "clip": table, "norm": SimpleNamespace(bits=(bits & 3) + (5 << 2))}
    assert [marks.of([generation]) for generation in (2, 9, 3)] == [{0: NAN}, {1: NAN}, {}]
    assert marks.of([5]) == {0: INF | NAN, 1: NAN}
    marks.forget()
    assert marks.of([2]) == {}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("plain", [True, False])
def test_what_torchs_op_checks_without_marks_is_said(device: str, backend: Any, plain: bool) -> None:
    marks, layout, _plan = marked(torch.device(device))
    layout.key, layout.backend = layout.key._replace(plain=plain), backend
    covered = backend == "triton" or (device == "cpu" and plain)
    assert list(marks.not_covered()) == ([] if covered else [f"gradients on {device} that torch's own op serves"])


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
    held = [torch.full((2,), torch.finfo(dtype).max, dtype=dtype) for dtype in report.DTYPES]
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
    assert mine == {"bad": [], "bad_parameters": [], "not_covered": [mock.ANY], "checked": 0}
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
