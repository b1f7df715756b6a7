"""What the cases of several ranks are made of: meshes, parameters, gradients, a training loop, and its report.

A case is a function of a rank that stands in the file of its tests. The pool's ranks import that file by its name. Set
RANKS_ON=cuda to run the cases on the GPU, which the ranks share, or on a GPU each where there are as many, and
RANKS_OVER=nccl to have these meet over NCCL.
"""

import functools
import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers import params_of
from rank_pool import BACKEND
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode

from scaler_triton import GradScaler, ShardedGradScaler, StepGuard

DEVICE = os.environ.get("RANKS_ON", "cpu")
GLOO_ON_GPU = DEVICE == "cuda" and BACKEND == "gloo"
# Before 2.13 torch has it on the CPU only.
FUSED_ADAGRAD = ["adagrad-fused"] if DEVICE == "cpu" or torch.__version__ >= "2.13" else []

INIT_SCALE = 8.0
GROWTH_INTERVAL = 2
SIGMA, WINDOW = 6.0, 4  # of guards
LEARNING_RATE = 2.0**-4
STEPS = 4

KINDS = pytest.mark.parametrize("kind", ["grad", "sharded"])
METHODS = pytest.mark.parametrize("method", ["unscale_", "step"])
NAMES = pytest.mark.parametrize("name", ["adamw", "adamw-fused"])
UNSCALE = pytest.mark.parametrize("unscale", [False, True], ids=["implicit", "unscale_"])

# Warnings of others that a case may meet; everything else is an error, in the ranks as in the tests.
IGNORED_WARNINGS = [
    # torch announces that FSDP1's NO_SHARD goes away in favour of DDP; it is tested as long as it exists.
    (r"The `NO_SHARD` sharding strategy is deprecated", FutureWarning),
    # An in-place op on the view that a tensor-parallel layer returns would hurt; there is none here.
    (r"FSDP2-wrapped module .* returned a view tensor", UserWarning),
    # Of the first CSR tensor in a process; the scaler refuses it.
    (r"Sparse CSR tensor support is in beta", UserWarning),
    # torch 2.10's own checkpoints use them.
    (r"TypedStorage is deprecated", UserWarning),
    # torch 2.11 says once that it trusts a sparse tensor's indices.
    (r"Sparse invariant checks are implicitly disabled", UserWarning),
    # torch's step() announces the end of optimizers that take the scaler (apex, TransformerEngine).
    (r"GradScaler is going to stop passing itself", FutureWarning),
    # torch's autograd says so of FSDP1's NO_SHARD on a GPU.
    (r"The AccumulateGrad node's stream does not match", UserWarning),
    # torch 2.11's pipelining, once a process: its backward is the first of a thread that calls cuBLAS.
    (r"Attempting to run cuBLAS, but there was no current CUDA context", UserWarning),
    # torch.compile says so on the very first release of Python 3.13.
    (r"Guards may run slower on Python 3\.13\.0", RuntimeWarning),
    # Some cases step AdamW over fp16 parameters, by gradients that are large enough for that.
    (r"\[ST03\]", UserWarning),
]


