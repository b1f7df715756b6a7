"""`clip_grad_norm_` over ranks: one norm of the whole model whatever its layout, one collective, all agree."""

import copy
import math
import re
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ranks import cases, models
from ranks.cases import INIT_SCALE, KINDS, LAYOUTS, Fault, collectives_of, local_of, new_optimizer, new_scaler, said
from ranks.models import MAX_NORM, WRAPPERS, Net

pytestmark = pytest.mark.distributed

ORDERS = (2.0, 1.0, 3.0, math.inf)


# Known gradients in every layout.


class Clipped(NamedTuple):
    """One clipped step of one rank; its own parts of the gradients, before they were scaled and once clipped."""

    norm: float
    expected_norm: float
    collectives: tuple[int, int]  # of the clip, and of the step
    before: list[list[float]]
    clipped: list[list[float]]
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
    """Clip parameters in a named layout, which have random gradients."""
    scaler, params, draw = new_scaler(kind, enabled=enabled), LAYOUTS[layout](), torch.Generator().manual_seed(1)
    wholes = [cases.drawn(param.shape, draw, torch.float64).to(param.dtype) for param in params]
    before = [cases.numbers(_laid_out_as(param, whole)) for param, whole in zip(params, wholes, strict=True)]
    for param, whole in zip(params, wholes, strict=True):
        param.grad = _laid_out_as(param, scaler.scale(whole).clone())
    cases.plant(faults, rank, 0, params)
    optimizer, norms = new_optimizer(name, [{"params": [param]} for param in params]), []
    clip = collectives_of(lambda: norms.append(scaler.clip_grad_norm_(optimizer, MAX_NORM, order)))
    assert type(norms[0]) is Tensor
    clipped = [cases.numbers(param.grad) for param in params]
    step = collectives_of(scaler.step, optimizer)
    scaler.update()
    expected_norm = torch.linalg.vector_norm(torch.cat([whole.double().flatten() for whole in wholes]), order).item()
    return Clipped(norms[0].item(), expected_norm, (clip, step), before, clipped, scaler.get_scale())


def _laid_out_as(param: Tensor, whole: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return whole
    return distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)


def assert_clipped(outcomes: Sequence[Clipped], rel: float = 1e-6) -> None:
    """All have the norm of the whole, and every gradient is clipped by it."""
    for outcome in outcomes:
        assert outcome.norm == pytest.approx(outcome.expected_norm, rel=rel)
        for before, clipped in zip(outcome.before, outcome.clipped, strict=True):
            assert clipped == pytest.approx([each * MAX_NORM / outcome.expected_norm for each in before], rel=1e-2)


@pytest.mark.parametrize("kind", ["sharded", "grad", "world"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_norm_of_the_whole(four, kind, layout):
    for order in ORDERS:
        outcomes = four.run(laid_out, kind, layout, order)
        assert_clipped(outcomes)
        assert len({outcome.norm for outcome in outcomes}) == 1
        counts = 0 if (kind, layout) == ("grad", "plain") else 1 if order == 2.0 else 2  # a flag's, a norm's
        assert {outcome.collectives for outcome in outcomes} == {(counts, 0)}
    for order in (2.0, math.inf):  # a disabled scaler; torch rounds the norms of bf16 gradients to bf16
        assert_clipped(four.run(laid_out, kind, layout, order, enabled=False), rel=1e-3)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("layout", ["line-shards", "hsdp", "fsdp-then-tp"])
def test_one_ranks_overflow_is_everybodys(four, layout, value):
    for order, rank, name in ((2.0, 3, "adamw"), (2.0, 3, "adamw-fused"), (1.0, 0, "adamw"), (math.inf, 3, "adamw")):
        faults = [Fault(0, rank, param=1, value=value)]
        for outcome in four.run(laid_out, "grad", layout, order, name=name, faults=faults):
            assert str(outcome.norm) == str(value)
            assert outcome.scale == INIT_SCALE / 2
            assert outcome.clipped[0] == outcome.before[0]  # unscaled, not clipped


# Whole models: test_matrix.py trains them.


def norms_beside_one_process(
    rank: int, kind: str, wrapper: str, enabled: bool = True
) -> tuple[list[float], list[float], bool]:
    """Norms of a wrapped model, and of the bare one by torch; whether an inf on every second rank then skips."""
    net = Net()
    bare, part = copy.deepcopy(net), models.part_of(wrapper, rank)
    model = WRAPPERS[wrapper](net)
    scaler, optimizer = new_scaler(kind, enabled=enabled), new_optimizer("sgd", model.parameters())
    norms, expected = [], []
    for step, order in enumerate(ORDERS):
        optimizer.zero_grad()
        bare.zero_grad()
        models.backward(model, step, part, scaler)
        models.backward(bare, step, (0, 1))
        norms.append(scaler.clip_grad_norm_(optimizer, 1e6, order, model=model).item())
        expected.append(nn.utils.clip_grad_norm_(bare.parameters(), 1e6, order).item())
        scaler.update()
    models.backward(model, 0, part, scaler)
    cases.plant([Fault(0, 1), Fault(0, 3)], rank, 0, cases.params_of(optimizer))
    scaler.step(optimizer)
    return norms, expected, enabled and scaler.was_skipped(optimizer)


@pytest.mark.parametrize(
    ("kind", "wrapper", "enabled"),
    [
        ("sharded", "fsdp1-tp", True),
        ("sharded", "ddp-tp", True),
        ("grad", "ddp-tp", True),
        ("sharded", "fsdp1-full", False),
        ("grad", "fsdp1-full", False),
    ],
)
def test_the_norm_is_that_of_one_process(four, kind, wrapper, enabled):
    """What tensor parallelism cut first is counted once; a disabled scaler, too, knows FSDP1's shards."""
    for norms, expected, skipped in four.run(norms_beside_one_process, kind, wrapper, enabled):
        assert norms == pytest.approx(expected, rel=1e-6)
        assert skipped == enabled


def refused(rank: int, what: str) -> str:
    """An FSDP1 model clipped in a way that cannot tell the norm of the whole: what it says."""
    if what == "flat over tensor parallel":
        return said(norms_beside_one_process, rank, "sharded", "fsdp1-tp-flat")
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
        ("plain scaler", "process_group is needed: parameter 0 is FullyShardedDataParallel's, cut into 4 pieces"),
        ("flat over tensor parallel", "model must be FullyShardedDataParallel with use_orig_params=True, got flat"),
    ],
)
def test_fsdp1_is_refused_where_the_whole_is_unknown(four, what, text):
    assert all(re.match(f"ValueError: {text}", answer) for answer in four.run(refused, what))


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


