"""Is a whole training step with our scaler cheaper than with torch's, and how near is it to one without a scaler?"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from perf import models
from perf.check import require, same_bits
from perf.context import Context, Section, Turn
from perf.gpu import ColdClock
from perf.measure import Effort, Subject, interleaved, one_thread
from perf.models import adamw, tokens, transformer
from perf.rows import FARTHER, Row, row, time_rows
from perf.solo import one_rank
from perf.trace import idle_gaps, record
from perf.training import (
    BLOCK,
    SCALE,
    Loop,
    repeated_addresses,
    require_equal_unscaling,
    require_no_skips,
    timed_steps,
)
from scaler_triton.demo.model import ModelSize

PROFILED = 8  # steps
PROFILED_LONG = 3  # steps of tens of thousands of events, each
LEAST, LEAST_LONG = 4, 3  # rounds
TICK = 0.1  # us; no idle time is known to be shorter
WORDS = 1000  # where the vocabulary does not matter
QUICK = ModelSize(layers=1, width=32, heads=2, context=16)
SMALL = ModelSize(layers=4, width=64, heads=4, context=64)
MIDDLE = ModelSize(layers=12, width=768, heads=12, context=256)
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "fused": {"fused": True}}


def sections(context: Context) -> list[Section]:
    """Return every kind of training on a GPU, and small ones on the CPU."""
    if context.gpu:
        return [
            *(
                Section(f"step, GPT-2, batch {size}, {kind}", partial(gpt2, context, size, kind))
                for size in ((1, 4) if context.quick else (1, 32))
                for kind in KINDS
            ),
            Section("step, LoRA", lambda: lora(context)),
            Section("step, FSDP2", lambda: fsdp2(context)),
            Section("step, CPU offload", lambda: offload(context)),
            Section("step, captured", lambda: captured(context), Turn.CAPTURES),
        ]
    for what in ("GPT-2 124M", "LoRA on 8B", "FSDP2 of 1500 parameters", "captured", "CPU offload"):
        context.leave_out(f"whole step, {what}", "needs a GPU")
    return [
        Section("step, small transformer", lambda: one_threaded(small(context))),
        Section("step, small FSDP2", lambda: one_threaded(fsdp2(context, "cpu"))),
    ]


def effort(context: Context, least: int = LEAST) -> Effort:
    """Return how long to train with each model; a round is a block of steps with each scaler."""
    return context.effort(6.0 if context.gpu else 4.0, least)


def measured(case: str, loop: Loop, effort: Effort, profiled: int = PROFILED) -> Iterator[Row]:
    """Check a loop's unscaling, then time its steps; on a GPU also profile a few."""
    require_equal_unscaling(case, loop)
    for metric, times in timed_steps(loop, effort).items():
        yield from time_rows("step", case, metric, times)
    if loop.device == "cuda":
        yield from idle(case, loop, profiled)
    yield row("step", case, "addresses repeated", "share", "ratio", repeated_addresses(loop, BLOCK))
    require_no_skips(case, loop)


def idle(case: str, loop: Loop, steps: int) -> Iterator[Row]:
    """Profile a few steps with each scaler: for how long is the GPU idle after the backward pass?"""
    gaps = {}
    for name, scaler in loop.scalers.items():
        found = idle_gaps(record(partial(loop.step, scaler), steps))
        gaps[name] = [max(us, TICK) * 1e-6 for us in found]
        require(gaps[name], f"{case}: the profiler saw no step of {name}")
    shortest = min(map(len, gaps.values()))
    yield from time_rows("step", case, "idle", {name: values[:shortest] for name, values in gaps.items()})
    yield row("step", case, "idle", FARTHER, "ratio", [farther(gaps)])


def farther(gaps: Mapping[str, Sequence[float]]) -> float:
    """Return how far ours is from none, over how far torch's is."""
    none, theirs, ours = (median(gaps[name]) for name in ("none", "torch", "ours"))
    return abs(ours - none) / max(abs(theirs - none), TICK * 1e-6)


def one_threaded(rows: Iterable[Row]) -> Iterator[Row]:
    """Give rows that are measured with one thread."""
    with one_thread():
        found = list(rows)
    yield from found


def small(context: Context) -> Iterator[Row]:
    """A transformer that trains in milliseconds on the CPU."""
    batch = tokens(4, models.SMALL_SIZE.context, models.SMALL_WORDS, "cpu")
    for kind in KINDS:
        model = transformer(models.SMALL_SIZE, models.SMALL_WORDS, "cpu")
        loop = Loop(model, adamw(model.parameters(), **KINDS[kind]), batch)
        yield from measured(f"small transformer, cpu, {kind} AdamW", loop, effort(context))


