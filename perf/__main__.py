"""`python -m perf`: measure what this machine allows, write a CSV a question, print tables and goals."""

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from perf import bench_clip, bench_host, bench_import, bench_launches, bench_passes, pages
from perf.goals import answers
from perf.measure import Context
from perf.rows import Entry, Row, here, pooled, write_csv

QUESTIONS: dict[str, ModuleType] = {
    "host": bench_host,
    "launches": bench_launches,
    "passes": bench_passes,
    "clip": bench_clip,
    "import": bench_import,
}
QUICK_OUT = Path("out/perf-quick")


def main(words: Sequence[str] | None = None) -> int:
    """Run; return 0, or 1 if something failed."""
    arguments = build_parser().parse_args(words)
    if arguments.pages:
        pages.rewrite([*QUESTIONS])
        return 0
    context = Context("cuda" if torch.cuda.is_available() else "cpu", arguments.quick)
    torch.set_num_threads(1)  # as torchrun does: threads that wait for a busy core would be all that is timed
    machine, out = here(), arguments.out or (QUICK_OUT if arguments.quick else pages.RESULTS)
    print(f"{machine.device}, torch {machine.torch}, triton {machine.triton}, Python {machine.python}", flush=True)
    rows: dict[str, list[Row]] = {name: [] for name in QUESTIONS if name in (arguments.questions or QUESTIONS)}
    failed = []
    for name in [*rows] * arguments.runs:
        begin = time.monotonic()
        try:
            rows[name].extend(QUESTIONS[name].measure(context))
        except (Exception, KeyboardInterrupt) as error:
            print(f"\n{name} failed\n{traceback.format_exc()}", flush=True)
            failed.append(f"{name}: {type(error).__name__}: {error}")
            if isinstance(error, KeyboardInterrupt):
                break
        gc.collect()
        if rows[name]:
            write_csv(out / machine.device / f"{name}.csv", pooled(rows[name]), machine)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    report(pages.entries_in(out), [name for name in rows if rows[name]])
    if out.resolve() == pages.RESULTS.resolve():
        pages.rewrite([*QUESTIONS])
    print("".join(f"FAILED: {text}\n" for text in failed), end="")
    return 1 if failed else 0


def report(entries: Sequence[Entry], questions: Sequence[str]) -> None:
    """Print the tables of the questions that were asked, the goals, and which were missed."""
    for name in questions:
        print(f"\n{QUESTIONS[name].__doc__}\n{pages.question_tables(entries, name)}")
    found = answers(entries)
    print(f"\n{pages.goals_table(found)}\n\nMissed:\n{pages.missed(found)}")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m perf", description="Our scaler's cost beside torch's.")
    parser.add_argument("questions", nargs="*", choices=[[], *QUESTIONS], help="default: all of them")
    parser.add_argument("--out", type=Path, help="folder for CSVs (default: perf/results, which the READMEs show)")
    parser.add_argument("--runs", type=int, choices=range(1, 10), default=1, metavar="N", help="medians of N runs")
    parser.add_argument("--quick", action="store_true", help="see that all works; its numbers mean nothing")
    parser.add_argument("--pages", action="store_true", help="only write the CSVs' results into the READMEs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
