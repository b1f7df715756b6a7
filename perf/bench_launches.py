"""How many launches, copies and waits does a scaler add to a step?"""

from collections.abc import Iterator
from functools import partial

from perf import models
from perf.check import require
from perf.context import Context, Section
from perf.models import adamw, tokens, transformer
from perf.rows import Row, row
from perf.trace import Trace, record
from perf.training import Loop, require_no_skips

STEPS = 5


def sections(context: Context) -> list[Section]:
    """Return the one part, on a GPU."""
    if context.gpu:
        return [Section("launches", measure)]
    context.leave_out("launches, copies and waits of a step", "needs a GPU")
    return []


def measure() -> Iterator[Row]:
    """Profile a small transformer with every scaler, plain and fused, with and without clipping."""
    batch = tokens(4, models.SMALL_SIZE.context, models.SMALL_WORDS, "cuda")
    for fused in (False, True):
        for clip in (False, True):
            model = transformer(models.SMALL_SIZE, models.SMALL_WORDS, "cuda")
            loop = Loop(model, adamw(model.parameters(), fused=fused), batch, clip=clip)
            traces = {name: record(partial(loop.step, scaler), STEPS) for name, scaler in loop.scalers.items()}
            require_no_skips("launches", loop)
            yield from counted(f"{'fused' if fused else 'plain'} AdamW{', clip' if clip else ''}", traces)


def counted(case: str, traces: dict[str, Trace]) -> Iterator[Row]:
    """Give what each step did outside forward, backward and the optimizer's own step, and what ours adds."""
    counts = {name: trace.per_step("scaler") for name, trace in traces.items()}
    require(counts["ours"]["launches"], f"{case}: the profiler saw none of our launches")
    for what in counts["none"]:
        for name, count in counts.items():
            yield row("launches", case, what, name, "count", [count[what]])
            if name != "none":
                yield row("launches", case, what, f"{name} - none", "count", [count[what] - counts["none"][what]])
