"""The demo from start to end: train, print what happened, plot it, check it."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from tabulate import tabulate

from scaler_triton.console import fitted, new_bar
from scaler_triton.demo.checks import judge, mean_losses
from scaler_triton.demo.device import place
from scaler_triton.demo.launch import Answer, run_ranks
from scaler_triton.demo.train import Config, Trace, load_library, train_alone, train_rank

SECONDS_TO_START, SECONDS_A_STEP = 120.0, 5.0  # far above what a slow machine takes: only a hang reaches them
FULL_TABLE = 16  # runs with more steps show only the rows in which something happens
LOSS, BAD, SCALES = "#1f4e79", "#b22222", ("#2e8b57", "#d2691e")


def show(scaler: str, mode: str, optimizer: str, steps: int, picture: Path) -> int:
    """Train, report and return the exit status: 0 if every check holds."""
    placement = place(mode)
    config = Config(scaler, mode, optimizer, steps, placement.ranks, placement.device_type)
    kind = "GradScaler" if mode == "single" else "ShardedGradScaler"
    ranks, who = ("1 rank", "it") if placement.ranks == 1 else (f"{placement.ranks} ranks", "every rank")
    title = f"{kind} of {load_library(scaler)[0]}, {mode}, {optimizer}, {ranks}"
    bad_steps = ", ".join(str(step + 1) for step in config.bad_shards)
    print(f"{title}\n{placement.note}")
    print(f"steps {bad_steps}: an inf in one rank's gradients; {who} must skip them\n", flush=True)
    answers = train_behind_bar(f"{ranks}, {mode}", train_rank, config, placement.ranks, placement.backend)
    if not any(answer.error for answer in answers):
        answers += train_behind_bar("one process, to compare", train_alone, config, 1, "gloo")
    if any(answer.error for answer in answers):
        print("\nFAILED: the training did not come to its end", file=sys.stderr)
        for answer in answers:
            print(fitted(f"rank {answer.rank}: {answer.error or 'came to its end'}", sys.stderr), file=sys.stderr)
        return 1
    *traces, reference = [answer.value for answer in answers]
    print(f"\n{steps_table(config, traces)}\n")
    if traces[0].why:
        print(f"{traces[0].why}\n")
    save_plot(config, traces, title, picture)
    print(f"plot: {picture}\n")
    checks = judge(traces, reference)
    for check in checks:
        print(fitted(f"{'ok    ' if check.ok else 'FAILED'}  {check.text}", sys.stdout))
    failed = sum(not check.ok for check in checks)
    print(f"\n{f'FAILED: {failed} of {len(checks)} checks' if failed else 'OK: every check holds'}")
    return 1 if failed else 0


def train_behind_bar(
    title: str, fn: Callable[[int, Config], Trace], config: Config, ranks: int, backend: str
) -> list[Answer]:
    """Train in some ranks while a progress bar runs, and return what became of each."""
    with new_bar(title, config.steps) as bar:

        def heard(text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update()

        seconds = SECONDS_TO_START + SECONDS_A_STEP * config.steps
        return run_ranks(fn, config, ranks=ranks, backend=backend, seconds=seconds, heard=heard)


def steps_table(config: Config, ranks: Sequence[Trace]) -> str:
    """Return each step, from 1 on, with its loss, scale, skips and whose shard was bad; `a / b` where ranks differ."""
    rows = []
    for step, loss in enumerate(mean_losses(ranks)):
        moved = any(trace.scales[step] != trace.scales[max(step - 1, 0)] for trace in ranks)
        skipping = [str(rank) for rank, trace in enumerate(ranks) if trace.skipped[step]]
        happens = moved or skipping or step in {0, config.steps - 1, *config.bad_shards}
        if config.steps <= FULL_TABLE or happens:
            scale = " / ".join(dict.fromkeys(f"{trace.scales[step]:g}" for trace in ranks))
            skipped = "yes" if len(skipping) == len(ranks) else f"rank {', '.join(skipping)} ONLY" if skipping else ""
            rows.append((step + 1, f"{loss:.3f}", scale, skipped, config.bad_shards.get(step, "")))
    head = ["step", "loss", "scale", "skipped", "bad shard on rank"]
    return str(tabulate(rows, head, disable_numparse=True, colalign=("right", "right", "right", "left", "center")))


def save_plot(config: Config, ranks: Sequence[Trace], title: str, picture: Path) -> None:
    """Draw the loss above the scale, with the skipped steps marked, and write it as a PNG."""
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    losses = mean_losses(ranks)
    above.plot(range(1, len(losses) + 1), losses, color=LOSS, linewidth=1.8, label="mean of the ranks' micro-batches")
    skips = [sum(skipped) for skipped in zip(*(trace.skipped for trace in ranks), strict=True)]
    everywhere = [step for step, count in enumerate(skips) if count == len(ranks)]
    somewhere = [step for step, count in enumerate(skips) if 0 < count < len(ranks)]
    for marker, label, steps in (("x", "skipped", everywhere), ("o", "skipped by some ranks ONLY", somewhere)):
        if steps:
            points = [step + 1 for step in steps], [losses[step] for step in steps]
            above.plot(*points, marker, color=BAD, markersize=9, mew=2.2, mfc="none", label=label)
    for step, rank in config.bad_shards.items():
        where = {"xy": (step + 1, 0.5), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        above.annotate(f"inf in rank {rank}'s shard", xytext=(4, 0), color=BAD, fontsize=9, **where)
    agreed = len(ranks) > 1 and all(trace.scales == ranks[0].scales for trace in ranks)
    for rank, trace in enumerate(ranks[:1] if agreed else ranks):
        style = {"color": SCALES[rank], "linewidth": 2.2 - 0.5 * rank}
        label = "all ranks" if agreed else f"rank {rank}"
        below.step(range(1, len(trace.scales) + 1), trace.scales, where="post", label=label, **style)
    below.set_yscale("log", base=2)
    below.yaxis.set_major_formatter(FuncFormatter(lambda scale, _: f"{scale:g}"))
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.set(ylabel="scale", xlabel="step")
    above.set_ylabel("loss (nats per character)")
    above.set_title(title, loc="left", fontsize=11)
    for axes, corner in ((above, "upper right"), (below, "upper left")):
        for step in config.bad_shards:
            axes.axvline(step + 1, color=BAD, linewidth=1, linestyle=":", zorder=0)
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc=corner, framealpha=1, edgecolor="none")
    figure.savefig(picture, dpi=140)
