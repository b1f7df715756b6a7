"""What each case does on every rank: a few lines of ordinary training code, up to one bad step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from math import inf

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

from scaler_triton.demo.scalers import Scalers
from scaler_triton.placement import local_tensor

START = 8.0  # the scale before the step: 4 after one backoff
RANKS = 2


@dataclass(frozen=True)
class Outcome:
    """What one rank holds after a case.

    Args:
        scale: the scale.
        before: a hash of this rank's own parameters before the step that counts.
        after: the same hash after it.
        finite: whether its parameters are free of NaN and Inf.
        had_grads: whether there was anything to step with.
    """

    scale: float
    before: str
    after: str
    finite: bool = True
    had_grads: bool = True

    @property
    def stepped(self) -> bool:
        """Whether this rank's parameters changed."""
        return self.before != self.after


class Watch:
    """Looks at the parameters now, and again at the outcome."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._before = self._hash()

    def outcome(self, scaler: GradScaler) -> Outcome:
        """Return what became of the parameters and the scale."""
        finite = all(bool(local_tensor(p.detach()).isfinite().all()) for p in self._parameters)
        had_grads = any(p.grad is not None for p in self._parameters)
        return Outcome(scaler.get_scale(), self._before, self._hash(), finite, had_grads)

    def _hash(self) -> str:
        values = [local_tensor(p.detach()).contiguous().numpy().tobytes() for p in self._parameters]
        return sha256(b"".join(values)).hexdigest()[:8]


def fsdp1_fused(rank: int, scalers: Scalers) -> Outcome:
    """FSDP1, a fused AdamW, the plain recipe; one element of rank 0's gradient shard is inf."""
    model = _fsdp1_model()
    optimizer = AdamW(model.parameters(), fused=True)
    scaler = _sharded(scalers)
    watch = Watch(list(model.parameters()))

    _backward(scaler, model(torch.ones(2, 4)).sum())
    if rank == 0:
        _spoil(model)
    scaler.step(optimizer)
    scaler.update()
    return watch.outcome(scaler)


def fused_clip(rank: int, scalers: Scalers) -> Outcome:
    """FSDP1, fused SGD, the clipping recipe; both ranks' shards overflow."""
    model = _fsdp1_model()
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    scaler = _sharded(scalers)
    watch = Watch(list(model.parameters()))

    _backward(scaler, model(torch.ones(2, 4)).sum())
    _spoil(model)
    scaler.unscale_(optimizer)
    model.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
    return watch.outcome(scaler)


