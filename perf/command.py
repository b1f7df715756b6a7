"""`python -m perf`: run what this machine allows, print one table, write CSV and plot."""

import argparse
import gc
import math
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from perf import (
    bench_check,
    bench_clip,
    bench_cpu,
    bench_host,
    bench_import,
    bench_launches,
    bench_step,
    bench_unscale,
    readme,
)
from perf.context import Context, Section
from perf.goals import answers
from perf.machine import here
from perf.plot import save_plot
from perf.rows import Entry, Row, merged, pooled, read_csv, write_csv
from perf.table import answers_table, cases_table

# In this order: whole steps decide.
BENCHES = {
    "step": bench_step,
    "launches": bench_launches,
    "unscale": bench_unscale,
    "check": bench_check,
    "clip": bench_clip,
    "host": bench_host,
    "cpu": bench_cpu,
    "import": bench_import,
}
QUICK_OUT = Path("out/perf-quick")
MINUTES = 7.0  # on a GPU, to which many have no more than short access; a section begun by then takes one more


def main(words: Sequence[str] | None = None) -> int:
    """Run; return 0, or 1 if something failed."""
    arguments = build_parser().parse_args(words)
    if arguments.readme:
        readme.rewrite()
        return 0
    context, chosen, machine = Context(quick=arguments.quick), arguments.only, here()
    print(f"{machine.device}, torch {machine.torch}, triton {machine.triton}, Python {machine.python}", flush=True)
    sections = in_order(context, chosen)
    out = arguments.out or (QUICK_OUT if arguments.quick else readme.RESULTS)
    path = out / f"{machine.device}.csv"
    before = read_csv(path)

    def with_others(rows: Sequence[Row]) -> list[Entry]:
        return merged(before, [Entry(row, machine) for row in pooled(rows)], {row.bench for row in rows})

    limit = arguments.minutes or (MINUTES * arguments.runs if context.gpu else math.inf)
    within = in_time(sections * arguments.runs, limit, context)
    rows, failed = run_all(within, lambda rows: write_csv(path, with_others(rows)) if rows else None)
    entries = with_others(rows)
    report(entries, {row.bench for row in rows}, context, failed)
    if entries:
        save_plot(entries, path.with_suffix(".svg"))
        print(f"written: {path}, {path.with_suffix('.svg')}")
    if out.resolve() == readme.RESULTS.resolve():
        readme.rewrite()
    return 1 if failed else 0


def in_order(context: Context, chosen: Sequence[str]) -> list[tuple[str, Section]]:
    """Return the sections of the chosen benches; on a GPU machine, where time may run out, by their turns."""
    found = [(name, section) for name in chosen for section in BENCHES[name].sections(context)]
    return sorted(found, key=lambda pair: pair[1].turn) if context.gpu else found


def in_time(sections: Iterable[tuple[str, Section]], minutes: float, context: Context) -> Iterator[tuple[str, Section]]:
    """Yield sections for as long as there is time, and note the others as left out."""
    end = time.monotonic() + 60 * minutes
    for bench, section in sections:
        if time.monotonic() < end:
            yield bench, section
        else:
            context.leave_out(section.name, f"{minutes:g} minutes are over")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m perf", description="Our scaler's cost beside torch's.")
    parser.add_argument(
        "--out", type=Path, help="folder for CSV and plot (default: perf/results, whose results go into the README)"
    )
    parser.add_argument("--only", type=_names, default=list(BENCHES), help=f"some of {','.join(BENCHES)}")
    parser.add_argument(
        "--runs", type=int, choices=range(1, 10), default=1, metavar="N", help="measure all N times; medians count"
    )
    parser.add_argument(
        "--minutes", type=float, metavar="N", help=f"begin nothing later (default: {MINUTES:g} a run on a GPU)"
    )
    parser.add_argument("--quick", action="store_true", help="see that all works; its numbers mean nothing")
    parser.add_argument("--readme", action="store_true", help="only write the CSVs' results into the two READMEs")
    return parser


def run_all(
    sections: Iterable[tuple[str, Section]], keep: Callable[[Sequence[Row]], object] = lambda rows: None
) -> tuple[list[Row], list[str]]:
    """Run the sections of the benches; return their rows, and the names of those that failed.

    An interrupt ends the section and leaves out those after it.

    Args:
        keep: called after each section with all rows so far.
    """
    rows: list[Row] = []
    failed: list[str] = []
    try:
        for bench, section in sections:
            begin = time.monotonic()
            try:
                rows.extend(section.run())
            except Exception:
                print(f"\n{bench}: {section.name} failed\n{traceback.format_exc()}", flush=True)
                failed.append(section.name)
            _tidy()
            keep(rows)
            print(f"{section.name}: {time.monotonic() - begin:.0f} s", flush=True)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # `timeout` sends it twice
        failed.append(f"{section.name}, and what comes after it: interrupted")
        keep(rows)
    return rows, failed


def report(entries: Sequence[Entry], ran: set[str], context: Context, failed: Sequence[str]) -> None:
    """Print the tables of the benches that ran, the goals, and what is missing."""
    for bench in [name for name in BENCHES if name in ran]:
        print(f"\n{bench}: {BENCHES[bench].__doc__}\n{cases_table(e.row for e in entries if e.row.bench == bench)}")
    print(f"\nGoals, each by its worst case\n{answers_table(answers(entries))}")
    for text in dict.fromkeys(context.left_out):
        print(f"left out: {text}")
    for name in failed:
        print(f"FAILED: {name}")


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    return [name for name in BENCHES if name in names]


def _tidy() -> None:
    gc.collect()
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # of a GPU that a section has spoilt, as its own error told
            torch.cuda.empty_cache()
