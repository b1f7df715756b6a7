"""What the ranks run when one of them dies, raises or is cut off; pytest stays out of it: spawned ranks import this."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cases
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from scaler_triton.demo.rank_process import limit_collectives

LIMIT = 0.5  # Seconds that a collective may take here before torch gives up.


@dataclass(frozen=True)
class Outcome:
    """One call of one rank: what it raised and how long it took, and what is left."""

    error: str | None
    seconds: float
    params_changed: bool
    finite: bool
    scale: float
    tracker: int
    stage: str
    flags: tuple[float, ...]
    lent: bool  # scale or flag left behind on the optimizer


@dataclass(frozen=True)
class Variant:
    """A scaler and an optimizer, and how they are used."""

    kind: str
    name: str
    unscale: bool

    def __str__(self) -> str:
        return f"{self.kind}-{self.name}{'-unscale_' * self.unscale}"


VARIANTS = [
    Variant("sharded", "adamw", False),
    Variant("sharded", "adamw", True),
    Variant("sharded", "adamw-fused", False),
    Variant("grad", "sgd", False),
    Variant("grad", "adamw-fused", True),
]


def _set_up(variant: Variant, group: Any = None) -> tuple[Any, Any]:
    """Return a scaler over `group` and an optimizer that has taken one good step."""
    scaler = cases.new_scaler(variant.kind, process_group=group or dist.group.WORLD)
    optimizer = cases.new_optimizer(variant.name, [cases.plain_param(3), cases.plain_param(2, 2)])
    _give(scaler, optimizer, 0)
    scaler.step(optimizer)
    scaler.update()
    return scaler, optimizer


def _give(scaler: Any, optimizer: Any, step: int) -> None:
    cases.give_grads(scaler, cases.params_of(optimizer), step)


def _shorten_limit(group: Any) -> None:
    """Set the limit of a group whose ranks have just met: busy machines are late for a first meeting."""
    limit_collectives(LIMIT, group)


def _attempt(call: Callable[[Any], Any], scaler: Any, optimizer: Any) -> Outcome:
    """Call a method of the scaler with the optimizer and look at what is left."""
    params = cases.params_of(optimizer)
    before, start, error = [cases.digest(p) for p in params], time.monotonic(), None
    try:
        call(optimizer)
    except Exception as raised:
        error = cases.described(raised)
    seconds = time.monotonic() - start
    state = scaler._per_optimizer_states[id(optimizer)]
    return Outcome(
        error=error,
        seconds=seconds,
        params_changed=[cases.digest(p) for p in params] != before,
        finite=all(bool(p.isfinite().all()) for p in params),
        scale=scaler.get_scale(),
        tracker=int(scaler._growth_tracker),
        stage=state["stage"].name,
        flags=tuple(flag.item() for flag in state["found_inf_per_device"].values()),
        lent=hasattr(optimizer, "found_inf") or hasattr(optimizer, "grad_scale"),
    )


# A rank raises between scale and step.


def raises_between(rank: int) -> dict[str, list[Outcome]]:
    """The last rank raises once it has scaled; the others step alone: in a failed step, and once more."""
    dist.barrier()
    return {str(variant): _raises_between(rank, variant) for variant in VARIANTS}


def _raises_between(rank: int, variant: Variant) -> list[Outcome]:
    group = dist.new_group()
    scaler, optimizer = _set_up(variant, group)
    _shorten_limit(group)
    outcomes: list[Outcome] = []
    try:
        _give(scaler, optimizer, 1)
        if rank == dist.get_world_size() - 1:
            raise KeyError("bad batch")
        outcomes.append(_attempt(scaler.unscale_ if variant.unscale else scaler.step, scaler, optimizer))
        outcomes.append(_attempt(scaler.step, scaler, optimizer))
    except KeyError:
        pass  # the rank lives on, writing a log, say
    dist.barrier()  # of the default group, which nothing has happened to
    return outcomes


# A rank is killed in the reduction.


@contextmanager
def reducing(replacement: Callable[..., Any]) -> Iterator[None]:
    """Put a function in the place of `all_reduce`."""
    real = dist.all_reduce
    dist.all_reduce = replacement
    try:
        yield
    finally:
        dist.all_reduce = real


def killed(rank: int, variant: Variant, how: str) -> list[Outcome]:
    """The last rank dies before it joins the reduction, or with it on its way."""
    scaler, optimizer = _set_up(variant)
    _shorten_limit(dist.group.WORLD)
    _give(scaler, optimizer, 1)
    if rank == dist.get_world_size() - 1:
        with reducing(dying(how)):
            scaler.step(optimizer)
    return [
        _attempt(scaler.unscale_ if variant.unscale else scaler.step, scaler, optimizer),
        _attempt(scaler.step, scaler, optimizer),
    ]


def dying(how: str) -> Callable[..., Any]:
    """Return an `all_reduce` that does not survive."""
    real = dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> None:
        if how == "exit":
            os._exit(7)
        if how == "during":
            real(*args, **kwargs, async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)

    return all_reduce


# The reduction fails half-way.

GARBAGE = [0.0, 1.0, float("nan"), float("inf"), 1e-30]


def fails_half_way(rank: int, variant: Variant, lone: bool) -> list[tuple[list[Outcome], float]]:
    """The reduction raises on all ranks (or the last alone), having written garbage; then an update and a good step."""
    return [_fails_half_way(rank, variant, value, lone) for value in GARBAGE]


def _fails_half_way(rank: int, variant: Variant, value: float, lone: bool) -> tuple[list[Outcome], float]:
    scaler, optimizer = _set_up(variant)
    _give(scaler, optimizer, 1)
    hit = not lone or rank == dist.get_world_size() - 1
    with reducing(failing(value) if hit else dist.all_reduce):
        outcomes = [_attempt(scaler.unscale_ if variant.unscale else scaler.step, scaler, optimizer)]
    if hit or variant.unscale:
        outcomes.append(_attempt(scaler.step, scaler, optimizer))
    scaler.update()
    scale = scaler.get_scale()
    _give(scaler, optimizer, 2)
    outcomes.append(_attempt(scaler.step, scaler, optimizer))
    return outcomes, scale


def failing(value: float) -> Callable[..., Any]:
    """Return an `all_reduce` that takes part, leaves `value` behind and raises."""
    real = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        real(tensor, *args, **kwargs)
        tensor.fill_(value)
        raise ConnectionError("link lost")

    return all_reduce


# A restart from a checkpoint with another world size.

# Shards of four ranks and of two are whole vectors: torch's fused AdamW rounds the odd rest of a tensor differently.
SHAPE, BAD_ROW = (32, 16), 31


def train_alone(name: str, steps: Sequence[int], bad: Sequence[int]) -> tuple[dict[str, Any], list[float]]:
    """Train whole parameters in one process with torch's scaler; the last checkpoint, and the scales."""
    params = [nn.Parameter(each) for each in _start()]
    optimizer = cases.new_optimizer(name, params)
    settings = {"init_scale": cases.INIT_SCALE, "growth_interval": cases.GROWTH_INTERVAL}
    scaler, scales = torch.amp.GradScaler("cpu", **settings), []
    for step in steps:
        factor = scaler.scale(torch.ones(()))
        for index, param in enumerate(params):
            param.grad = _whole_grad(index, step, step in bad) * factor
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return _checkpoint(params, optimizer, scaler), scales


