"""What does importing the scaler cost, over importing torch?"""

import compileall
import subprocess
import sys
from collections.abc import Iterator

from perf.measure import Context
from perf.rows import ROOT, Place, Row

# Each in processes of its own, which have torch already.
IMPORTS = {
    "ours": ("GradScaler", "import scaler_triton; scaler_triton.GradScaler"),
    "ours, sharded": ("ShardedGradScaler", "import scaler_triton; scaler_triton.ShardedGradScaler"),
    "torch": ("ShardedGradScaler", "import torch.distributed.fsdp.sharded_grad_scaler"),
}
SCRIPT = "import time, torch\nbegin = time.perf_counter()\n{}\nprint(1e3 * (time.perf_counter() - begin))"


def measure(context: Context) -> Iterator[Row]:
    """Yield all rows."""
    for folder in ("scaler_triton", "kernels"):
        compileall.compile_dir(ROOT / folder, quiet=1)
    times: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for _ in range(1 if context.quick else 7):
        for name, (_, code) in IMPORTS.items():
            run = [sys.executable, "-c", SCRIPT.format(code)]
            times[name].append(float(subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout))
    for name, values in times.items():
        place = Place("import", "over import torch", IMPORTS[name][0])
        yield place.row("import", name.split(",")[0], "ms", values)
