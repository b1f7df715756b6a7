"""What the ranks run when something goes wrong on one of them, or on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import cases
import dtensor_cases
import torch
import torch.distributed as dist
from cases import Fault, Habits, Report
from scaler_triton.verdict import Verdict
from torch import Tensor

BAD_STEP = 1


# A rank alone with its trouble.


def _expanded() -> tuple[Tensor, Tensor]:
    return torch.ones(2, 2), torch.ones(()).expand(2, 2)


def _csr() -> tuple[Tensor, Tensor]:
    return torch.ones(2, 2).to_sparse_csr(), torch.ones(2, 2).to_sparse_csr()


def _complex() -> tuple[Tensor, Tensor]:
    return torch.ones(2, 2, dtype=torch.complex64), torch.ones(2, 2, dtype=torch.complex64)


# Parameters and what they get as gradients.
FLAWS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "expanded": _expanded,
    "csr": _csr,
    "complex": _complex,
}


def lone_flaw(rank: int, kind: str, name: str, flaw: str, *, unscale: bool, bad_ranks: Sequence[int]) -> Report:
    """At one step, some ranks have a gradient that no scaler can unscale; all write errors down and go on."""
    scaler, params = cases.new_scaler(kind), _params_for(kind)
    odd_data, odd_grad = FLAWS[flaw]() if rank in bad_ranks else (torch.ones(2, 2), None)
    odd_one = torch.nn.Parameter(odd_data)
    optimizer = cases.new_optimizer(name, [{"params": [param]} for param in (*params, odd_one)])

    def backward(step: int) -> None:
        cases.give_grads(scaler, params, step)
        odd_one.grad = odd_grad if step == BAD_STEP else None

    return cases.train(rank, scaler, [optimizer], backward, habits=Habits(unscale=unscale, tolerant=True))


def _params_for(kind: str) -> list[Tensor]:
    """Parameters that make the ranks agree: any for the sharded scaler, a DTensor for the other."""
    return [cases.plain_param(3)] if kind == "sharded" else dtensor_cases.LAYOUTS["line-shards"]()


@dataclass(frozen=True)
class Attempt:
    """One try: what it raised, what it cost, what became of gradients, parameters and stage."""

    error: str | None
    collectives: int
    grads_changed: bool
    params_changed: bool
    stage: str


def attempt(scaler: Any, method: str, optimizer: torch.optim.Optimizer) -> Attempt:
    """Call a method of the scaler and look at everything it must leave alone when it raises."""
    params = cases.params_of(optimizer)
    before = _digests(params), _gradients(params)
    count, error = cases._counted(getattr(scaler, method), optimizer)
    return Attempt(
        error=None if error is None else cases.described(error),
        collectives=count,
        grads_changed=_gradients(params) != before[1],
        params_changed=_digests(params) != before[0],
        stage=scaler._per_optimizer_states[id(optimizer)]["stage"].name,
    )


def _digests(tensors: Sequence[Tensor]) -> list[str]:
    return [cases.digest(tensor) for tensor in tensors]


def _gradients(params: Sequence[Tensor]) -> list[str]:
    return _digests([p.grad for p in params if p.grad is not None])


def never_scaled(rank: int, kind: str, name: str, method: str) -> Attempt:
    """The last rank never called scale()."""
    scaler, params = cases.new_scaler(kind), _params_for(kind)
    optimizer = cases.new_optimizer(name, params)
    forgetful = rank == dist.get_world_size() - 1
    cases.give_grads(cases.new_scaler(kind) if forgetful else scaler, params, 0)
    return attempt(scaler, method, optimizer)


def scaled_too_late(rank: int, kind: str, name: str) -> Report:
    """The last rank forgets scale() in the first step, writes the error down, and goes on like the others."""
    scaler, params = cases.new_scaler(kind), _params_for(kind)
    optimizer = cases.new_optimizer(name, params)

    def backward(step: int) -> None:
        forgetful = step == 0 and rank == dist.get_world_size() - 1
        cases.give_grads(cases.new_scaler(kind) if forgetful else scaler, params, step)

    return cases.train(rank, scaler, [optimizer], backward, habits=cases.Habits(tolerant=True))


def wrong_order(rank: int, kind: str, name: str) -> list[Attempt]:
    """Each method at the wrong moment as well as at the right one, on every rank."""
    scaler, params = cases.new_scaler(kind), _params_for(kind)
    optimizer = cases.new_optimizer(name, params)
    cases.give_grads(scaler, params, 0)
    calls = ("unscale_", "unscale_", "step", "step", "unscale_")
    return [attempt(scaler, method, optimizer) for method in calls]


def broken_reduction(rank: int, kind: str, name: str, unscale: bool) -> tuple[Report, str]:
    """The reduction itself raises once, on every rank; the loop then calls step() again, as a retry would.

    Returns the report and the stage right after the failure.
    """
    scaler, params, stages = cases.new_scaler(kind), _params_for(kind), []
    optimizer = cases.new_optimizer(name, params)
    reduce = dist.all_reduce

    def broken(*args: Any, **kwargs: Any) -> None:
        dist.all_reduce = reduce
        raise ConnectionError("link lost")

    def backward(step: int) -> None:
        cases.give_grads(scaler, params, step)
        dist.all_reduce = broken if step == BAD_STEP else reduce

    step = scaler.step

    def noting(optimizer: Any) -> Any:
        stages.append(scaler._per_optimizer_states[id(optimizer)]["stage"].name)
        return step(optimizer)

    scaler.step = noting
    habits = Habits(unscale=unscale, tolerant=True, retry=True)
    try:
        report = cases.train(rank, scaler, [optimizer], backward, habits=habits)
    finally:
        dist.all_reduce = reduce
    # Steps before the bad one call step once each, the bad one once more; after unscale_ failed, only as a retry.
    return report, stages[BAD_STEP if unscale else BAD_STEP + 1]


def raising_optimizer(rank: int, kind: str, name: str) -> Report:
    """The optimizer of the last rank raises once, having written nothing; the loop tries again."""
    scaler, params = cases.new_scaler(kind), _params_for(kind)
    optimizer = cases.new_optimizer(name, params)
    step, calls = optimizer.step, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == BAD_STEP + 1 and rank == dist.get_world_size() - 1:
            raise MemoryError("no room")
        return step(*args, **kwargs)

    optimizer.step = failing
    backward = cases.giving(scaler, params)
    return cases.train(rank, scaler, [optimizer], backward, habits=Habits(tolerant=True, retry=True))


# Optimizers that ask the scaler themselves.


class OldStyle(torch.optim.Optimizer):
    """SGD that takes the scaler as an argument, as apex's and TransformerEngine's fused optimizers do."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any, *, only_with_gradients: bool = False) -> None:
        super().__init__(params, {"lr": cases.LEARNING_RATE})
        self.only_with_gradients = only_with_gradients
        self.asked: list[dict[str, float]] = []

    @torch.no_grad()
    def step(self, closure: None = None, *, grad_scaler: Any = None) -> None:
        """Ask for the flag once per param group, as apex does, and unscale unless somebody has."""
        ready = grad_scaler._per_optimizer_states[id(self)]["stage"].name == "READY"
        for group in self.param_groups:
            if self.only_with_gradients and all(param.grad is None for param in group["params"]):
                continue
            flags = grad_scaler._check_inf_per_device(self)
            self.asked.append({device.type: flag.item() for device, flag in flags.items()})
            found_inf = flags[group["params"][0].device]
            scale = grad_scaler._get_scale_async() if ready else 1.0
            if not found_inf.item():
                for param in group["params"]:
                    if param.grad is not None:
                        cases.local_of(param).sub_(cases.local_of(param.grad) / scale, alpha=group["lr"])