def train_on(
    rank: int, kind: str, name: str, steps: Sequence[int], bad: Sequence[int], state: Any = None, die_at: int = -1
) -> dict[str, Any]:
    """Train sharded parameters from `state` on; the last rank may be killed in a reduction.

    Every world size sees the same gradients, element by element: what is sharded differently is the same maths.

    Returns: the last checkpoint, of whole tensors, the scale after every step, what ended the run, and whether
        this rank's part of the parameters is that of the checkpoint.
    """
    params, optimizer, scaler = _restored(kind, name, state)
    scales, last, held, error = [], state, _digests(params), None
    for step in steps:
        _give_whole(scaler, params, step, step in bad)
        if step == die_at:
            _shorten_limit(dist.group.WORLD)
        try:
            with reducing(dying("exit") if (step, rank) == (die_at, dist.get_world_size() - 1) else dist.all_reduce):
                scaler.step(optimizer)
        except RuntimeError as raised:
            error = cases.described(raised)
            break
        scaler.update()
        scales.append(scaler.get_scale())
        last, held = _checkpoint(params, optimizer, scaler), _digests(params)
    return {"last": last, "scales": scales, "error": error, "untouched": _digests(params) == held}


def _digests(params: Sequence[Tensor]) -> list[str]:
    return [cases.digest(param) for param in params]


