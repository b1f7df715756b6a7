"""The steps of a run as a table."""

from collections.abc import Sequence

from tabulate import tabulate

from scaler_triton.demo.checks import mean_losses
from scaler_triton.demo.config import DemoConfig
from scaler_triton.demo.trace import Trace

FULL_TABLE = 16  # runs with more steps show only the rows in which something happens


def steps_table(config: DemoConfig, ranks: Sequence[Trace]) -> str:
    """Return each step, from 1 on, with its loss, scale, skips and whose shard was bad; `a / b` where ranks differ."""
    losses = mean_losses(ranks)
    rows = [
        (step + 1, f"{losses[step]:.3f}", _scale(ranks, step), _skipped(ranks, step), config.bad_shards.get(step, ""))
        for step in _steps_to_show(config, ranks)
    ]
    head = ["step", "loss", "scale", "skipped", "bad shard on rank"]
    return str(tabulate(rows, head, disable_numparse=True, colalign=("right", "right", "right", "left", "center")))


def _steps_to_show(config: DemoConfig, ranks: Sequence[Trace]) -> list[int]:
    if config.steps <= FULL_TABLE:
        return list(range(config.steps))
    shown = {0, config.steps - 1, *config.bad_shards}
    for trace in ranks:
        shown.update(step for step in range(1, config.steps) if trace.scales[step] != trace.scales[step - 1])
        shown.update(step for step, skipped in enumerate(trace.skipped) if skipped)
    return sorted(shown)


def _scale(ranks: Sequence[Trace], step: int) -> str:
    return " / ".join(dict.fromkeys(f"{trace.scales[step]:g}" for trace in ranks))


def _skipped(ranks: Sequence[Trace], step: int) -> str:
    skipping = [rank for rank, trace in enumerate(ranks) if trace.skipped[step]]
    if len(skipping) == len(ranks):
        return "yes"
    return f"rank {', '.join(map(str, skipping))} ONLY" if skipping else ""