def gpt2(context: Context, size: int, kind: str) -> Iterator[Row]:
    """GPT-2 124M with a small batch, launched one by one, or a large one, which keeps the GPU busy."""
    shape, words = (QUICK, WORDS) if context.quick else (models.GPT2_SIZE, models.GPT2_WORDS)
    model = transformer(shape, words, "cuda")
    batch = tokens(size, shape.context, words, "cuda")
    loop = Loop(model, adamw(model.parameters(), **KINDS[kind]), batch)
    yield from measured(f"GPT-2 124M, batch {size}, {kind} AdamW", loop, effort(context))


def lora(context: Context, device: str = "cuda") -> Iterator[Row]:
    """LoRA on Llama-3 8B in fp16; the optimizer holds the frozen parameters, too."""
    small = {"layers": 1, "width": 256, "key_width": 128, "mlp": 256, "words": 100}
    size = small if context.quick else {}
    torch.manual_seed(0)
    with torch.device(device):
        model = models.LoraLlama(**size)
    batch = tokens(1, 16 if context.quick else 1024, model.words.num_embeddings, device)
    loop = Loop(model, adamw(model.parameters(), fused=True), batch)
    yield from measured("LoRA on 8B, fused AdamW", loop, effort(context, LEAST_LONG), PROFILED_LONG)


def fsdp2(context: Context, device: str = "cuda") -> Iterator[Row]:
    """FSDP2 with 1500 DTensor parameters, fused AdamW and clipping, on one rank; on the CPU a small one."""
    full = SMALL if device == "cpu" else ModelSize(136, 256, 4, 256)
    size = QUICK if context.quick else full
    with one_rank(device) as mesh:
        model = transformer(size, WORDS, device)
        shard(model, mesh=mesh)
        loop = Loop(model, adamw(model.parameters(), fused=True), tokens(4, size.context, WORDS, device), clip=True)
        count = len(list(model.parameters()))
        where = ", cpu" if device == "cpu" else ""
        case = f"FSDP2 of {count} parameters{where}, fused AdamW, clip"
        yield from measured(case, loop, effort(context, LEAST_LONG), PROFILED_LONG)


def offload(context: Context) -> Iterator[Row]:
    """FSDP2 whose parameters, gradients and optimizer live on the CPU."""
    size = QUICK if context.quick else MIDDLE
    with one_rank("cuda") as mesh:
        model = transformer(size, WORDS, "cpu")
        shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
        loop = Loop(model, adamw(model.parameters(), fused=True), tokens(4, size.context, WORDS, "cuda"))
        yield from measured("CPU offload, fused AdamW", loop, effort(context))


def shard(model: Any, **options: Any) -> None:
    """Shard each block, then the rest."""
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def captured(context: Context, device: str = "cuda") -> Iterator[Row]:
    """A whole step in a CUDA graph, with every scaler that can be captured."""
    size, batch = (QUICK, 1) if context.quick else (MIDDLE, 32)
    model = transformer(size, WORDS, device)
    optimizer = adamw(model.parameters(), fused=True, capturable=device == "cuda")
    loop = Loop(model, optimizer, tokens(batch, size.context, WORDS, device))
    require_equal_unscaling("captured", loop)
    subjects = {}
    for name, scaler in loop.scalers.items():
        try:
            subjects[name] = Subject(replay_of(loop, scaler))
        except Exception as error:
            reason = (str(error) or "no text").splitlines()[0]
            context.leave_out(f"captured step, {name}", f"{type(error).__name__}: {reason}")
    require_skips(loop, subjects)
    times = interleaved(subjects, effort(context), clock=ColdClock(device_only=False))
    yield from time_rows("step", f"{size.layers} layers, batch {batch}, captured", "step", times)
    require_no_skips("captured", loop)


def replay_of(loop: Loop, scaler: Any) -> Callable[[], None]:
    """Capture a whole step, warmed up on a side stream; return what replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            loop.step(scaler)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.step(scaler)
    return graph.replay


def require_skips(loop: Loop, subjects: Mapping[str, Subject]) -> None:
    """Raise WrongResult unless a replay skips the step and backs off when the gradients are NaN."""
    first, last = (list(loop.model.parameters())[index] for index in (0, -1))
    kept = first.detach().clone(), last.detach().clone()
    for name in [name for name in subjects if name != "none"]:
        scaler = loop.scalers[name]
        first.detach().fill_(float("nan"))
        subjects[name].run()
        first.detach().copy_(kept[0])
        require(same_bits(last, kept[1]), f"captured: {name} took a step that it had to skip")
        require(scaler.get_scale() == SCALE / 2, f"captured: {name} left the scale at {scaler.get_scale()}")
        scaler._scale.fill_(SCALE)
