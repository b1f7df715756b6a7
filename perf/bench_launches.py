"""What does a step's scaler launch, how many bytes does it move, how many collectives does it take? All by counting.

On a GPU torch.profiler counts; without one, torch's ops are counted by dispatch, our kernels by the stub driver.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from perf import host_stub, stub_driver
from perf.bench_host import KINDS, clip
from perf.measure import Context, require
from perf.rows import Place, Row
from perf.subjects import Gradients, scalers, sharded, still

STEPS, RANKS = 5, 2
NUMELS = [1024] * 2000
PART = f"of a step's scaler, {len(NUMELS)} gradients"
# How often our kernels read or write a gradient's bytes, as tests/nightly/simulator/test_traffic.py counts in the
# compiled ones; the first writes only where it divides. The others touch none.
MOVES = {"_unscale_kernel": 1, "_sum_squares_kernel": 1, "_clip_kernel": 2}
SILENT = ("empty", "detach", "alias", "view", "reshape", "select", "unbind", "squeeze", "expand", "t.", "as_strided")


def measure(context: Context) -> Iterator[Row]:
    """Yield all rows."""
    if context.device == "cuda":
        yield from by_profiler(NUMELS[:10] if context.quick else NUMELS)
    else:
        yield from by_dispatch()
        yield from host_stub.measure(context, "launches")
    yield from collectives()


def steps(
    name: str, gradients: Gradients, device: str = "cpu", backend: str | None = None
) -> dict[str, Callable[[], Any]]:
    """Return the kinds of steps by name, each taken a few times: steady ones are counted.

    Each kind has a scaler of its own, torch's or ours by `name`, as a program has optimizers of one kind.
    """
    loss, found = torch.ones((), device=device), {}

    def run(scaler: Any, optimizer: Any, clips: bool) -> None:
        scaler.scale(loss)
        if clips:
            clip(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()

    for kind, fused in KINDS.items():
        for clips in (False, True):
            scaler, optimizer = scalers(device, backend=backend)[name], still(gradients.parameters, fused=fused)
            found[f"{kind}{', clip' * clips}"] = partial(run, scaler, optimizer, clips)
    for step in [*found.values()] * 3:
        step()
    return found


def by_profiler(numels: Sequence[int]) -> Iterator[Row]:
    """Count what the GPU was given."""
    gradients = Gradients(numels, device="cuda")
    for name in ("torch", "ours"):
        for case, step in steps(name, gradients, "cuda").items():
            for metric, count in profiled(step).items():
                yield from Place("launches", PART, case).counts(metric, {name: count})


def profiled(step: Callable[[], Any]) -> dict[str, float]:
    """Return how many launches, copies and waits a step makes, by torch.profiler.

    Raises: WrongResult if the profiler sees nothing of the GPU: no launches at all would pass for an answer.
    """
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
            for _ in range(STEPS):
                step()
            torch.cuda.synchronize()
    events = profiler.events() or []
    on_gpu = [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = sum("Memcpy" in name for name in on_gpu)
    launches = sum(not name.endswith((" Sync", " Wait Event")) for name in on_gpu) - copies
    waits = sum(event.name in ("cudaStreamSynchronize", "cudaEventSynchronize") for event in events)
    require(launches, "torch.profiler saw nothing of the GPU's work: may it look here?")
    return {"launches": launches / STEPS, "copies": copies / STEPS, "waits": waits / STEPS}


class Ops(TorchDispatchMode):
    """Counts launches, and how often gradients of `size` bytes are read or written."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self.counts = size, {"launches": 0, "gradient bytes": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one op; views and allocations launch nothing, and a copy to the host or of the same dtype no kernel."""
        result, name = func(*args, **(kwargs or {})), func._schema.name.removeprefix("aten::")
        copies = name == "_local_scalar_dense" or (name == "_to_copy" and result.dtype is args[0].dtype)
        if not copies and not f"{name}.".startswith(SILENT):
            self.counts["launches"] += 1
            if args and isinstance(args[0], list):
                writes = getattr(func._schema.arguments[0].alias_info, "is_write", False)
                size = sum(each.nbytes for each in args[0] if isinstance(each, Tensor))
                self.counts["gradient bytes"] += round(size / self._size) * (2 if writes else 1)
        return result


def by_dispatch() -> Iterator[Row]:
    """Count the ops of torch's scaler, and of its clipping."""
    gradients = Gradients(NUMELS)
    for case, step in steps("torch", gradients).items():
        with Ops(gradients.values.nbytes) as seen:
            step()
        for metric, count in seen.counts.items():
            yield from Place("launches", PART, case).counts(metric, {"torch": count})


def by_kernels() -> Iterator[Row]:
    """Count our kernels, in a process that has the stub driver."""
    gradients = Gradients(NUMELS)
    for case, step in steps("ours", gradients, backend="triton").items():
        before, launch, moves = stub_driver.launches(), import_module("scaler_triton.kernels.launch").Launch, []
        call = launch.__call__

        def counted(self: Any, *args: Any) -> None:
            moves.append(MOVES.get(self._kernel.__name__, 0) + self._options.get("WRITE", False))  # noqa: B023
            call(self, *args)  # noqa: B023

        with Ops(gradients.values.nbytes) as seen, mock.patch.object(launch, "__call__", counted):
            step()
        launched = stub_driver.launches() - before
        require(launched == len(moves), f"{case}: {launched} launches, of which {len(moves)} were seen")
        yield from Place("launches", PART, case).counts("launches", {"ours": launched + seen.counts["launches"]})
        yield from Place("launches", PART, case).counts("gradient bytes", {"ours": sum(moves)})


def collectives() -> Iterator[Row]:
    """Count the collectives of a rank that holds shards."""
    from torch.distributed.tensor.debug import CommDebugMode

    with sharded(RANKS, "cpu") as wrap:
        for name in ("torch", "ours"):
            for case, step in steps(name, Gradients([64] * 10, wrap=wrap)).items():
                with CommDebugMode() as seen:
                    step()
                require(seen.get_total_counts(), f"{case}: {name} has asked no other rank")
                count = {name: seen.get_total_counts()}
                yield from Place("launches", f"of DTensors on {RANKS} ranks", case).counts("collectives", count)