def fused_adam_unscale(rank: int, scalers: Scalers) -> Outcome:
    """A fused AdamW and the clipping recipe, as in HF Trainer's defaults; all gradients are good."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = AdamW([weight], fused=True)
    scaler = _sharded(scalers)
    watch = Watch([weight])

    _backward(scaler, weight.sum())
    scaler.unscale_(optimizer)
    clip_grad_norm_([weight], 1.0)
    scaler.step(optimizer)
    scaler.update()
    return watch.outcome(scaler)


def tp_first_replicated(rank: int, scalers: Scalers) -> Outcome:
    """Tensor parallel: the first parameter is replicated, the second sharded and bad on rank 1 only."""
    mesh = init_device_mesh("cpu", (RANKS,))
    norm = _dtensor(mesh, Replicate())
    weight = _dtensor(mesh, Shard(0), bad=rank == 1)
    return _plain_step(scalers, [norm, weight])


def dtensor_beside_plain(rank: int, scalers: Scalers) -> Outcome:
    """A sharded parameter, bad on rank 1, and a plain one (FSDP2's ignored_params) in one optimizer."""
    mesh = init_device_mesh("cpu", (RANKS,))
    sharded = _dtensor(mesh, Shard(0), bad=rank == 1)
    plain = nn.Parameter(torch.ones(4))
    plain.grad = torch.full((4,), START)
    return _plain_step(scalers, [sharded, plain])


def rank_without_grads(rank: int, scalers: Scalers) -> Outcome:
    """A fused AdamW; rank 0 got no gradients (an unused layer), rank 1 got bad ones."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = AdamW([weight], fused=True)
    scaler = _sharded(scalers)
    watch = Watch([weight])

    scaler.scale(torch.ones(()))
    if rank == 1:
        weight.grad = torch.full((4,), inf)
    scaler.step(optimizer)
    scaler.update()
    return watch.outcome(scaler)


def rank_without_grads_dtensor(rank: int, scalers: Scalers) -> Outcome:
    """Sharded experts: rank 0's got no tokens and so no gradients, rank 1's got bad ones."""
    mesh = init_device_mesh("cpu", (RANKS,))
    experts = _dtensor(mesh, Shard(0), bad=True)
    if rank == 0:
        experts.grad = None
    return _plain_step(scalers, [experts])


def scale_to_inf(rank: int, scalers: Scalers) -> Outcome:
    """The largest power of two as scale, and every step good: the scale cannot grow any further."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = SGD([weight], lr=0.1)
    scaler = scalers.sharded(device="cpu", init_scale=2.0**127, growth_interval=1)
    for _ in range(2):
        watch = Watch([weight])
        optimizer.zero_grad()
        _backward(scaler, (weight * 2.0**-10).sum())
        scaler.step(optimizer)
        scaler.update()
    return watch.outcome(scaler)


def tracker_past_interval(rank: int, scalers: Scalers) -> Outcome:
    """Five good steps, then the growth interval is lowered to three: growth is due, and due again."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = SGD([weight], lr=0.1)
    scaler = scalers.plain(device="cpu", init_scale=START, growth_interval=10)
    watch = Watch([weight])
    for step in range(9):
        if step == 5:
            scaler.set_growth_interval(3)
        optimizer.zero_grad()
        _backward(scaler, weight.sum())
        scaler.step(optimizer)
        scaler.update()
    return watch.outcome(scaler)


def failed_step(rank: int, scalers: Scalers) -> Outcome:
    """The optimizer runs out of memory once, and the loop drops that batch; the gradients of the next one overflow."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = SGD([weight], lr=0.1)
    scaler = scalers.plain(device="cpu", init_scale=START)
    watch = Watch([weight])
    full = optimizer.register_step_pre_hook(_run_out_of_memory)
    for factor in (1.0, inf):
        optimizer.zero_grad()
        _backward(scaler, (weight * factor).sum())
        try:
            scaler.step(optimizer)
        except torch.OutOfMemoryError:
            full.remove()
            continue
        scaler.update()
    return watch.outcome(scaler)


def fused_then_plain(rank: int, scalers: Scalers) -> Outcome:
    """Two optimizers, the first of them fused; all gradients are good."""
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    fused, plain = AdamW([first], fused=True), SGD([second], lr=0.1)
    scaler = _sharded(scalers)
    watch = Watch([first, second])

    _backward(scaler, (first * second).sum())
    scaler.step(fused)
    scaler.step(plain)
    scaler.update()
    return watch.outcome(scaler)


def _sharded(scalers: Scalers) -> GradScaler:
    return scalers.sharded(device="cpu", init_scale=START)


def _fsdp1_model() -> FullyShardedDataParallel:
    torch.manual_seed(0)
    return FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))


def _backward(scaler: GradScaler, loss: Tensor) -> None:
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def _run_out_of_memory(*args: object) -> None:
    raise torch.OutOfMemoryError("no memory for the optimizer's state")


def _spoil(model: nn.Module) -> None:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    grads[0].view(-1)[0] = inf


def _dtensor(mesh: DeviceMesh, placement: Placement, *, bad: bool = False) -> nn.Parameter:
    """Return a parameter and its gradient, of four elements on this rank; `bad` puts an inf into this rank's part."""
    put = partial(DTensor.from_local, device_mesh=mesh, placements=[placement])
    parameter = nn.Parameter(put(torch.ones(4)))
    grad = torch.full((4,), START)
    grad[0] = inf if bad else START
    parameter.grad = put(grad)
    return parameter


def _plain_step(scalers: Scalers, parameters: list[nn.Parameter]) -> Outcome:
    """Take one step of a GradScaler and a plain SGD on gradients that are already there."""
    optimizer = SGD(parameters, lr=0.1)
    scaler = scalers.plain(device="cpu", init_scale=START)
    watch = Watch(parameters)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    return watch.outcome(scaler)
