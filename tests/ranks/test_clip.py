"""`clip_grad_norm_` over ranks: one norm of the whole model whatever its layout, one collective, all agree."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ranks import cases, models
from ranks.cases import INIT_SCALE, KINDS, LAYOUTS, Fault, collectives_of, local_of, new_optimizer, new_scaler, said
from ranks.models import MAX_NORM, WRAPPERS, Net

pytestmark = pytest.mark.distributed

ORDERS = (2.0, 1.0, 3.0, math.inf)


def total(values: Sequence[float], order: float) -> float:
    return max(map(abs, values)) if order == math.inf else sum(abs(each) ** order for each in values) ** (1 / order)


# Known gradients in every layout.


class Clipped(NamedTuple):
    """One clipped step of one rank: the gradients before and after it, by piece; copies of a piece have its name."""

    norm: float
    collectives: tuple[int, int]  # of the clip, and of the step
    pieces: dict[tuple[int, ...], list[float]]
    clipped: dict[tuple[int, ...], list[float]]
    scale: float


def laid_out(
    rank: int,
    kind: str,
    layout: str,
    order: float = 2.0,
    *,
    name: str = "adamw",
    faults: Sequence[Fault] = (),
    enabled: bool = True,
) -> Clipped:
    """Clip parameters in a named layout, each piece with a random gradient of its own."""
    scaler, params = new_scaler(kind, enabled=enabled), LAYOUTS[layout]()
    cases.give_grads(scaler, params, 0)
    held, pieces = {(index, *_place_of(param)): param.grad for index, param in enumerate(params)}, {}
    for piece, gradient in held.items():
        draw = torch.Generator().manual_seed(int("".join(map(str, (1, *piece)))))
        values = cases.drawn(local_of(gradient).shape, draw, torch.float64).to(gradient.dtype)
        pieces[piece] = values.double().flatten().tolist()
        local_of(gradient).copy_(scaler.scale(values))
    cases.plant(faults, rank, 0, params)
    optimizer, norms = new_optimizer(name, [{"params": [param]} for param in params]), []
    clip = collectives_of(lambda: norms.append(scaler.clip_grad_norm_(optimizer, MAX_NORM, order)))
    assert type(norms[0]) is Tensor
    clipped = {piece: cases.numbers(gradient) for piece, gradient in held.items()}
    step = collectives_of(scaler.step, optimizer)
    scaler.update()
    return Clipped(norms[0].item(), (clip, step), pieces, clipped, scaler.get_scale())


def _place_of(param: Tensor) -> list[int]:
    """Return where this rank stands along the mesh's dims that cut the parameter."""
    if not isinstance(param, DTensor):
        return []
    places = zip(param.device_mesh.get_coordinate(), param.placements, strict=True)
    return [place for place, placement in places if not placement.is_replicate()]


def assert_clipped(outcomes: Sequence[Clipped], order: float, rel: float = 1e-6) -> None:
    """All have the norm of all pieces, and every gradient is clipped by it."""
    pieces = {piece: values for outcome in outcomes for piece, values in outcome.pieces.items()}
    norm = total([value for values in pieces.values() for value in values], order)
    for outcome in outcomes:
        assert outcome.norm == pytest.approx(norm, rel=rel)
        for piece, values in outcome.pieces.items():
            assert outcome.clipped[piece] == pytest.approx([each * MAX_NORM / norm for each in values], rel=1e-2)


@KINDS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_norm_of_the_whole(four, kind, layout):
    for order in ORDERS:
        outcomes = four.run(laid_out, kind, layout, order)
        assert_clipped(outcomes, order)
        assert len({outcome.norm for outcome in outcomes}) == 1
        counts = 0 if (kind, layout) == ("grad", "plain") else 1 if order == 2.0 else 2  # a flag's, a norm's
        assert {outcome.collectives for outcome in outcomes} == {(counts, 0)}


