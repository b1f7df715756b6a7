"""`clip_grad_norm_` over ranks: one norm of the whole model whatever its layout, one collective, all agree."""

import copy
import math
import re
import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ranks import cases, models
from ranks.cases import INIT_SCALE, LAYOUTS, Fault, collectives_of, local_of, new_optimizer, new_scaler, said
from ranks.models import MAX_NORM, WRAPPERS, Net

pytestmark = pytest.mark.distributed

ORDERS = (2.0, 1.0, 3.0, math.inf)


# Random gradients in every layout.


def clipped(rank: int, kind: str, layout: str, order: float, enabled: bool = True) -> tuple[float, int, int]:
    """Clip parameters as one process would; return the norm, and how many collectives the clip and the step took."""
    scaler, params, draw = new_scaler(kind, enabled=enabled), LAYOUTS[layout](), torch.Generator().manual_seed(1)
    wholes = [cases.drawn(param.shape, draw, torch.float64).to(param.dtype) for param in params]
    before = [cases.numbers(laid_out_as(param, whole)) for param, whole in zip(params, wholes, strict=True)]
    for param, whole in zip(params, wholes, strict=True):
        param.grad = laid_out_as(param, scaler.scale(whole).clone())
    optimizer, norms = new_optimizer("adamw", [{"params": [param]} for param in params]), []
    clip = collectives_of(lambda: norms.append(scaler.clip_grad_norm_(optimizer, MAX_NORM, order)))
    assert type(norms[0]) is Tensor
    expected = torch.linalg.vector_norm(torch.cat([whole.double().flatten() for whole in wholes]), order).item()
    # A disabled scaler clips by torch, which rounds the norms of bf16 gradients to bf16.
    assert norms[0].item() == pytest.approx(expected, rel=1e-6 if enabled else 1e-3)
    for param, numbers in zip(params, before, strict=True):
        assert cases.numbers(param.grad) == pytest.approx([each * MAX_NORM / expected for each in numbers], rel=1e-2)
    return norms[0].item(), clip, collectives_of(scaler.step, optimizer)


def laid_out_as(param: Tensor, whole: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return whole
    return distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)


