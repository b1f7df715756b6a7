"""Ranks with parameters of their own (FSDP1 shards, pipeline stages): one bad gradient, and nobody steps."""

import copy
from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from ranks import cases
from ranks.cases import UNSCALE, Fault, assert_agreed, laid_out, new_optimizer, new_scaler, plain_param

pytestmark = pytest.mark.distributed

OPTIMIZERS = ["sgd", "adam", "adamw", "adagrad", "adamw-foreach"]
FUSED = ["sgd-fused", "adam-fused", "adamw-fused", *cases.FUSED_ADAGRAD]


@UNSCALE
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", OPTIMIZERS + FUSED)
def test_one_overflow_skips_everywhere(ranks, name, value, unscale):
    fault = Fault(1, ranks.world_size - 1, value=value)  # a bug that listens to rank 0 alone must not pass
    reports = ranks.run(laid_out, "sharded", "plain", name, [fault], unscale=unscale)
    assert_agreed(reports, [1])


# Ranks that differ from each other.


def differing(rank: int, what: str, name: str, faults: Sequence[Fault]) -> cases.Report:
    """Ranks that share nothing but the flag, each with an optimizer of its own."""
    scaler, params, without = new_scaler("sharded"), [plain_param(3), plain_param(2, 2)], []
    if what == "fused on some":
        name = ["adamw", "adamw-fused"][rank % 2]
    if what == "stages":  # another number of parameters, other shapes, other dtypes
        dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
        params = [plain_param(rank + 2, dtype=dtypes[(rank + i) % 4]) for i in range(rank + 1)]
    if what == "frozen and empty":
        params = [plain_param(3).requires_grad_(rank % 2 == 0), plain_param(0)]
        without = [0] if rank % 2 else []
    if what == "patched":  # as kohya-ss wraps it to allow fp16
        inner = scaler._unscale_grads_
        scaler._unscale_grads_ = lambda optimizer, inv, found, allow_fp16: inner(optimizer, inv, found, True)

    def backward(step: int) -> None:
        cases.give_grads(scaler, params, step, without)
        if what == "sparse on some" and rank % 2:
            rows = params[1].grad.clone() / 2
            params[1].grad = torch.sparse_coo_tensor([[1, 1]], rows, params[1].shape, check_invariants=True)

    return cases.train(rank, scaler, new_optimizer(name, params), backward, faults)


@pytest.mark.parametrize(
    ("what", "name", "bad"),
    [
        ("fused on some", "", 0),
        ("fused on some", "", -1),
        ("sparse on some", "sgd", -1),
        *((what, name, -1) for what in ("stages", "patched") for name in ("adamw", "adamw-fused")),
        *(("frozen and empty", name, 0) for name in ("adamw", "adamw-fused")),
    ],
)
def test_ranks_share_nothing_but_the_flag(ranks, what, name, bad):
    assert_agreed(ranks.run(differing, what, name, [Fault(1, bad % ranks.world_size, -1)]), [1])


# Gradients on a GPU, and others that were offloaded to the host.


def two_devices(rank: int, name: str, faults: Sequence[Fault], *, apart: bool, how: str) -> cases.Report:
    """A parameter on the GPU and one on the host; `apart`: even ranks hold only the first, odd the second."""
    scaler = new_scaler("sharded", device="cuda")
    params = [nn.Parameter(torch.ones(3, device=device)) for device in ("cuda", "cpu")]
    if apart:
        params = [params[rank % 2]]
    optimizer = new_optimizer(name, [{"params": [param]} for param in params])

    def backward(step: int) -> None:
        factor = scaler.scale(torch.ones((), device="cuda")).item()
        for param in params:
            param.grad = torch.full_like(param, 2.0 ** (step - 3) * factor)

    clip = partial(scaler.clip_grad_norm_, max_norm=1.0) if how == "clip" else None
    return cases.train(rank, scaler, optimizer, backward, faults, unscale=how == "unscale_", clip=clip)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["step", "unscale_", "clip"])
@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw-fused"])
@pytest.mark.parametrize("apart", [False, True], ids=["both", "apart"])
@pytest.mark.parametrize("bad", [0, 1])
def test_an_inf_on_the_gpu_or_on_the_host_skips_everywhere(two, name, bad, apart, how):
    fault = Fault(1, bad) if apart else Fault(1, 1, param=bad)
    assert_agreed(two.run(two_devices, name, [fault], apart=apart, how=how), [1])


# torch's pipelines.


def pipeline(rank: int, name: str, faults: Sequence[Fault]) -> tuple[cases.Report, float]:
    """A layer a rank under torch's 1F1B, one step bad; what it reports, and how far from one process it ends.

    Only the last stage has a loss; each of the others scales a zero once per batch, and so enters each step as it does.
    """
    layers = [nn.Linear(6, 6) for _ in range(dist.get_world_size())]
    bare = copy.deepcopy(nn.Sequential(*layers))
    stage = PipelineStage(layers[rank], rank, len(layers), cases.this_device())
    scaler, optimizer = new_scaler("sharded"), new_optimizer(name, layers[rank].parameters())
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, y: scaler.scale(nn.functional.mse_loss(output, y)))
    inputs = [cases.drawn((8, 6), torch.Generator().manual_seed(step)) for step in range(cases.STEPS)]

    def backward(step: int) -> None:
        if not stage.is_last:
            scaler.scale(torch.zeros(()))
        target = {"target": inputs[step].sin(), "losses": []} if stage.is_last else {}
        schedule.step(*[inputs[step]] * stage.is_first, **target)

    report = cases.train(rank, scaler, optimizer, backward, faults)
    reference = new_optimizer(name, bare.parameters())
    for step in sorted({*range(cases.STEPS)} - {fault.step for fault in faults}):
        reference.zero_grad()
        nn.functional.mse_loss(bare(inputs[step]), inputs[step].sin()).backward()
        reference.step()
    pairs = zip(layers[rank].parameters(), bare[rank].parameters(), strict=True)
    return report, max(float((ours - one).detach().abs().max()) for ours, one in pairs)


@pytest.mark.skipif(cases.GLOO_ON_GPU, reason="gloo sends no GPU's tensors from rank to rank")
@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_a_pipeline_whose_last_stage_alone_has_a_loss_trains_as_one_process_does(ranks, name):
    outcomes = ranks.run(pipeline, name, [Fault(1, 0)])
    assert_agreed([report for report, _ in outcomes], [1])
    for _, distance in outcomes:
        assert distance <= 1e-6  # sums of four microbatches in another order
