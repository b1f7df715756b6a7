"""What does a step's scaler launch, how many bytes does it move, and how many collectives does it take? All by counting.

On a GPU torch.profiler counts. Without one torch's ops are counted by dispatch on the CPU, of which a list's op is one
launch or more, and our kernels by the stub driver. Bytes are in units of the gradients' own: how often they are read or
written. tests/nightly/test_traffic.py counts those of the compiled kernels.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from perf import host_stub, stub_driver
from perf.bench_host import KINDS, clip
from perf.measure import Context, require
from perf.rows import Place, Row
from perf.subjects import SCALE, Gradients, Still, resting_adamw, scalers, sharded

STEPS = 5
RANKS = 2
NUMELS = [1024] * 2000
FEW = [1024] * 10
PART = "of a step's scaler"
# Our launch functions: where each is, and how often its kernel reads or writes a gradient.
KERNELS = {
    "unscale.launch_unscale": 2,
    "unscale.launch_check": 1,
    "norm.launch_sum_of_squares": 1,
    "clip.launch_clip": 2,
    "update_scale.launch_update": 0,
}
# Ops that launch nothing: they allocate, or make a view.
SILENT = ("empty", "detach", "alias", "view", "reshape", "select", "unbind", "squeeze", "expand", "t.", "as_strided")

Step = Callable[[], Any]


def measure(context: Context) -> Iterator[Row]:
    """Yield all rows."""
    if context.device == "cuda":
        yield from by_profiler(NUMELS[:10] if context.quick else NUMELS)
    else:
        yield from by_dispatch()
        yield from host_stub.measure(context, "launches")
    yield from collectives()


def steps(scaler: Any, gradients: Gradients, device: str) -> dict[str, Step]:
    """Return the kinds of steps, each taken a few times, by name."""
    loss = torch.ones((), device=device)

    def run(optimizer: Any, clips: bool) -> None:
        scaler.scale(loss)
        if clips:
            clip(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()

    found = {}
    for kind, fused in KINDS.items():
        for clips in (False, True):
            step = partial(run, resting_adamw(gradients.parameters, fused=fused), clips)
            for _ in range(3):
                step()
            found[f"{kind}{', clip' * clips}"] = step
    return found


def by_profiler(numels: list[int]) -> Iterator[Row]:
    """Count what the GPU was given, of both scalers."""
    gradients = Gradients(numels, device="cuda")
    counted: dict[str, dict[str, Mapping[str, float]]] = {}
    for name, scaler in scalers("cuda").items():
        for case, step in steps(scaler, gradients, "cuda").items():
            counted.setdefault(case, {})[name] = profiled(step)
    for case, of in counted.items():
        for metric in of["ours"]:
            yield from Place("launches", PART, case).counts(metric, {name: count[metric] for name, count in of.items()})


def profiled(step: Step) -> dict[str, float]:
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
    require(launches, "torch.profiler saw nothing of the GPU's work: may it look here?")
    waits = sum(event.name in ("cudaStreamSynchronize", "cudaEventSynchronize") for event in events)
    return {"launches": launches / STEPS, "copies": copies / STEPS, "waits": waits / STEPS}


class Ops(TorchDispatchMode):
    """Counts launches, copies and host reads of one call, and how often it reads or writes the gradients' bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self.counts, self.moved = size, dict.fromkeys(("launches", "copies", "waits"), 0), 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one op."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense":
            self.counts["copies"] += 1
            self.counts["waits"] += 1
        elif name == "_to_copy" and result.dtype is args[0].dtype:
            self.counts["copies"] += 1
        elif not f"{name}.".startswith(SILENT):
            self.counts["launches"] += 1
            first = args[0] if args and isinstance(args[0], list) else []
            written = func._schema.arguments[0].alias_info if first else None
            share = sum(each.nbytes for each in first if isinstance(each, Tensor)) / self._size
            self.moved += round(share) * (2 if written is not None and written.is_write else 1)
        return result


def by_dispatch() -> Iterator[Row]:
    """Count the ops of torch's scaler, and of its clipping."""
    gradients = Gradients(FEW)
    for case, step in steps(scalers("cpu")["torch"], gradients, "cpu").items():
        with Ops(gradients.values.nbytes) as seen:
            step()
        place = Place("launches", PART, case)
        for metric, count in {**seen.counts, "gradient bytes": seen.moved}.items():
            yield from place.counts(metric, {"torch": count})


def by_kernels() -> Iterator[Row]:
    """Count our kernels, in a process that has the stub driver."""
    gradients = Gradients(FEW)
    found = steps(scalers("cpu", backend="triton")["ours"], gradients, "cpu")
    for case, step in found.items():
        called: list[str] = []
        before = stub_driver.launches()
        with ExitStack() as stack, Ops(gradients.values.nbytes) as seen:
            for name in KERNELS:
                stack.enter_context(noted(name, called))
            step()
        launched = stub_driver.launches() - before
        # The sum of squares is two: a pass, and one program that adds what it left.
        require(launched == len(called) + called.count("norm.launch_sum_of_squares"), f"{case}: {launched}, {called}")
        place = Place("launches", PART, case)
        yield from place.counts("launches", {"ours": launched + seen.counts["launches"]})
        yield from place.counts("gradient bytes", {"ours": sum(KERNELS[name] for name in called)})
    (gradients, before) = Gradients(NUMELS), stub_driver.launches()
    scaler = scalers("cpu", backend="triton")["ours"]
    scaler.unscale_(Still(gradients.parameters))
    launched = stub_driver.launches() - before
    yield from Place("launches", "of unscale_", "2000 x 1k").counts("launches", {"ours": launched})


def noted(name: str, called: list[str]) -> Any:
    """Return a patch of one of our launch functions that notes its name."""
    import importlib

    module_name, function_name = name.split(".")
    module = importlib.import_module(f"scaler_triton.kernels.{module_name}")
    original = getattr(module, function_name)

    def run(*args: Any, **kwargs: Any) -> None:
        called.append(name)
        original(*args, **kwargs)

    return mock.patch.object(module, function_name, run)


def collectives() -> Iterator[Row]:
    """Count the collectives of a rank that holds shards; nothing is sent, as a group of pretended ranks allows."""
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        counted: dict[str, dict[str, float]] = {}
        for name, scaler in scalers("cpu", scale=SCALE).items():
            for case, step in steps(scaler, Gradients(FEW, wrap=sharded(mesh)), "cpu").items():
                with CommDebugMode() as seen:
                    step()
                counted.setdefault(case, {})[name] = seen.get_total_counts()
                require(counted[case][name], f"{case}: {name} has asked no other rank")
        for case, of in counted.items():
            yield from Place("launches", f"of DTensors on {RANKS} ranks", case).counts("collectives", of)
    finally:
        dist.destroy_process_group()