@pytest.mark.parametrize("kind", ["sharded", "grad", "world"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_norm_of_the_whole(four, kind, layout):
    for order in ORDERS:
        first, *others = four.run(clipped, kind, layout, order)
        assert others == [first] * 3
        assert first[1:] == (0 if (kind, layout) == ("grad", "plain") else 1 if order == 2.0 else 2, 0)  # flag and norm
    for order in (2.0, math.inf):
        four.run(clipped, kind, layout, order, enabled=False)


# Whole models: test_matrix.py trains them.


def norms_beside_one_process(rank: int, kind: str, wrapper: str, enabled: bool = True) -> bool:
    """Compare norms of a wrapped model and of the bare one; whether an inf on every second rank then skips."""
    net = Net()
    bare, part = copy.deepcopy(net), models.part_of(wrapper, rank)
    model = WRAPPERS[wrapper](net)
    scaler, optimizer = new_scaler(kind, enabled=enabled), new_optimizer("sgd", model.parameters())
    for step, order in enumerate(ORDERS):
        optimizer.zero_grad()
        bare.zero_grad()
        models.backward(model, step, part, scaler)
        models.backward(bare, step, (0, 1))
        norm = scaler.clip_grad_norm_(optimizer, 1e6, order, model=model).item()
        assert norm == pytest.approx(nn.utils.clip_grad_norm_(bare.parameters(), 1e6, order).item(), rel=1e-6)
        scaler.update()
    models.backward(model, 0, part, scaler)
    cases.plant([Fault(0, 1), Fault(0, 3)], rank, 0, cases.params_of(optimizer))
    scaler.step(optimizer)
    return enabled and scaler.was_skipped(optimizer)


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
    assert four.run(norms_beside_one_process, kind, wrapper, enabled) == [enabled] * 4


def refused(rank: int, what: str) -> str:
    """An FSDP1 model clipped in a way that cannot tell the norm of the whole, once well before: what it says."""
    if what == "flat over tensor parallel":
        return said(norms_beside_one_process, rank, "sharded", "fsdp1-tp-flat")
    model = WRAPPERS["fsdp1-full"](Net())
    scaler = new_scaler("grad" if what == "plain scaler" else "sharded")
    optimizer = new_optimizer("sgd", model.parameters())
    given = {"no model": None, "inner model": model.module, "plain scaler": model}[what]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"\[ST11\]", category=UserWarning)
        if what != "plain scaler":
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
# Without a GPU the CPU has Triton's interpreter.
BACKENDS = ["torch"] if torch.cuda.is_available() or find_spec("triton") is None else ["torch", "triton"]
WHO_FAILS = [
    *(("sharded", "one, fused", {"backend": backend}) for backend in BACKENDS),
    ("sharded", "one", {}),
    ("sharded", "one", {"measure": True}),
    ("sharded", "two", {}),
    ("world", "two", {}),
    ("grad", "beside a sum", {}),
    ("grad", "beside shards", {}),
    ("guard", "one", {}),
    ("guard", "two", {}),
]


def asked(scaler: Any, optimizer: Any) -> str:
    """What `was_skipped` returns or raises."""
    answers: list[bool] = []
    return said(lambda: answers.append(scaler.was_skipped(optimizer))) or str(answers[0])


def one_rank_fails(rank: int, kind: str, layout: str, options: dict[str, Any], reason: str, how: str) -> list[str]:
    """Rank 1 fails to clip an optimizer for each parameter together; what each call said, and where all end."""
    scaler = new_scaler(kind, **options)
    one, another = cases.plain_param(3), cases.plain_param(2)
    params = {
        "one": lambda: [one],
        "one, fused": lambda: [one],
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
    optimizers = [new_optimizer("sgd-fused" if "fused" in layout else "sgd", [param]) for param in params]
    how_to_clip = HOWS[how] | ({"parameters": params} if how == "some parameters" else {})
    before = cases.digests(params)
    with cases.FirstOpFails() if rank == 1 and reason == "no memory" else nullcontext():
        texts = [said(scaler.clip_grad_norm_, optimizers, 1.0, **how_to_clip)]
    if layout == "beside shards":  # mended meanwhile
        params[0].grad = torch.ones(3)
    texts += [said(scaler.step, optimizer) or asked(scaler, optimizer) for optimizer in optimizers]
    scaler.update()
    texts += [asked(scaler, optimizers[0])]  # of flags that the update has cleared
    return [*texts, "stayed" if cases.digests(params) == before else "stepped", str(scaler.get_scale())]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    ("kind", "layout", "options", "reason"),
    [(*who, why) for who in WHO_FAILS for why in REASONS if (who[0], why) != ("guard", "never scaled")],
    ids=str,
)
def test_a_rank_that_fails_makes_all_skip(two, kind, layout, options, reason, how):
    """It takes part in the sums of others, and where none of its own must agree it skips what the others skip."""
    first, second = two.run(one_rank_fails, kind, layout, options, reason, how)
    assert second[0].startswith(REASONS[reason])
    if kind != "grad":
        assert first[0] == ""
        assert first[1].startswith("PeerFailedError: Another rank failed to check its gradients")
    assert not any("scales" in text for text in [*first, *second])  # they are not said to differ
    assert first[-2:] == second[-2:] == ["stayed", "1.0" if kind == "guard" else str(INIT_SCALE / 2)]


# Scales that have come apart: the norm's reduction carries them. tests/fuzz has the other calls.

DIFFERENT = "RuntimeError: The ranks hold different scales, some below "


def clipped_a_factor_apart(rank: int, backend: str, dtypes: list[torch.dtype], factor: float) -> str:
    """Rank 1's scale is so much larger: what is said of a clipped step."""
    scaler, params = new_scaler("sharded", backend=backend), [cases.plain_param(3, dtype=dtype) for dtype in dtypes]
    optimizer = new_optimizer("sgd-fused", params)
    cases.give_grads(scaler, params, 0)
    if rank == 1:
        scaler._scale.mul_(factor)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    return asked(scaler, optimizer)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float32, torch.bfloat16]], ids=["one dtype", "two"])
def test_scales_that_differ_by_little_raise(two, dtypes, backend):
    for factor, told in ((1.0, "False"), (1.00001, DIFFERENT), (8.0, DIFFERENT)):
        for text in two.run(clipped_a_factor_apart, backend, dtypes, factor):
            assert text.startswith(told), (factor, text)
