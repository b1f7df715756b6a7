"""The demo from start to verdict."""

import sys
from collections.abc import Sequence
from pathlib import Path

from scaler_triton.cli.console import fitted, new_bar
from scaler_triton.demo.checks import judge
from scaler_triton.demo.config import DemoConfig
from scaler_triton.demo.device import Placement, place
from scaler_triton.demo.plot import save_plot
from scaler_triton.demo.progress import bar_fed_by_file
from scaler_triton.demo.rank_process import RankResult
from scaler_triton.demo.ranks import RankPool, RankTimeout
from scaler_triton.demo.scalers import load_scalers
from scaler_triton.demo.single_process import train_reference
from scaler_triton.demo.table import steps_table
from scaler_triton.demo.trace import Trace
from scaler_triton.demo.train import train_rank

SECONDS_TO_START, SECONDS_A_STEP = 120.0, 5.0  # far above what a slow machine takes: only a hang reaches them


def show(scaler: str, mode: str, optimizer: str, steps: int, picture: Path) -> int:
    """Train, report and return the exit status: 0 if every check holds."""
    placement = place(mode)
    config = DemoConfig(scaler, mode, optimizer, steps, placement.ranks, placement.device_type)
    title = f"{scaler_name(config)}, {mode}, {optimizer}, {placement.ranks} rank{'s' if placement.ranks > 1 else ''}"
    print(f"{title}\n{placement.note}\n{_plan(config)}", flush=True)
    results = train_ranks(config, placement)
    if not all(result.ok for result in results):
        return _report_errors(results)
    ranks: list[Trace] = [result.value for result in results]
    with new_bar("one process, to compare", steps) as bar:
        reference = train_reference(config, bar.update)
    print(f"\n{steps_table(config, ranks)}\n")
    if ranks[0].why:
        print(f"{ranks[0].why}\n")
    save_plot(config, ranks, title, picture)
    print(f"plot: {picture}\n")
    return _report_verdict(ranks, reference)


def train_ranks(config: DemoConfig, placement: Placement) -> Sequence[RankResult]:
    """Run all ranks and return what became of each, a hang included."""
    limit = SECONDS_TO_START + SECONDS_A_STEP * config.steps
    title = f"{config.ranks} ranks, {config.mode}" if config.ranks > 1 else config.mode
    with RankPool(config.ranks, backend=placement.backend) as pool, bar_fed_by_file(title, config.steps) as feed:
        try:
            return pool.run(train_rank, config, feed, timeout=limit)
        except RankTimeout as late:
            return late.results


def scaler_name(config: DemoConfig) -> str:
    """Return the class that is shown, for people."""
    kind = "GradScaler" if config.mode == "single" else "ShardedGradScaler"
    return f"{kind} of {load_scalers(config.scaler).label}"


def _plan(config: DemoConfig) -> str:
    """Return what is going to happen, in one line of 80 columns."""
    steps = ", ".join(str(step + 1) for step in sorted(config.bad_shards))
    who = "every rank" if config.ranks > 1 else "it"
    return f"steps {steps}: an inf in one rank's gradients; {who} must skip them\n"


def _report_errors(results: Sequence[RankResult]) -> int:
    print("\nFAILED: the training did not come to its end", file=sys.stderr)
    for result in results:
        print(fitted(f"rank {result.rank}: {result.error or 'came to its end'}", sys.stderr), file=sys.stderr)
    return 1


def _report_verdict(ranks: Sequence[Trace], reference: Trace) -> int:
    checks = judge(ranks, reference)
    for check in checks:
        print(fitted(f"{'ok    ' if check.ok else 'FAILED'}  {check.text}", sys.stdout))
    failed = sum(not check.ok for check in checks)
    print(f"\n{f'FAILED: {failed} of {len(checks)} checks' if failed else 'OK: every check holds'}")
    return 1 if failed else 0
