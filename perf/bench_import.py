"""What does importing the scaler cost, over importing torch?"""

import compileall
import subprocess
import sys
from collections.abc import Iterator

from perf.measure import Context
from perf.rows import ROOT, Place, Row

IMPORTS = {  # by class and whose it is, each in processes of its own, which have torch already
    ("GradScaler", "ours"): "import scaler_triton; scaler_triton.GradScaler",
    ("ShardedGradScaler", "torch"): "import torch.distributed.fsdp.sharded_grad_scaler",
    ("ShardedGradScaler", "ours"): "import scaler_triton; scaler_triton.ShardedGradScaler",
}
SCRIPT = "import time, torch\nbegin = time.perf_counter()\n{}\nprint(1e3 * (time.perf_counter() - begin))"


def measure(context: Context) -> Iterator[Row]:
    """Yield all rows."""
    for folder in ("scaler_triton", "kernels"):
        compileall.compile_dir(ROOT / folder, quiet=1)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in IMPORTS}
    for key in [*IMPORTS] * (1 if context.quick else 3):
        run = [sys.executable, "-c", SCRIPT.format(IMPORTS[key])]
        times[key].append(float(subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout))
    for (case, subject), values in times.items():
        yield Place("import", "over import torch", case).row("import", subject, "ms", values)
