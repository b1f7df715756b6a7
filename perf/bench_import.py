"""What does importing the scaler cost, over importing torch?"""

import compileall
import subprocess
import sys
from collections.abc import Iterator

from perf.context import Context, Section, Turn
from perf.machine import ROOT
from perf.rows import Row, row

# Each in a process of its own, which has torch already.
COSTS = {
    "ours": "import scaler_triton; scaler_triton.GradScaler",
    "ours, sharded": "import scaler_triton; scaler_triton.ShardedGradScaler",
    "torch's sharded": "import torch.distributed.fsdp.sharded_grad_scaler",
}
MEASURE = "import time, torch\nbegin = time.perf_counter()\n{}\nprint(1e6 * (time.perf_counter() - begin))"


def sections(context: Context) -> list[Section]:
    """Return the one part."""
    return [Section("import", lambda: measure(context), Turn.ON_CPU)]


def measure(context: Context) -> Iterator[Row]:
    """Import each in turn, a few times, compiled to bytecode as pip leaves it."""
    compileall.compile_dir(ROOT / "scaler_triton", quiet=2)
    costs: dict[str, list[float]] = {name: [] for name in COSTS}
    for _ in range(1 if context.quick else 5):
        for name, code in COSTS.items():
            printed = subprocess.check_output([sys.executable, "-c", MEASURE.format(code)], cwd=ROOT, timeout=120)
            costs[name].append(float(printed))
    for name, values in costs.items():
        yield row("import", "over import torch", "import", name, "us", values)
