"""The demo from start to end: train, print what happened, plot it, and check that the ranks agreed."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scaler_triton.cli.console import coloured, fitted, fitted_table, new_bar
from scaler_triton.demo.launch import Answer, run_ranks
from scaler_triton.demo.train import Config, Trace, first_split, load_library, mean_losses, train_alone, train_rank
from scaler_triton.text import count_of

SECONDS_TO_START, SECONDS_A_STEP = 120.0, 5.0  # far above what a slow machine takes: only a hang reaches them
FULL_TABLE = 16  # runs with more steps show only the rows in which something happens
LOSS_MUST_FALL_BY = 0.1  # noise between micro-batches is a few percent; even a short run may well learn a third
# How far the ranks' parameters may end from the single process's, relative to how far training moved them. Only the
# order of fp32 sums differs, but a last bit can tip a number to fp16's next one, 2**-11 off, and later steps carry that
# on: noise of 1e-7 on the gradients ends below 1e-3 after 100 steps. One step too few or too many ends above 2e-2.
TOLERANCE = 2.0**-8
MATCH = ("do NOT match", "match")
WORDS = {1: "one process", 2: "two ranks"}


def show(scaler: str, mode: str, optimizer: str, steps: int, picture: Path | None) -> int:
    """Train with one scaler or "both", report and return the exit status: 0 if every check holds (of both, ours)."""
    config, note = place(Config(scaler, mode, optimizer, steps))
    names = ("torch", "ours") if scaler == "both" else (scaler,)
    labels = {name: load_library(name)[0] for name in names}
    kind = "GradScaler" if mode == "single" else "ShardedGradScaler"
    title = f"{kind} of {' and of '.join(labels.values())}, {mode}, {optimizer}, {count_of(config.ranks, 'rank')}"
    bad = ", ".join(str(step + 1) for step in config.bad_shards)
    head = f"{title}\n{note}\nsteps {bad}: an inf in the gradients of one rank; all must skip them\n"
    print(fitted(head, sys.stdout), flush=True)
    runs: dict[str, list[Trace]] = {}
    for name in names:
        answers = train_behind_bar(f"{config.mode}, {labels[name]}", train_rank, replace(config, scaler=name))
        if not _report_errors(labels[name], answers):
            runs[name] = [answer.value for answer in answers]
    if names[-1] not in runs:
        return 1
    alone = train_behind_bar("one process, to compare", train_alone, config, 1)
    if _report_errors("one process", alone):
        return 1
    print(f"\n{steps_table(config, runs)}\n")
    if why := runs[names[-1]][0].why:
        print(f"{fitted(why, sys.stdout)}\n")
    verdicts = {name: judge(ranks, alone[0].value) for name, ranks in runs.items()}
    unseen = _unseen(runs)
    if picture is None:
        print("no plot: pip install matplotlib\n")
    else:
        from scaler_triton.demo.plot import save_plot

        save_plot(config, runs, f"{title}\n{unseen.partition(':')[0]}".strip(), picture)
        print(f"plot: {picture}\n")
    for name, checks in verdicts.items():
        if len(names) > 1:
            print(f"{labels[name]}:")
        for ok, text in checks:
            print(coloured(f"{'ok    ' if ok else 'FAILED'}  {text}", ok, sys.stdout))
        print()
    if unseen:
        print(f"{fitted(unseen, sys.stdout)}\n")
    ok, text = _verdict(verdicts, names)
    print(coloured(text, ok, sys.stdout))
    return 0 if ok else 1


def _report_errors(label: str, answers: Sequence[Answer]) -> bool:
    """Return whether a run did not finish, and say why on standard error."""
    if not any(answer.error for answer in answers):
        return False
    print(coloured(f"FAILED: the training did not finish: {label}", False, sys.stderr), file=sys.stderr)
    for answer in answers:
        print(fitted(f"rank {answer.rank}: {answer.error or 'finished'}", sys.stderr), file=sys.stderr)
    return True


def _unseen(runs: Mapping[str, Sequence[Trace]]) -> str:
    """Return a sentence about the losses of two runs, "" unless only the ranks of torch's scaler split."""
    if {name: first_split(ranks) is not None for name, ranks in runs.items()} != {"torch": True, "ours": False}:
        return ""
    ends = {name: _last_of(mean_losses(ranks)) for name, ranks in runs.items()}
    return f"The loss does not show it: {ends['torch']:.2f} with torch's scaler, {ends['ours']:.2f} with ours."


def _verdict(verdicts: Mapping[str, Sequence[tuple[bool, str]]], names: Sequence[str]) -> tuple[bool, str]:
    """Return whether the last scaler's checks hold, and that in words."""
    failed = {name: sum(not ok for ok, _ in checks) for name, checks in verdicts.items()}
    last, count = names[-1], len(verdicts[names[-1]])
    ours = " with ours" if len(names) > 1 else ""
    if failed[last]:
        return False, f"FAILED: {failed[last]} of {count} checks{ours}"
    if len(names) == 1:
        return True, "OK: every check holds"
    if "torch" not in failed:
        return True, "OK: every check holds with ours; with torch's scaler the training did not finish"
    if failed["torch"]:
        return True, f"OK: every check holds with ours; with torch's scaler {failed['torch']} of {count} fail"
    return True, "OK: every check holds, with ours and with torch's scaler"