@pytest.mark.parametrize("kind", ["sharded", "grad", "world"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_disabled_scaler_clips_by_the_norm_of_the_whole(four, kind, layout):
    for order in (2.0, math.inf):
        # torch rounds the norms of bf16 gradients to bf16
        assert_clipped(four.run(laid_out, kind, layout, order, enabled=False), order, rel=1e-3)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("layout", ["line-shards", "hsdp", "fsdp-then-tp"])
def test_one_ranks_overflow_is_everybodys(four, layout, value):
    for order, rank, name in ((2.0, 3, "adamw"), (2.0, 3, "adamw-fused"), (1.0, 0, "adamw"), (math.inf, 3, "adamw")):
        faults = [Fault(0, rank, param=1, value=value)]
        for outcome in four.run(laid_out, "grad", layout, order, name=name, faults=faults):
            assert str(outcome.norm) == str(value)
            assert outcome.scale == INIT_SCALE / 2
            first = next(piece for piece in outcome.pieces if piece[0] == 0)
            assert outcome.clipped[first] == outcome.pieces[first]  # unscaled, not clipped


# Whole models.


class Trained(NamedTuple):
    """Norms, ours and those of one process; collectives of each clip and step; how far apart both ended."""

    norms: list[float]
    expected: list[float]
    collectives: list[tuple[int, int]]
    distance: float


def trained(rank: int, kind: str, wrapper: str, name: str, order: float = 2.0, enabled: bool = True) -> Trained:
    """A wrapped model clipped by us, and the bare one by torch on the whole batch."""
    net = Net()
    bare = copy.deepcopy(net)
    model = WRAPPERS[wrapper](net)
    optimizer, reference = (new_optimizer(name, each.parameters()) for each in (model, bare))
    scaler, norms, expected, collectives = new_scaler(kind, enabled=enabled), [], [], []
    for step in range(4):
        optimizer.zero_grad()
        models.backward(model, step, models.part_of(wrapper, rank), scaler)
        clip = collectives_of(
            lambda: norms.append(scaler.clip_grad_norm_(optimizer, MAX_NORM, order, model=model).item())
        )
        collectives.append((clip, collectives_of(scaler.step, optimizer)))
        scaler.update()
        reference.zero_grad()
        models.backward(bare, step, (0, 1))
        expected.append(nn.utils.clip_grad_norm_(bare.parameters(), MAX_NORM, order).item())
        reference.step()
    return Trained(norms, expected, collectives, models.distance(model, bare))


def assert_as_one_process(outcomes: Sequence[Trained], collectives: int | None) -> None:
    assert len({tuple(outcome.norms) for outcome in outcomes}) == 1
    for outcome in outcomes:
        assert outcome.norms == pytest.approx(outcome.expected, rel=1e-6)
        assert collectives is None or outcome.collectives == [(collectives, 0)] * 4
        assert outcome.distance <= 2e-5


SHARDED = ["ddp", "fsdp1-full", "fsdp1-full-flat", "fsdp1-no-shard", "fsdp2"]


@pytest.mark.parametrize(("kind", "wrapper"), [*(("sharded", w) for w in SHARDED), ("grad", "ddp"), ("grad", "fsdp2")])
@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_models_are_clipped_as_one_process_is(two, kind, wrapper, name):
    alone = (kind, wrapper) == ("grad", "ddp")  # gradients are equal everywhere: nobody need be asked
    assert_as_one_process(two.run(trained, kind, wrapper, name), 0 if alone else 1)


@pytest.mark.parametrize(
    ("kind", "wrapper"), [("sharded", "fsdp1-hybrid"), ("grad", "hsdp2"), ("grad", "fsdp2-tp"), ("sharded", "fsdp2-tp")]
)
def test_models_on_two_meshes_are_clipped_as_one_process_is(four, kind, wrapper):
    assert_as_one_process(four.run(trained, kind, wrapper, "sgd"), 1)


@KINDS
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_disabled_scaler_clips_fsdp1_by_the_norm_of_the_whole(two, kind, order):
    assert_as_one_process(two.run(trained, kind, "fsdp1-full", "sgd", order, enabled=False), None)


def over_tensor_parallel(rank: int, kind: str, how: str) -> tuple[list[float], list[float], bool]:
    """FSDP1 or DDP over layers that tensor parallelism cut: norms beside one process', and if a shard's inf skips."""
    net, mesh = Net(), cases.square()
    bare, cut, dp = copy.deepcopy(net), models.cut_by_tensor_parallel(net), mesh["dp"]
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(cut, device_mesh=dp)  # takes the shards for parameters
    else:
        orig = how == "fsdp1"
        model = FullyShardedDataParallel(cut, device_mesh=dp, use_orig_params=orig, device_id=cases.this_device())
    scaler, optimizer, norms, expected = new_scaler(kind), new_optimizer("sgd", model.parameters()), [], []
    for step, order in enumerate(ORDERS):
        optimizer.zero_grad()
        bare.zero_grad()
        models.backward(model, step, (rank // 2, 2), scaler)
        models.backward(bare, step, (0, 1))
        norms.append(scaler.clip_grad_norm_(optimizer, 1e6, order, model=model).item())
        expected.append(nn.utils.clip_grad_norm_(bare.parameters(), 1e6, order).item())
        scaler.update()
    models.backward(model, 0, (rank // 2, 2), scaler)
    if mesh.get_local_rank("tp") == 1:
        next(p.grad for p in cases.params_of(optimizer) if p.grad is not None and p.numel()).view(-1)[0] = math.inf
    scaler.step(optimizer)
    return norms, expected, scaler.was_skipped(optimizer)


@pytest.mark.parametrize(("kind", "how"), [("sharded", "fsdp1"), ("sharded", "ddp"), ("grad", "ddp")])
def test_what_tensor_parallelism_cut_first_is_counted_once(four, kind, how):
    for norms, expected, skipped in four.run(over_tensor_parallel, kind, how):
        assert norms == pytest.approx(expected, rel=1e-6)
        assert skipped


def refused(rank: int, what: str) -> str:
    """An FSDP1 model clipped in a way that cannot tell the norm of the whole: what it says."""
    if what == "flat over tensor parallel":
        return said(over_tensor_parallel, rank, "sharded", what)
    model = WRAPPERS["fsdp1-full"](Net())
    scaler = new_scaler("grad" if what == "plain scaler" else "sharded")
    optimizer = new_optimizer("sgd", model.parameters())
    given = {"no model": None, "inner model": model.module, "plain scaler": model}[what]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="GradScaler cannot tell which ranks", category=UserWarning)
        if what != "plain scaler":  # once well
            models.backward(model, 0, (0, 1), scaler)
            scaler.clip_grad_norm_(optimizer, 1.0, model=model)
            scaler.step(optimizer)
            scaler.update()
        models.backward(model, 1, (0, 1), scaler)
        return said(scaler.clip_grad_norm_, optimizer, 1.0, model=given)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("no model", "model must be the module that holds .*, got NoneType$"),
        ("inner model", "model must be the module that holds .* parameter 0 is sharded, got Net$"),
        ("plain scaler", "process_group is needed: parameter 0 is FullyShardedDataParallel's, cut into 2 pieces"),
    ],
)
def test_fsdp1_is_refused_where_the_whole_is_unknown(two, what, text):
    assert all(re.match(f"ValueError: {text}", answer) for answer in two.run(refused, what))


def test_flat_parameters_of_fsdp1_over_tensor_parallel_are_refused(four):
    text = "ValueError: model must be FullyShardedDataParallel with use_orig_params=True, got flat"
    assert all(answer.startswith(text) for answer in four.run(refused, "flat over tensor parallel"))


def of_each_rank(rank: int, kind: str, enabled: bool, order: float) -> float:
    """The norm of a parameter of rank + 1 that no other rank has, and that tells of none."""
    scaler, param = new_scaler(kind, enabled=enabled), cases.plain_param(1)
    param.grad = scaler.scale(torch.full_like(param, rank + 1.0))
    return scaler.clip_grad_norm_(new_optimizer("sgd", [param]), 1e9, order).item()


@pytest.mark.parametrize("kind", ["sharded", "world", "grad"])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_the_norm_is_that_of_the_ranks_that_agree(two, kind, order):
    on, off = (two.run(of_each_rank, kind, enabled, order) for enabled in (True, False))
    assert off == pytest.approx(on, rel=1e-6)
    assert (off[0] == off[1]) == (kind != "grad")


def one_rank_looks_again(rank: int) -> bool:
    """A sharded and a plain parameter are clipped together; one rank looks at the plain one before its step."""
    scaler, params = new_scaler("grad"), [cases.sharded_param(), cases.plain_param(3)]
    optimizers = [new_optimizer("sgd", [param]) for param in params]
    cases.give_grads(scaler, params, 0)
    if rank == 1:
        local_of(params[0].grad).fill_(math.inf)
    scaler.clip_grad_norm_(optimizers, 1.0)
    if rank == 0:
        scaler._check_inf_per_device(optimizers[1])
    scaler.step(optimizers[1])
    return params[1].tolist() == [1.0] * 3


def test_a_look_on_one_rank_overrules_nothing_that_was_clipped_together(two):
    assert two.run(one_rank_looks_again) == [True, True]


# One rank fails.

HOWS = {"at once": {}, "largest": {"norm_type": math.inf}, "some parameters": {}}
REASONS = {
    "bad gradient": "RuntimeError: unsupported operation: more than one element",
    "never scaled": "AssertionError: Attempted clip_grad_norm_ but _scale is None.",
    "no memory": "OutOfMemoryError: out of memory",
}


def one_rank_fails(rank: int, kind: str, layout: str, reason: str, how: str) -> list[str]:
    """Rank 1 fails to clip an optimizer for each parameter together; what each call said, and where all end."""
    scaler = new_scaler(kind)
    one, another = cases.plain_param(3), cases.plain_param(2)
    params = {
        "one": lambda: [one],
        "two": lambda: [one, another],
        "beside a sum": lambda: [cases.sharded_param(), cases.dtensor_param(cases.line(), [Replicate()])],
        "beside shards": lambda: [one, cases.sharded_param()],
    }[layout]()
    cases.give_grads(new_scaler(kind) if rank == 1 and reason == "never scaled" else scaler, params, 0)
    if layout == "beside a sum":
        params[1].grad = cases.placed(torch.ones(2, 3), Partial())
    if rank == 1 and reason == "bad gradient":
        local = torch.ones(1).expand(local_of(params[0]).shape)
        params[0].grad = cases.placed(local, Shard(0)) if isinstance(params[0], DTensor) else local
    optimizers = [new_optimizer("sgd", [param]) for param in params]
    options = HOWS[how] | ({"parameters": params} if how == "some parameters" else {})
    before = cases.digests(params)
    with cases.FirstOpFails() if rank == 1 and reason == "no memory" else nullcontext():
        texts = [said(scaler.clip_grad_norm_, optimizers, 1.0, **options)]
    if layout == "beside shards":  # mended meanwhile
        params[0].grad = torch.ones(3)
    texts += [said(scaler.step, optimizer) for optimizer in optimizers]
    scaler.update()
    return [*texts, "stayed" if cases.digests(params) == before else "stepped", str(scaler.get_scale())]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("sharded", "one"), ("sharded", "two"), ("world", "two"), ("grad", "beside a sum"), ("grad", "beside shards")],
)
def test_a_rank_that_fails_makes_all_skip(two, kind, layout, reason, how):
    """It takes part in the sums of others, and where none of its own must agree it skips what the others skip."""
    first, second = two.run(one_rank_fails, kind, layout, reason, how)
    assert second[0].startswith(REASONS[reason])
    if kind != "grad":
        assert first[0] == ""
        assert first[1].startswith("RuntimeError: Another rank failed to check its gradients")
    assert first[-2:] == second[-2:] == ["stayed", str(INIT_SCALE / 2)]


def interrupted(rank: int, kind: str) -> int:
    """All ranks are interrupted when they begin to unscale: how many collectives that takes."""
    scaler, params = new_scaler(kind), [cases.sharded_param()]
    cases.give_grads(scaler, params, 0)
    optimizer = new_optimizer("sgd", params)

    def unscale() -> None:
        with cases.FirstOpFails(KeyboardInterrupt()):
            scaler.unscale_(optimizer)

    with cases.CollectiveCounter() as counter, pytest.raises(KeyboardInterrupt):
        unscale()
    scaler.step(optimizer)
    return counter.count


@KINDS
def test_an_interrupt_asks_nothing_of_other_ranks(two, kind):
    assert two.run(interrupted, kind) == [0, 0]
