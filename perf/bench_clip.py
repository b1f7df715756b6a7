"""What do unscaling and clipping in one call cost beside torch's two, alone and with a fused step behind them?"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import record_function

from perf import clip_host, shapes
from perf.bench_cpu import GPT2
from perf.bench_host import measure_path, measure_stub
from perf.check import require
from perf.clipping import CLIP, DEFERRED, METRICS, STEP, Clipping, require_right
from perf.compare import DTYPES
from perf.context import Context, Section, Turn
from perf.gpu import ColdClock
from perf.grads import Gradients
from perf.host_cases import Case
from perf.measure import Clock, Effort, Subject, host_clock, interleaved, one_thread
from perf.rows import Row, bandwidth_rows, row, time_rows
from perf.solo import one_rank, sharded
from perf.trace import record

SMALL = {"2000 x 64": [64] * 2000, "2000 x 1k": [1000] * 2000}
LARGE, MOST = 5_000_000, 200  # 1e9 elements where they fit
COPIES = 9  # of all gradients: values, gradients old and new, parameters, two moments, what a check needs
RANKS, SHARDED = 2, 50
STEPS = 5
DEVICE = ", device"
# How often a gradient's bytes are moved: torch unscales (both ways), takes the norm and clips (both ways); ours reads,
# then does the rest both ways. tests/kernels/test_traffic.py counts ours. AdamW reads four tensors and writes three; if
# it clips, it writes the gradient back, too.
MOVES = {
    CLIP: {"torch": 5, "ours": 3},
    STEP: {"torch": 5 + 7, "ours": 3 + 7},
    DEFERRED: {"torch": 5 + 7, "ours": 1 + 7 + 1},
}

Lists = Mapping[str, Sequence[int]]


def sections(context: Context) -> list[Section]:
    """Return the CPU's parts, and the GPU's: its host part over the stub driver where there is none."""
    found = [
        Section("clip, cpu path", lambda: measure_path(context, "cpu", clip_host.measure), Turn.ON_CPU),
        Section("clip, lists on the CPU", lambda: on_cpu(context), Turn.ON_CPU),
        Section("clip, collectives", collectives, Turn.ON_CPU),
    ]
    if context.gpu:
        return [
            Section("clip, lists on the GPU", lambda: on_gpu(context)),
            Section("clip, launches", lambda: launches(context)),
            Section("clip, DTensors on the GPU", lambda: sharded_on_gpu(context)),
            Section("clip, cuda path", lambda: measure_path(context, "cuda", clip_host.measure), Turn.EXPLAINS),
            *found,
        ]
    context.leave_out("unscale + clip of 1e9 elements, alone and with fused AdamW", "needs a GPU")
    return [*found, Section("clip, gpu path over the stub driver", lambda: measure_stub(context, "perf.clip_host"))]


def on_cpu(context: Context) -> Iterator[Row]:
    """Time lists on one thread; fp16 is left out, as plain scalers refuse it."""
    for name, numels in (shapes.FEW if context.quick else SMALL | GPT2).items():
        for dtype in ("fp32", "bf16"):
            with one_thread():
                gradients = Gradients(numels, DTYPES[dtype])
                yield from compared(f"{name} {dtype}, cpu", gradients, context.effort(0.4, 9), {"": host_clock})


def on_gpu(context: Context) -> Iterator[Row]:
    """Time lists on the GPU: its own work, and the wait for it."""
    for name, numels in gpu_lists(context).items():
        yield from compared(
            f"{name} fp32, cuda", Gradients(numels, device="cuda"), context.effort(0.6, 9), gpu_clocks()
        )
        gc.collect()
        torch.cuda.empty_cache()


def sharded_on_gpu(context: Context) -> Iterator[Row]:
    """Time and profile a list of DTensors on the GPU, on a mesh of one rank."""
    with one_rank("cuda") as mesh:
        gradients = Gradients(gpt2(context), device="cuda", wrap=sharded(mesh))
        yield from compared("GPT-2 124M DTensor fp32, cuda", gradients, context.effort(0.6, 9), gpu_clocks())
        for metric in METRICS:
            yield from launched(f"GPT-2 124M DTensor, {metric}", Clipping(gradients, metric))


def gpt2(context: Context) -> list[int]:
    """Return the list that is looked at most closely."""
    return shapes.FEW["10 x 64"] if context.quick else shapes.gpt2()


def gpu_clocks() -> dict[str, Clock]:
    """Return the GPU's clocks, by what their metrics end in."""
    return {DEVICE: ColdClock(device_only=True), ", wall": ColdClock(device_only=False)}