def _start() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(SHAPE, generator=generator) for _ in range(2)]


def _whole_grad(index: int, step: int, bad: bool) -> Tensor:
    """Return a step's gradient, drawn from its number; a bad one overflows in one row, so on one rank."""
    grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * step + index))
    if bad and index == 1:
        grad[BAD_ROW, 0] = torch.inf
    return grad


def _restored(kind: str, name: str, state: Any) -> tuple[list[Tensor], torch.optim.Optimizer, Any]:
    whole = _start() if state is None else state["params"]
    params = [nn.Parameter(_sharded(each)) for each in whole]
    optimizer = cases.new_optimizer(name, params)
    scaler = cases.new_scaler(kind)
    if state is not None:
        optimizer.load_state_dict(_mapped(state["optimizer"], lambda t: _sharded(t) if t.dim() else t))
        scaler.load_state_dict(state["scaler"])
    return params, optimizer, scaler


def _checkpoint(params: Sequence[Tensor], optimizer: torch.optim.Optimizer, scaler: Any) -> dict[str, Any]:
    def whole(tensor: Tensor) -> Tensor:
        return tensor.full_tensor().detach().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()

    return {
        "params": [whole(param) for param in params],
        "optimizer": _mapped(optimizer.state_dict(), whole),
        "scaler": scaler.state_dict(),
    }


def _mapped(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return nested dicts and lists with every tensor replaced."""
    if isinstance(tree, dict):
        return {key: _mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_mapped(value, function) for value in tree]
    return function(tree) if isinstance(tree, Tensor) else tree


def _sharded(whole: Tensor) -> DTensor:
    return distribute_tensor(whole, cases.line(), [Shard(0)])


def _give_whole(scaler: Any, params: Sequence[Tensor], step: int, bad: bool) -> None:
    factor = scaler.scale(torch.ones(()))
    for index, param in enumerate(params):
        param.grad = _sharded(_whole_grad(index, step, bad) * factor)


# A rank forks once it is in a group and has trained.


def forks(rank: int, variant: Variant) -> tuple[list[str], list[float], bytes]:
    """Fork in mid-training, as a data loader's workers do; the child uses a scaler of its own, the rank goes on.

    Returns: the parameters after every step, the scales, and what the child made of its step.
    """
    scaler, optimizer = _set_up(variant)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, _alone(variant.name))
        os._exit(0)
    digests, scales = [], []
    for step in range(1, cases.STEPS):
        _give(scaler, optimizer, step)
        if (step, rank) == (1, dist.get_world_size() - 1):
            cases.params_of(optimizer)[0].grad[0] = torch.inf
        if variant.unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        digests.append(str([cases.digest(p) for p in cases.params_of(optimizer)]))
        scales.append(scaler.get_scale())
    os.waitpid(child, 0)
    return digests, scales, os.read(read, 100)


def _alone(name: str) -> bytes:
    """Take a step that overflows and a good one, with nobody else; what became of scale and parameters."""
    try:
        signal.alarm(10)  # ends a child that waits for ever
        scaler, params = cases.scaler_class("grad")("cpu", init_scale=8.0), [cases.plain_param(3)]
        optimizer, changed = cases.new_optimizer(name, params), []
        for bad in (True, False):
            before = cases.digest(params[0])
            cases.give_grads(scaler, params, 0)
            params[0].grad *= torch.inf if bad else 1.0
            scaler.step(optimizer)
            scaler.update()
            changed.append(cases.digest(params[0]) != before)
        return f"{scaler.get_scale()} {changed}".encode()
    except Exception as error:
        return cases.described(error).encode()
