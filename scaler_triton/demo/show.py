"""The demo from start to end: train, print what happened, plot it, and check that the ranks agreed."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from tabulate import tabulate

from scaler_triton.cli.console import fitted, new_bar
from scaler_triton.demo.launch import Answer, run_ranks
from scaler_triton.demo.train import Config, Trace, load_library, train_alone, train_rank
from scaler_triton.text import count_of

SECONDS_TO_START, SECONDS_A_STEP = 120.0, 5.0  # far above what a slow machine takes: only a hang reaches them
FULL_TABLE = 16  # runs with more steps show only the rows in which something happens
LOSS_MUST_FALL_BY = 0.1  # noise between micro-batches is a few percent; even a short run may well learn a third
# How far the ranks' parameters may end from the single process's, relative to how far training moved them. Only the
# order of fp32 sums differs, but a last bit can tip a number to fp16's next one, 2**-11 off, and later steps carry that
# on: noise of 1e-7 on the gradients ends below 1e-3 after 100 steps. One step too few or too many ends above 2e-2.
TOLERANCE = 2.0**-8
MATCH = ("do NOT match", "match")
LOSS, BAD, SCALES = "#1f4e79", "#b22222", ("#2e8b57", "#d2691e")


def show(scaler: str, mode: str, optimizer: str, steps: int, picture: Path) -> int:
    """Train, report and return the exit status: 0 if every check holds."""
    config, note = place(Config(scaler, mode, optimizer, steps))
    kind = "GradScaler" if mode == "single" else "ShardedGradScaler"
    ranks = count_of(config.ranks, "rank")
    title = f"{kind} of {load_library(scaler)[0]}, {mode}, {optimizer}, {ranks}"
    bad = ", ".join(str(step + 1) for step in config.bad_shards)
    print(f"{title}\n{note}\nsteps {bad}: an inf in the gradients of one rank; all must skip them\n", flush=True)
    answers = train_behind_bar(f"{ranks}, {mode}", train_rank, config, config.ranks)
    if not any(answer.error for answer in answers):
        answers += train_behind_bar("one process, to compare", train_alone, config, 1)
    if any(answer.error for answer in answers):
        print("\nFAILED: the training did not finish", file=sys.stderr)
        for answer in answers:
            print(fitted(f"rank {answer.rank}: {answer.error or 'finished'}", sys.stderr), file=sys.stderr)
        return 1
    *traces, reference = [answer.value for answer in answers]
    print(f"\n{steps_table(config, traces)}\n")
    if traces[0].why:
        print(f"{traces[0].why}\n")
    save_plot(config, traces, title, picture)
    print(f"plot: {picture}\n")
    checks = judge(traces, reference)
    for ok, text in checks:
        print(fitted(f"{'ok    ' if ok else 'FAILED'}  {text}", sys.stdout))
    failed = sum(not ok for ok, _ in checks)
    print(f"\n{f'FAILED: {failed} of {len(checks)} checks' if failed else 'OK: every check holds'}")
    return 1 if failed else 0


def place(config: Config) -> tuple[Config, str]:
    """Return the run with as many ranks as its mode has, where this machine can run them; and that in words."""
    ranks, gpus = 1 if config.mode == "single" else config.ranks, torch.cuda.device_count()
    if not torch.cuda.is_available():
        return replace(config, ranks=ranks), f"no GPU: on the CPU{', over gloo' if ranks > 1 else ''}"
    where = f"{ranks} of {gpus} GPUs" if gpus >= ranks else f"{ranks} ranks share the one GPU"
    return replace(config, ranks=ranks, device_type="cuda"), f"{where}{', over nccl' if ranks > 1 else ''}"


def train_behind_bar(title: str, fn: Callable[[int, Config], Trace], config: Config, ranks: int) -> list[Answer]:
    """Train in some ranks while a progress bar runs, and return what became of each."""
    with new_bar(title, config.steps) as bar:
        seconds = SECONDS_TO_START + SECONDS_A_STEP * config.steps
        show_text = partial(bar.set_postfix_str, refresh=False)
        return run_ranks(fn, config, ranks=ranks, seconds=seconds, heard=lambda text: (show_text(text), bar.update()))


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


def judge(ranks: Sequence[Trace], reference: Trace) -> list[tuple[bool, str]]:
    """Return checks, each as whether it holds and a text: that the ranks agree, and did as the single process did."""
    everywhere = "both ranks" if len(ranks) == 2 else f"all {len(ranks)} ranks"
    off = [rank for rank, trace in enumerate(ranks) if not trace.enabled]  # would pass many of the other checks
    by_step = list(zip(*(trace.scales for trace in ranks), strict=True))
    split = [step for step, scales in enumerate(by_step) if len(set(scales)) > 1]
    counts = ["/".join(map(str, trace.step_counts)) for trace in ranks]
    uneven = len(set(counts)) > 1 or len(ranks[0].step_counts) > 1
    pairs = [pair for trace in ranks for pair in enumerate(zip(trace.skipped, reference.skipped, strict=True), 1)]
    wrong = sorted({step for step, (skipped, right) in pairs if skipped != right})
    same = all(trace.scales == reference.scales for trace in ranks)
    agreed = [
        (False, f"the scales of the ranks split after step {split[0]}; after the last update: {_listed(by_step[-1])}")
        if split
        else (True, f"scales are bitwise equal on {everywhere}, at all {len(by_step) - 1} steps"),
        (False, f"optimizer step counts differ: {_listed(counts)}")
        if uneven
        else (True, f"optimizer step counts are equal on {everywhere}: {counts[0]}"),
    ]
    return [
        (not off, f"the scaler is disabled on rank {_listed(off)}" if off else "the scaler is enabled"),
        *(agreed if len(ranks) > 1 else []),
        (False, f"wrongly skipped or wrongly taken: step{'s' if len(wrong) > 1 else ''} {_listed(wrong)}")
        if wrong
        else (
            same,
            f"exactly the {sum(reference.skipped)} bad steps were skipped; scales {MATCH[same]} a single process",
        ),
        _parameters_match(ranks, reference),
        _loss_fell(mean_losses(ranks)),
    ]


def mean_losses(ranks: Sequence[Trace]) -> list[float]:
    """Return the loss of each step, averaged over the ranks' micro-batches."""
    return [float(np.mean(losses)) for losses in zip(*(trace.losses for trace in ranks), strict=True)]


def _parameters_match(ranks: Sequence[Trace], reference: Trace) -> tuple[bool, str]:
    moved = np.linalg.norm(reference.end - reference.start)
    distance = float(np.max([np.linalg.norm(trace.end - reference.end) / moved for trace in ranks]))
    ok = distance <= TOLERANCE  # False for NaN
    equal = all(trace.end.tobytes() == reference.end.tobytes() for trace in ranks)
    found = "bitwise" if equal else f"relative distance {distance:.1e}, allowed {TOLERANCE:.1e}"
    return (ok, f"gathered parameters {MATCH[ok]} a single process: {found}")


def _loss_fell(losses: Sequence[float]) -> tuple[bool, str]:
    tail = losses[-max(1, len(losses) // 8) :]
    last = float(np.mean(tail))
    ok = last < losses[0] * (1 - LOSS_MUST_FALL_BY)
    of = f", the mean of the last {len(tail)}" if len(tail) > 1 else ""
    return (ok, f"the loss {'fell' if ok else 'did NOT fall'}: {losses[0]:.2f} -> {last:.2f}{of}")


def _listed(items: Iterable[object]) -> str:
    return ", ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in items)