def gpu_lists(context: Context) -> Lists:
    """Return the lists, the largest as long as memory allows."""
    if context.quick:
        return shapes.FEW
    count = min(MOST, torch.cuda.mem_get_info()[0] // (COPIES * 4 * LARGE))
    return {f"{count} x 5M": [LARGE] * count, "GPT-2 124M": shapes.gpt2(), "ViT-L": shapes.vit_large()}


def compared(case: str, gradients: Gradients, effort: Effort, clocks: Mapping[str, Clock]) -> Iterator[Row]:
    """Check and time all of `METRICS` on one list."""
    for metric in METRICS:
        require_right(case, lambda share, metric=metric: Clipping(gradients, metric, share=share))
    alone = Clipping(gradients).subjects()
    for suffix, clock in clocks.items():
        times = interleaved(alone, effort, clock=clock)
        yield from time_rows("clip", case, CLIP + suffix, times)
        if suffix == DEVICE:
            yield from moving_rows(case, gradients.values.nbytes)
            moved = {name: moves * gradients.values.nbytes for name, moves in MOVES[CLIP].items()}
            yield from bandwidth_rows("clip", case, moved, times)
        times = interleaved(stepped(gradients), effort, clock=clock)
        yield from time_rows("clip", case, STEP + suffix, {name: times[name] for name in ("torch", "ours")})
        yield from time_rows("clip", case, DEFERRED + suffix, {"torch": times["torch"], "ours": times["deferred"]})


def moving_rows(case: str, size: int) -> Iterator[Row]:
    """Give how many bytes must be moved for gradients of `size` bytes."""
    for metric, moves in MOVES.items():
        for name, times in moves.items():
            yield row("clip", case, f"{metric}, bytes", name, "GB", [times * size * 1e-9])


def stepped(gradients: Gradients) -> dict[str, Subject]:
    """Return clipping and a step by torch, by us, and by us with the clipping left to the step."""
    deferred = Clipping(gradients, DEFERRED)
    at_once = Clipping(gradients, STEP, optimizer=deferred.optimizer)
    return {**at_once.subjects(), "deferred": deferred.subjects()["ours"]}


def launches(context: Context) -> Iterator[Row]:
    """Count what a clipped step launches on the GPU, copies and waits for, by torch.profiler."""
    for metric in METRICS:
        gradients = Gradients(gpt2(context), device="cuda")
        yield from launched(f"GPT-2 124M, {metric}", Clipping(gradients, metric))


def launched(case: str, clipping: Clipping) -> Iterator[Row]:
    """Profile both scalers' turn."""
    subjects = clipping.subjects()
    counts = {name: record(partial(_marked, subject), STEPS).per_step("scaler") for name, subject in subjects.items()}
    for what in counts["ours"]:
        for name, count in counts.items():
            yield row("clip", case, what, name, "count", [count[what]])


def _marked(subject: Subject) -> None:
    subject.before()
    with record_function("scaler"):
        subject.run()
    subject.after()


def collectives() -> Iterator[Row]:
    """Count the collectives of ranks that hold shards; nothing is sent, as a group of pretended ranks lets it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        case = Case(str(SHARDED), "DTensor", "same addresses", f"{RANKS} ranks", SHARDED)
        mesh = init_device_mesh("cpu", (RANKS,))
        for metric in METRICS:
            for name, subject in clip_host.clipping_of(case, mesh, metric).subjects().items():
                count = _collectives_of(subject)
                require(count, f"{case.name}, {metric}: {name} has asked nobody")
                yield row("clip", f"{case.name}, {metric}", "collectives", name, "count", [count])
    finally:
        dist.destroy_process_group()


def _collectives_of(subject: Subject) -> int:
    from torch.distributed.tensor.debug import CommDebugMode

    subject.before()
    with CommDebugMode() as seen:
        subject.run()
    subject.after()
    return seen.get_total_counts()