def interrupted(rank: int, kind: str, warm: bool) -> int:
    """All ranks are interrupted when they begin to unscale: how many collectives that takes."""
    scaler, params = new_scaler(kind), [cases.sharded_param()]
    optimizer, interrupt = new_optimizer("sgd", params), cases.FirstOpFails(KeyboardInterrupt())
    cases.give_grads(scaler, params, 0)
    if warm:  # who must agree is known
        scaler.step(optimizer)
        scaler.update()
    with cases.CollectiveCounter() as counter, pytest.raises(KeyboardInterrupt), interrupt:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return counter.count


@KINDS
@pytest.mark.parametrize("warm", [False, True])
def test_an_interrupt_asks_nothing_of_other_ranks(two, kind, warm):
    assert two.run(interrupted, kind, warm) == [0, 0]


# Scales that have come apart: the norm's reduction carries them. tests/fuzz has the other calls.

INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None, reason="the CPU has Triton's interpreter without a GPU"
)
BACKENDS = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=INTERPRETED)])
DIFFERENT = "RuntimeError: The ranks hold different scales, some below "


def asked(scaler: Any, optimizer: Any) -> str:
    """What `was_skipped` returns or raises."""
    answers: list[bool] = []
    return said(lambda: answers.append(scaler.was_skipped(optimizer))) or str(answers[0])


def clipped_a_factor_apart(rank: int, backend: str, dtypes: list[torch.dtype], factor: float) -> list[str]:
    """Rank 1's scale is so much larger; what is said of a clipped step, and of one of two optimizers."""
    texts = []
    for several in (1, 2):
        scaler = new_scaler("sharded", backend=backend)
        scaler.scale(torch.ones(()))
        params = [[cases.plain_param(3, dtype=dtype) for dtype in dtypes] for _ in range(several)]
        optimizers = [new_optimizer("sgd-fused", each) for each in params]
        for param in (param for each in params for param in each):
            param.grad = torch.ones_like(param)
        if rank == 1:
            scaler._scale.mul_(factor)
        scaler.clip_grad_norm_(optimizers, 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
            texts.append(asked(scaler, optimizer))
    return texts


@BACKENDS
@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float32, torch.bfloat16]], ids=["one dtype", "two"])
def test_scales_that_differ_by_little_raise_wherever_they_are_compared(two, dtypes, backend):
    for factor, told in ((1.0, "False"), (1.001, DIFFERENT), (1.00001, DIFFERENT), (8.0, DIFFERENT)):
        for texts in two.run(clipped_a_factor_apart, backend, dtypes, factor):
            assert len(texts) == 3
            assert all(text.startswith(told) for text in texts), (factor, texts)


def asked_after_another_rank_failed(rank: int, backend: str) -> list[str]:
    """Rank 1 cannot clip; what was_skipped says of a fused step, before and after an update that clears the flags."""
    scaler, params = new_scaler("sharded", backend=backend), [cases.plain_param(3)]
    optimizer = new_optimizer("adamw-fused", params)
    cases.give_grads(scaler, params, 0)
    if rank == 1:
        params[0].grad = torch.ones(1).expand(3)
    said(scaler.clip_grad_norm_, optimizer, 1.0)
    scaler.step(optimizer)
    texts = [asked(scaler, optimizer)]
    scaler.update()
    return [*texts, asked(scaler, optimizer)]


@BACKENDS
def test_a_rank_that_failed_to_clip_is_not_taken_for_one_with_another_scale(two, backend):
    first, second = two.run(asked_after_another_rank_failed, backend)
    assert first[0].startswith("RuntimeError: Another rank failed to check its gradients")
    assert second == ["True", "True"]
    assert "scales" not in first[1]