def strictly(rank: int, case: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run a case with every warning an error, except for those listed above; its tensors are on DEVICE."""
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.cuda.init()  # else meshes warn that no device was chosen
        if GLOO_ON_GPU:
            _gather_on_gpu()
    with warnings.catch_warnings(), torch.device(DEVICE):
        warnings.simplefilter("error")
        for message, category in IGNORED_WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=category)
        return case(rank, *args, **options)


@functools.cache
def _gather_on_gpu() -> torch.library.Library:
    """Have DTensors gathered by a collective that gloo has for a GPU: with the usual one it reads the host's memory."""

    def gather(local: Tensor, world_size: int, group: str) -> Tensor:
        whole = local.new_empty(local.shape[0] * world_size, *local.shape[1:])
        _resolve_process_group(group)._allgather_base(whole, local.contiguous()).wait()
        return whole

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", gather, "CUDA")
    return library  # which holds for as long as it is kept


# Scalers, optimizers, and what they hold.


OURS = {"grad": GradScaler, "sharded": ShardedGradScaler}
TORCHS = {"grad": torch.amp.GradScaler, "sharded": TorchSharded}


def new_scaler(kind: str, classes: dict[str, Any] = OURS, **options: Any) -> Any:
    """Make a scaler with the tests' settings: "sharded", "grad", "world", which is "grad" for everybody, or "guard"."""
    if kind == "guard":
        return StepGuard(DEVICE, **{"spike_sigma": SIGMA, "window": WINDOW} | options)
    if kind == "world":
        kind, options = "grad", {"process_group": dist.group.WORLD} | options
    options = {"device": DEVICE, "init_scale": INIT_SCALE, "growth_interval": GROWTH_INTERVAL} | options
    return classes[kind](**options)


def new_optimizer(name: str, params: Iterable[Any]) -> torch.optim.Optimizer:
    """Make an optimizer from a name such as "adamw" or "sgd-fused"."""
    kind, _, variant = name.partition("-")
    classes = {each.__name__.lower(): each for each in vars(torch.optim).values() if isinstance(each, type)}
    return classes[kind](list(params), lr=LEARNING_RATE, **({variant: True} if variant else {}))


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def values_of(tensor: Tensor) -> Tensor:
    """What this rank stores of a tensor, whatever its layout; shares its memory."""
    local = local_of(tensor.detach())
    if local.layout is torch.sparse_coo:
        return local._values()
    return local.values() if local.layout is torch.sparse_csr else local


def numbers(tensor: Tensor) -> list[float]:
    return values_of(tensor).flatten().tolist()


def digest(tensor: Tensor) -> str:
    """A short name for the local values, bit by bit."""
    flat = values_of(tensor).cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def digests(tensors: Iterable[Tensor]) -> list[str]:
    return [digest(tensor) for tensor in tensors]


def drawn(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers by a generator of the CPU, on DEVICE: the same on each."""
    return torch.randn(shape, generator=generator, dtype=dtype, device="cpu").to(DEVICE)


def this_device() -> torch.device:
    """The device of this rank, with its index."""
    return torch.ones(()).device


def windows(scaler: Any) -> list[list[float]]:
    """The norms that a guard remembers, of each window; none of another scaler."""
    fields = scaler.state_dict().get("scaler_triton", {})
    return fields.get("windows", [])


# Meshes and parameters by hand: exact, and without a model.


@functools.cache
def mesh(shape: tuple[int, ...], names: tuple[str, ...], order: tuple[int, ...] | None = None) -> DeviceMesh:
    """A mesh over the whole world, made once a process: making one costs process groups."""
    if order is None:
        return init_device_mesh(DEVICE, shape, mesh_dim_names=names)
    # torch 2.11 takes ranks from the CPU only, and the default device may be the GPU.
    return DeviceMesh(DEVICE, torch.tensor(order, device="cpu").reshape(shape), mesh_dim_names=names)


def square() -> DeviceMesh:
    """The 2 x 2 mesh of the tests with four ranks."""
    return mesh((2, 2), ("dp", "tp"))


def line() -> DeviceMesh:
    return mesh((dist.get_world_size(),), ("dp",))


def _experts() -> DeviceMesh:
    return mesh((2, 2), ("ep", "efsdp"), (0, 2, 1, 3))


def plain_param(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return nn.Parameter(torch.ones(shape, dtype=dtype))


def dtensor_param(on: DeviceMesh, placements: Sequence[Placement], dtype: torch.dtype = torch.float32) -> Tensor:
    """A distributed parameter whose local part is 2 x 3 on every rank."""
    return nn.Parameter(placed(torch.ones(2, 3, dtype=dtype), *placements, on=on))


def placed(local: Tensor, *placements: Placement, on: DeviceMesh | None = None) -> DTensor:
    """A DTensor of this local part, on the line unless another mesh is given."""
    return DTensor.from_local(local, on or line(), list(placements), run_check=False)


def sharded_param() -> Tensor:
    return dtensor_param(line(), [_S0])


def agreeing_params(kind: str) -> list[Tensor]:
    """Parameters that make the ranks agree: any for the sharded scaler, DTensors for the other."""
    return [plain_param(3)] if kind == "sharded" else [sharded_param(), sharded_param()]


_R, _S0, _S1 = Replicate(), Shard(0), Shard(1)

LAYOUTS: dict[str, Callable[[], list[Tensor]]] = {
    "plain": lambda: [plain_param(3), plain_param(2, 2)],
    "line-shards": lambda: [sharded_param(), sharded_param()],
    "line-replicated-first": lambda: [dtensor_param(line(), [_R]), sharded_param()],
    "line-replicated-last": lambda: [sharded_param(), dtensor_param(line(), [_R])],
    "line-dtypes": lambda: [
        dtensor_param(line(), [_S0], dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)
    ],
    "line-beside-plain": lambda: [sharded_param(), plain_param(3)],
    "plain-beside-line": lambda: [plain_param(3), sharded_param()],
    "line-beside-plain-double": lambda: [sharded_param(), plain_param(3, dtype=torch.float64)],
    "square-shards": lambda: [dtensor_param(square(), [_S0, _S1]) for _ in range(2)],
    "square-replicated-first": lambda: [dtensor_param(square(), each) for each in ([_R, _R], [_S0, _S1])],
    "square-half-replicated-first": lambda: [dtensor_param(square(), each) for each in ([_S0, _R], [_S0, _S1])],
    "hsdp": lambda: [dtensor_param(square(), [_R, _S0]) for _ in range(2)],
    # A norm is sharded over dp alone, a linear layer over dp and tp: two meshes of one root.
    "fsdp-then-tp": lambda: [dtensor_param(square()["dp"], [_S0]), dtensor_param(square(), [_S0, _S1])],
    "two-slices": lambda: [dtensor_param(square()["dp"], [_S0]), dtensor_param(square()["tp"], [_S0])],
    # Dense layers over a line, experts over another mesh of the same ranks.
    "expert-parallel": lambda: [sharded_param(), dtensor_param(_experts(), [_S0, _S1])],
    # The experts know only their own fsdp dim: a 1-D slice of another root.
    "expert-parallel-slice": lambda: [dtensor_param(_experts()["efsdp"], [_S0]), sharded_param()],
}


# Gradients and faults.


@dataclass(frozen=True)
class Fault:
    """At one step, after backward, one element of one rank's local gradient becomes `value`."""

    step: int
    rank: int
    param: int = 0
    value: float = float("inf")


def give_grads(scaler: Any, params: Sequence[Tensor], step: int, without: Iterable[int] = ()) -> None:
    """Set gradients as a backward pass of a scaled loss would: powers of two, so that all is exact."""
    factor = scaler.scale(torch.ones(())).item()
    for index, param in enumerate(params):
        param.grad = None if index in without else grad_like(param, 2.0 ** (step - index - 3) * factor)


def giving(scaler: Any, params: Sequence[Tensor], without: Iterable[int] = ()) -> Callable[[int], None]:
    return lambda step: give_grads(scaler, params, step, without)


def grad_like(param: Tensor, value: float) -> Tensor:
    grad = torch.full_like(local_of(param).detach(), value)
    return placed(grad, *param.placements, on=param.device_mesh) if isinstance(param, DTensor) else grad


def plant(faults: Iterable[Fault], rank: int, step: int, params: Sequence[Tensor]) -> None:
    """Write this step's faults into this rank's gradients, those that have local elements."""
    held = [v for param in params if param.grad is not None and (v := values_of(param.grad)).numel() > 0]
    for fault in faults:
        if (fault.rank, fault.step) == (rank, step):
            held[fault.param].view(-1)[0] = fault.value


# What a call does, seen from outside.


class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives that reach torch's dispatcher, plain (c10d) and functional, in this thread."""

    NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
    NOT_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # DTensor runs first and turns into the collectives that we count
        namespace, _, op = func._schema.name.partition("::")
        self.count += namespace in self.NAMESPACES and op not in self.NOT_COLLECTIVES
        return func(*args, **(kwargs or {}))


class FirstOpFails(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs out of memory in the first op of a call; the ops after it run."""

    raised = False

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if not self.raised:
            self.raised = True
            raise torch.OutOfMemoryError("out of memory")
        return func(*args, **(kwargs or {}))


def counted(fn: Callable[..., Any], *args: Any) -> tuple[int, Exception | None]:
    """Call `fn`; how many collectives it cost, and what it raised."""
    with CollectiveCounter() as counter:
        try:
            fn(*args)
        except Exception as error:
            return counter.count, error
    return counter.count, None


def collectives_of(fn: Callable[..., Any], *args: Any) -> int:
    count, error = counted(fn, *args)
    if error is not None:
        raise error
    return count


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def said(fn: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Call `fn`; the error that it raised, "" if none."""
    try:
        fn(*args, **options)
    except Exception as error:
        return described(error)
    return ""


class Attempt(NamedTuple):
    """One call: what it raised, what it cost, what became of gradients, parameters and stage."""

    error: str | None
    collectives: int
    grads_changed: bool
    params_changed: bool
    stage: str


def attempt(scaler: Any, method: str, optimizer: torch.optim.Optimizer) -> Attempt:
    """Call a method of the scaler and look at everything it must leave alone when it raises."""
    params = params_of(optimizer)
    before = digests(params), digests(p.grad for p in params if p.grad is not None)
    count, error = counted(getattr(scaler, method), optimizer)
    return Attempt(
        error=None if error is None else described(error),
        collectives=count,
        grads_changed=digests(p.grad for p in params if p.grad is not None) != before[1],
        params_changed=digests(params) != before[0],
        stage=scaler._per_optimizer_states[id(optimizer)]["stage"].name,
    )


# The training loop.


@dataclass(frozen=True)
class Report:
    """What a run left on one rank; the lists but the last run over the steps."""

    scales: list[str] = field(default_factory=list)  # as hex: compared bit by bit
    trackers: list[int] = field(default_factory=list)
    stepped: list[bool | None] = field(default_factory=list)  # None: no local gradient to tell by
    collectives: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # of a tolerant run, as "Type: text", else ""
    step_counts: list[float] = field(default_factory=list)  # of the optimizer's parameters
    finite: bool = True
    windows: list[list[float]] = field(default_factory=list)  # of a guard


def train(
    rank: int,
    scaler: Any,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[int], None],
    faults: Iterable[Fault] = (),
    *,
    steps: int = STEPS,
    unscale: bool = False,
    after_unscale: Callable[[], None] = lambda: None,  # clips as torch does, say: its collectives do not count
    clip: Callable[[torch.optim.Optimizer], Any] | None = None,  # by the scaler
    tolerant: bool = False,  # writes an exception down and goes on
) -> Report:
    """Train as a user would and report; `backward(step)` leaves scaled gradients behind."""
    report, params = Report(), params_of(optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        backward(step)
        plant(faults, rank, step, params)
        before = _snapshot(params)
        collectives, error = 0, None
        first = scaler.unscale_ if unscale else clip
        for method in (scaler.step,) if first is None else (first, scaler.step):
            count, error = counted(method, optimizer)
            collectives += count
            if error is not None:
                break
            if method == scaler.unscale_:
                after_unscale()
        if error is not None and not tolerant:
            raise error
        report.collectives.append(collectives)
        report.errors.append("" if error is None else described(error))
        assert collectives_of(scaler.update) == 0
        report.stepped.append(_snapshot(params) != before if before else None)
        report.scales.append(float(scaler.get_scale()).hex())
        report.trackers.append(int(scaler._growth_tracker))
    finite = all(bool(values_of(param).isfinite().all()) for param in params)
    return replace(report, step_counts=step_counts(optimizer), finite=finite, windows=windows(scaler))


def laid_out(rank: int, kind: str, layout: str, name: str, faults: Iterable[Fault], *, unscale: bool = False) -> Report:
    """Train parameters in a named layout."""
    scaler, params = new_scaler(kind), LAYOUTS[layout]()
    # A param group each: fused kernels refuse a DTensor beside a plain parameter.
    optimizer = new_optimizer(name, [{"params": [param]} for param in params])
    return train(rank, scaler, optimizer, giving(scaler, params), faults, unscale=unscale)


def step_counts(optimizer: torch.optim.Optimizer) -> list[float]:
    states = [optimizer.state[param] for param in params_of(optimizer) if param in optimizer.state]
    return sorted({float(state["step"]) for state in states if "step" in state})


def _snapshot(params: Sequence[Tensor]) -> list[str]:
    """The parameters, bit by bit, that have something local to update."""
    return [digest(p) for p in params if p.grad is not None and local_of(p.grad).numel() > 0]


# What must hold of the reports of all ranks.


def scale_model(bad_steps: Iterable[int], steps: int = STEPS) -> tuple[list[str], list[int]]:
    """Scales (as hex) and trackers after each update, from the definition."""
    scale, tracker, scales, trackers = INIT_SCALE, 0, [], []
    for step in range(steps):
        tracker = 0 if step in bad_steps else tracker + 1
        if step in bad_steps:
            scale *= 0.5
        elif tracker == GROWTH_INTERVAL:
            scale, tracker = scale * 2.0, 0
        scales.append(scale.hex())
        trackers.append(tracker)
    return scales, trackers


def assert_agreed(
    reports: Sequence[Report], bad_steps: Sequence[int], collectives: int = 1, steps: int = STEPS, kind: str = ""
) -> None:
    """Every rank skipped the bad steps and took the others, at the right scale, for `collectives` a step."""
    expected = scale_model(bad_steps, steps)
    for rank, report in enumerate(reports):
        if kind == "guard":
            assert report.scales == [(1.0).hex()] * steps, f"scale on rank {rank}"
        else:
            assert (report.scales, report.trackers) == expected, f"scale and tracker on rank {rank}"
        assert report.finite, f"a parameter on rank {rank} is not finite"
        for step, stepped in enumerate(report.stepped):
            assert stepped in (None, step not in bad_steps), f"rank {rank}, step {step}"
        assert report.step_counts in ([], [steps - len(bad_steps)]), f"step count on rank {rank}"
        assert report.collectives == [collectives] * steps, f"collectives on rank {rank}"