def old_style(
    rank: int, kind: str, faults: Sequence[Fault], *, unscale: bool, gradless: Sequence[int] = ()
) -> tuple[Report, list[dict[str, float]]]:
    """An old-style optimizer with three param groups; the report, and all the flags that it was told."""
    scaler = cases.new_scaler(kind)
    params = [*_params_for(kind), cases.plain_param(2), cases.plain_param(4)]
    optimizer = OldStyle([{"params": [param]} for param in params])
    without = range(len(params)) if rank in gradless else ()
    backward = cases.giving(scaler, params, without)
    report = cases.train(rank, scaler, [optimizer], backward, faults, habits=Habits(unscale=unscale))
    return report, optimizer.asked


def old_style_that_does_not_ask(rank: int, kind: str, faults: Sequence[Fault], unscale: bool) -> Report:
    """An old-style optimizer that asks only if it has gradients, of which the first rank has none."""
    scaler, params = cases.new_scaler(kind), _params_for(kind)
    optimizer = OldStyle(params, only_with_gradients=True)
    backward = cases.giving(scaler, params, range(len(params)) if rank == 0 else ())
    return cases.train(rank, scaler, [optimizer], backward, faults, habits=Habits(unscale=unscale))


def raising_old_style(rank: int, kind: str, when: str) -> Report:
    """An old-style optimizer of the last rank raises once, "before" or "after" it asked; the loop tries again."""
    scaler, params, calls = cases.new_scaler(kind), _params_for(kind), []
    optimizer = OldStyle(params)
    step = optimizer.step

    def failing(*, grad_scaler: Any) -> None:
        calls.append(when)
        fails = len(calls) == BAD_STEP + 1 and rank == dist.get_world_size() - 1
        if fails and when == "before":
            raise MemoryError("no room")
        step(grad_scaler=grad_scaler)
        if fails:
            raise MemoryError("no room")

    optimizer.step = failing
    return cases.train(
        rank, scaler, [optimizer], cases.giving(scaler, params), habits=Habits(tolerant=True, retry=True)
    )


