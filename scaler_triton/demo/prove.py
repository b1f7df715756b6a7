"""`--prove`: one defect, torch's class and ours side by side."""

import re
import shutil
import sys
from collections.abc import Sequence

from tabulate import tabulate

from scaler_triton.cli.console import fitted
from scaler_triton.demo.case_steps import RANKS, Outcome
from scaler_triton.demo.cases import CASES, Case, shown
from scaler_triton.demo.rank_process import RankResult
from scaler_triton.demo.ranks import RankPool, RankTimeout
from scaler_triton.demo.scalers import load_scalers
from scaler_triton.text import one_line

COLLECTIVE_LIMIT = 10.0  # seconds that a rank waits for the others: a hang becomes an error after that
CASE_LIMIT = 60.0
HEAD = ["rank", "scale", "optimizer", "its parameters, or its error"]
ALIGNMENT = ["right", "right", "left", "left"]
OTHER_COLUMNS = 30  # characters before the last column


def prove(cases: Sequence[Case]) -> int:
    """Run and print cases; return 0 if in each of them torch is wrong and we are right."""
    unexpected = []
    with new_pool() as pool:
        for case in cases:
            unexpected += [f"{case.name}: {what}" for what in prove_one(case, pool)]
    for what in unexpected:
        print(f"UNEXPECTED: {what}")
    if not unexpected:
        print(f"As expected{f' in all {len(cases)} cases' if len(cases) > 1 else ''}: torch wrong, ours right.")
    return 1 if unexpected else 0


def prove_one(case: Case, pool: RankPool) -> list[str]:
    """Run one case with both and print what each rank holds.

    Args:
        case: what to run.
        pool: where to run it.

    Returns:
        What is not as the registry says; empty if torch is wrong and we are right.
    """
    _say(f"{case.name}: {case.summary}\nright is: {case.right}\n")
    torch_is_wrong = _run_and_print(case, "torch", pool)
    ours_is_wrong = _run_and_print(case, "ours", pool)
    unexpected = [f"scaler_triton is wrong: {ours_is_wrong}"] if ours_is_wrong else []
    return unexpected if torch_is_wrong else [*unexpected, "torch is no longer wrong"]


def new_pool() -> RankPool:
    """Return ranks that cases share, and whose hangs become errors."""
    return RankPool(RANKS, group_timeout=COLLECTIVE_LIMIT)


def run_on_ranks(case: Case, scaler: str, pool: RankPool) -> list[RankResult]:
    """Run a case on every rank; a hang is returned as an error, too."""
    try:
        return pool.run(run_case, case.name, scaler, timeout=CASE_LIMIT)
    except RankTimeout as late:
        return late.results


def run_case(rank: int, name: str, scaler: str) -> Outcome:
    """Execute what each rank does of a case."""
    return CASES[name].run(rank, load_scalers(scaler))


def wrong(case: Case, results: Sequence[RankResult]) -> str:
    """Return what went wrong, in words; empty if the case came out right."""
    errors = [f"rank {result.rank} {_error_kind(result)}" for result in results if not result.ok]
    return "; ".join(errors) or case.right.wrong([result.value for result in results])


def _run_and_print(case: Case, scaler: str, pool: RankPool) -> str:
    results = run_on_ranks(case, scaler, pool)
    said = wrong(case, results)
    rows = [_row(result) for result in results]
    widths = [None, None, None, _last_column()]
    print(load_scalers(scaler).label)
    print(tabulate(rows, HEAD, disable_numparse=True, colalign=ALIGNMENT, maxcolwidths=widths))
    _say(f"{f'WRONG: {said}' if said else 'RIGHT'}\n")
    return said


def _say(text: str) -> None:
    print(fitted(text, sys.stdout), flush=True)


def _last_column() -> int | None:
    """Return how wide the table's last column may be: in a terminal what the others leave, elsewhere anything."""
    return max(shutil.get_terminal_size().columns - OTHER_COLUMNS, 20) if sys.stdout.isatty() else None


def _row(result: RankResult) -> list[object]:
    if result.error is not None:
        return [result.rank, "-", "error", _shortened(result.error)]
    outcome: Outcome = result.value
    done = "stepped" if outcome.stepped else "skipped" if outcome.had_grads else "no grads"
    change = f"-> {outcome.after}" if outcome.stepped else "unchanged"
    broken = "" if outcome.finite else " (NaN or Inf)"
    return [result.rank, shown(outcome.scale), done, f"{outcome.before} {change}{broken}"]


def _shortened(error: str) -> str:
    without_source_line = re.sub(r"\[\S+:\d+\] ", "", error.splitlines()[0])
    return one_line(without_source_line, 90)


def _error_kind(result: RankResult) -> str:
    kind, _, text = (result.error or "").partition(":")
    waited = kind in ("RankTimeout", "OutOfStep") or "timed out" in text.lower()
    return "hangs in a collective" if waited else f"raises {kind}"
