"""What the ranks run in test_clipping_ranks where one of them fails: what each is told, and where all end."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import Any
from unittest import mock

import cases
import torch
from cases import collectives_of, local_of
from scaler_triton.clipping import at_once
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from scaler_triton import dispatch


def one_rank_fails(rank: int, how: str, optimizers: int) -> list[str]:
    """A gradient of rank 1's cannot be unscaled, in its first optimizer; what every rank is told, and where."""
    scaler, params = cases.new_scaler("sharded"), [cases.plain_param(3) for _ in range(optimizers)]
    cases.give_grads(scaler, params, 0)
    if rank == 1:
        params[0].grad = torch.ones(1).expand(3)
    return _told(scaler, params, how)


def one_rank_never_scaled(rank: int, kind: str, how: str, optimizers: int) -> list[str]:
    """Rank 1's scaler has no scale; what every rank is told, and where."""
    scaler = cases.new_scaler(kind)
    params = [cases.dtensor_param(cases.line(), [Shard(0)]) for _ in range(optimizers)]
    cases.give_grads(scaler if rank == 0 else cases.new_scaler(kind), params, 0)
    return _told(scaler, params, how)


def one_rank_fails_beside_a_sum(rank: int, how: str, scales: bool) -> list[str]:
    """Another optimizer's gradient is yet to be summed over the ranks; rank 1 fails in the first, or has no scale."""
    scaler = cases.new_scaler("grad")
    params = [cases.dtensor_param(cases.line(), [Shard(0)]), cases.dtensor_param(cases.line(), [Replicate()])]
    cases.give_grads(scaler if scales or rank == 0 else cases.new_scaler("grad"), params, 0)
    params[1].grad = DTensor.from_local(torch.ones(2, 3), cases.line(), [Partial()], run_check=False)
    if rank == 1 and scales:
        params[0].grad = DTensor.from_local(torch.ones(1).expand(2, 3), cases.line(), [Shard(0)], run_check=False)
    return _told(scaler, params, how)


def one_rank_fails_where_nobody_must_agree(rank: int, how: str, scales: bool) -> list[str]:
    """Rank 1 cannot unscale a plain gradient, clipped together with a sharded one, or has no scale; then it can."""
    scaler = cases.new_scaler("grad")
    params = [cases.plain_param(3), cases.dtensor_param(cases.line(), [Shard(0)])]
    cases.give_grads(scaler if scales or rank == 0 else cases.new_scaler("grad"), params, 0)
    if rank == 1 and scales:
        params[0].grad = torch.ones(1).expand(3)
    return _told(scaler, params, how, mended=lambda: setattr(params[0], "grad", torch.ones(3)))


def _told(
    scaler: Any, params: Sequence[Tensor], how: str, mended: Callable[[], None] = lambda: None, first: Any = None
) -> list[str]:
    """Clip an optimizer for each parameter together and step; what each call said, and what has become of all."""
    optimizers = [cases.new_optimizer("sgd", [param]) for param in params]
    optimizers[0] = first or optimizers[0]
    ways: dict[str, dict[str, Any]] = {
        "after unscaling": {"norm_type": 1.0},
        "largest": {"norm_type": math.inf},
        "some parameters": {"parameters": params},
        "deferred": {"defer": True},
    }
    before = [local_of(param.detach()).clone() for param in params]
    steps = [functools.partial(scaler.step, optimizer) for optimizer in optimizers]
    said = []
    for call in (lambda: scaler.clip_grad_norm_(optimizers, 1.0, **ways.get(how, {})), *steps):
        try:
            call()
            said.append("")
        except Exception as error:
            said.append(cases.described(error))
        mended()
    scaler.update()
    stayed = all(torch.equal(local_of(p.detach()), old) for p, old in zip(params, before, strict=True))
    return [*said, "stayed" if stayed else "stepped", str(scaler.get_scale())]


def one_rank_has_no_memory(rank: int, kind: str, how: str, optimizers: int) -> list[str]:
    """Rank 1 has no memory for its part of the norm; what is said to each rank."""
    scaler = cases.new_scaler(kind)
    params = [cases.plain_param(3), cases.plain_param(2)][:optimizers]
    cases.give_grads(scaler, params, 0)
    with ExitStack() as missing:
        if rank == 1:
            for module, name in ((at_once, "_sum_of"), (torch.linalg, "vector_norm")):
                missing.enter_context(mock.patch.object(module, name, side_effect=MemoryError("no room")))
        return _told(scaler, params, how)


def one_rank_has_no_room_once_all_is_unscaled(rank: int, kind: str) -> list[str]:
    """Rank 1 fails before it looks at gradients, of which one optimizer's are unscaled already."""
    scaler = cases.new_scaler(kind)
    params = [cases.dtensor_param(cases.line(), [Shard(0)]) for _ in range(2)]
    cases.give_grads(scaler, params, 0)
    first = cases.new_optimizer("sgd", params[:1])
    scaler.unscale_(first)
    fails = mock.patch("scaler_triton.clipping.clip.plan_copies", side_effect=MemoryError("no room"))
    with fails if rank == 1 else nullcontext():
        return _told(scaler, params, "some parameters", first=first)


def interrupted_together(rank: int, kind: str) -> tuple[int, bool]:
    """All ranks are interrupted while they unscale: how many collectives that takes, and whether they step then."""
    scaler, params = cases.new_scaler(kind), [cases.dtensor_param(cases.line(), [Shard(0)])]
    cases.give_grads(scaler, params, 0)
    optimizer = cases.new_optimizer("sgd", params)

    def interrupted() -> None:
        with suppress(KeyboardInterrupt):
            scaler.unscale_(optimizer)

    with mock.patch("scaler_triton.batch_ops.unscale_batch_", side_effect=KeyboardInterrupt):
        count = collectives_of(interrupted)
    scaler.step(optimizer)
    return count, scaler.was_skipped(optimizer)


def one_rank_has_no_kernel(rank: int, kind: str) -> list[str]:
    """Rank 1 cannot leave clipping to the step, as it finds out when it is asked to; what every rank is told."""
    scaler = cases.new_scaler(kind)
    params = [cases.plain_param(3)]
    optimizer = cases.new_optimizer("sgd-fused", params)
    cases.give_grads(scaler, params, 0)
    before, said = local_of(params[0]).tolist(), ""
    missing = mock.patch.object(dispatch, "choose_for_scale", side_effect=RuntimeError("no kernel"))
    with missing if rank == 1 else nullcontext():
        try:
            scaler.clip_grad_norm_(optimizer, 1.0, defer=True)
        except RuntimeError as error:
            said = str(error)
    scaler.step(optimizer)
    scaler.update()
    return [said, str(local_of(params[0]).tolist() == before), str(scaler.get_scale())]
