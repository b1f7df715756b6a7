"""On the CPU: is unscaling ever slower than torch's, and are adjacent gradients and the check faster?"""

from collections.abc import Iterator

from perf import shapes
from perf.compare import DTYPES, Build, checking, require_equal, unscaling
from perf.context import Context, Section, Turn
from perf.grads import Gradients
from perf.measure import Effort, interleaved, one_thread
from perf.rows import Row, time_rows

MANY = {"2000 x 64": [64] * 2000, "2000 x 1k": [1000] * 2000, "200 x 100k": [100_000] * 200}
LARGE = {"20 x 1M": [1_000_000] * 20}
GPT2 = {"GPT-2 124M, 1 of 8 shards": [numel // 8 for numel in shapes.gpt2()]}

Lists = dict[str, list[int]]


def sections(context: Context) -> list[Section]:
    """Return the three questions."""
    lists = shapes.FEW if context.quick else MANY | GPT2
    large = shapes.FEW if context.quick else MANY | LARGE | GPT2
    effort = context.effort(0.4, 9)
    return [
        Section("cpu, unscale", lambda: compared("unscale", lists, unscaling, effort), Turn.ON_CPU),
        Section(
            "cpu, unscale adjacent",
            lambda: compared("unscale, adjacent", lists, unscaling, effort, adjacent=True),
            Turn.ON_CPU,
        ),
        Section("cpu, check", lambda: compared("check", large, checking, effort), Turn.ON_CPU),
    ]


def compared(metric: str, lists: Lists, build: Build, effort: Effort, *, adjacent: bool = False) -> Iterator[Row]:
    """Check and time both scalers on lists of gradients, separate or views of one buffer."""
    for name, numels in lists.items():
        for dtype in DTYPES:
            gradients = Gradients(numels, DTYPES[dtype], adjacent=adjacent)
            with one_thread():
                require_equal(f"{name} {dtype}, {metric}", gradients, build)
                times = interleaved(build(gradients).subjects, effort)
            yield from time_rows("cpu", f"{name} {dtype}", metric, times)