def failed_check(rank: int, kind: str, name: str, how: str) -> list[Attempt]:
    """The last rank alone fails when all ask for the flag themselves, once; then all step, mended or not, and go on."""
    scaler, params = cases.new_scaler(kind), _params_for(kind)
    hit = rank == dist.get_world_size() - 1
    odd_data, odd_grad = FLAWS["complex"]()
    odd_one = torch.nn.Parameter(odd_data)
    optimizer = cases.new_optimizer(name, [*params, odd_one])
    cases.give_grads(cases.new_scaler(kind) if hit and how == "never scaled" else scaler, params, 0)
    if hit and how != "never scaled":
        odd_one.grad = odd_grad
    attempts = [attempt(scaler, "_check_inf_per_device", optimizer)]
    if how == "mended":
        odd_one.grad = None
    attempts.append(attempt(scaler, "step", optimizer))
    scaler.update()
    odd_one.grad = None
    cases.give_grads(scaler, params, 1)
    return [*attempts, attempt(scaler, "step", optimizer)]


def lost_flag(rank: int, kind: str, name: str, unscale: bool) -> Report:
    """At one step the last rank has no memory to bring the flags of its devices together."""
    scaler, params = cases.new_scaler(kind), _params_for(kind)
    optimizer = cases.new_optimizer(name, params)
    add, calls = Verdict.add, []

    def failing(*args: Any) -> None:
        calls.append(args)
        if len(calls) == BAD_STEP + 1 and rank == dist.get_world_size() - 1:
            raise MemoryError("no room")
        add(*args)

    with mock.patch.object(Verdict, "add", failing):
        backward = cases.giving(scaler, params)
        return cases.train(rank, scaler, [optimizer], backward, habits=Habits(unscale=unscale, tolerant=True))


def another_order(rank: int, kind: str, name: str) -> tuple[list[bool], float]:
    """Rank 1 steps two optimizers the other way round, the first overflows on rank 0: which skipped, and the scale."""
    scaler = cases.new_scaler(kind)
    params = [cases.plain_param(3), cases.plain_param(3)]
    optimizers = [cases.new_optimizer(name, [param]) for param in params]
    cases.give_grads(scaler, params, 0)
    if rank == 0:
        params[0].grad.fill_(torch.inf)
    for optimizer in optimizers if rank == 0 else reversed(optimizers):
        scaler.step(optimizer)
    scaler.update()
    return [scaler.was_skipped(optimizer) for optimizer in optimizers], scaler.get_scale()