def place(config: Config) -> tuple[Config, str]:
    """Return the run with as many ranks as its mode has, where this machine can run them; and that in words."""
    ranks, gpus = 1 if config.mode == "single" else config.ranks, torch.cuda.device_count()
    if not torch.cuda.is_available():
        return replace(config, ranks=ranks), f"no GPU: on the CPU{', over gloo' if ranks > 1 else ''}"
    where = f"{ranks} of {gpus} GPUs" if gpus >= ranks else f"{ranks} ranks share the one GPU"
    return replace(config, ranks=ranks, device_type="cuda"), f"{where}{', over nccl' if ranks > 1 else ''}"


def train_behind_bar(
    title: str, fn: Callable[[int, Config], Trace], config: Config, ranks: int | None = None
) -> list[Answer]:
    """Train in some ranks, by default the config's, behind a progress bar; return what became of each.

    Until the first step, which may take ten seconds, a line says that they start.
    """
    ranks = ranks or config.ranks
    print(f"starting {WORDS[ranks]} ...", file=sys.stderr, flush=True)
    bar: Any = None

    def advance(text: str) -> None:
        nonlocal bar
        if bar is None:
            bar = new_bar(title, config.steps)
        bar.set_postfix_str(text, refresh=False)
        bar.update()

    try:
        seconds = SECONDS_TO_START + SECONDS_A_STEP * config.steps
        return run_ranks(fn, config, ranks=ranks, seconds=seconds, heard=advance)
    finally:
        if bar is not None:
            bar.close()


def steps_table(config: Config, runs: Mapping[str, Sequence[Trace]]) -> str:
    """Return each step, from 1 on, with whose gradients were bad, and each run's loss, scale and skips.

    Where ranks differ a scale is `a / b`. Long runs show only the steps in which something happens.
    """
    rows = [("step", "inf on", *("loss", "scale", "skipped") * len(runs))]
    losses = {name: mean_losses(ranks) for name, ranks in runs.items()}
    for step in range(config.steps):
        happens, cells = step in {0, config.steps - 1, *config.bad_shards}, []
        for name, ranks in runs.items():
            skipping = [str(rank) for rank, trace in enumerate(ranks) if trace.skipped[step]]
            happens |= bool(skipping) or any(trace.scales[step] != trace.scales[max(step - 1, 0)] for trace in ranks)
            scale = " / ".join(dict.fromkeys(f"{trace.scales[step]:g}" for trace in ranks))
            skipped = "yes" if len(skipping) == len(ranks) else f"rank {', '.join(skipping)} ONLY" if skipping else ""
            cells += [f"{losses[name][step]:.3f}", scale, skipped]
        if config.steps <= FULL_TABLE or happens:
            bad = config.bad_shards.get(step)
            rows.append((str(step + 1), "" if bad is None else f"rank {bad}", *cells))
    lines = fitted_table(rows, "><" + ">><" * len(runs), sys.stdout)
    if len(runs) == 1:
        return lines
    columns = lines.split("\n")[1].split("  ")
    start, over = len("  ".join(columns[:2])) + 2, ""
    for index, name in enumerate(runs):
        own = "  ".join(columns[2 + 3 * index : 5 + 3 * index])
        over += f"{load_library(name)[0].partition('+')[0]:{len(own)}}  "
    return f"{' ' * start}{over}".rstrip() + f"\n{lines}"


def judge(ranks: Sequence[Trace], reference: Trace) -> list[tuple[bool, str]]:
    """Return checks, each as whether it holds and a text: that the ranks agree, and did as the single process did."""
    everywhere = "both ranks" if len(ranks) == 2 else f"all {len(ranks)} ranks"
    off = [rank for rank, trace in enumerate(ranks) if not trace.enabled]  # would pass many of the other checks
    by_step = list(zip(*(trace.scales for trace in ranks), strict=True))
    split = first_split(ranks)
    counts = ["/".join(map(str, trace.step_counts)) for trace in ranks]
    uneven = len(set(counts)) > 1 or len(ranks[0].step_counts) > 1
    pairs = [pair for trace in ranks for pair in enumerate(zip(trace.skipped, reference.skipped, strict=True), 1)]
    wrong = sorted({step for step, (skipped, right) in pairs if skipped != right})
    same = all(trace.scales == reference.scales for trace in ranks)
    agreed = [
        (False, f"the scales of the ranks split after step {split}; after the last update: {_listed(by_step[-1])}")
        if split is not None
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


def _parameters_match(ranks: Sequence[Trace], reference: Trace) -> tuple[bool, str]:
    moved = np.linalg.norm(reference.end - reference.start)
    distance = float(np.max([np.linalg.norm(trace.end - reference.end) / moved for trace in ranks]))
    ok = distance <= TOLERANCE  # False for NaN
    equal = all(trace.end.tobytes() == reference.end.tobytes() for trace in ranks)
    found = "bitwise" if equal else f"relative distance {distance:.1e}, allowed {TOLERANCE:.1e}"
    return (ok, f"gathered parameters {MATCH[ok]} a single process: {found}")


def _loss_fell(losses: Sequence[float]) -> tuple[bool, str]:
    last, count = _last_of(losses), len(_tail(losses))
    ok = last < losses[0] * (1 - LOSS_MUST_FALL_BY)
    of = f", the mean of the last {count}" if count > 1 else ""
    return (ok, f"the loss {'fell' if ok else 'did NOT fall'}: {losses[0]:.2f} -> {last:.2f}{of}")


def _tail(losses: Sequence[float]) -> Sequence[float]:
    return losses[-max(1, len(losses) // 8) :]


def _last_of(losses: Sequence[float]) -> float:
    """Return the mean loss of the last steps."""
    return float(np.mean(_tail(losses)))


def _listed(items: Iterable[object]) -> str:
    return ", ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in items)
