"""`python -m perf`: measure what this machine allows, write a CSV a question, print tables and goals."""

import argparse
import gc
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from perf import (
    bench_clip,
    bench_guard,
    bench_host,
    bench_import,
    bench_launches,
    bench_memory,
    bench_passes,
    pages,
)
from perf.goals import answers
from perf.measure import Context
from perf.rows import Entry, here, pooled, write_csv

BENCHES = (bench_host, bench_launches, bench_memory, bench_passes, bench_clip, bench_guard, bench_import)
QUESTIONS = {bench.__name__.removeprefix("perf.bench_"): bench for bench in BENCHES}


def main(words: Sequence[str] | None = None) -> int:
    """Run; return 0, or 1 if something failed."""
    parser = argparse.ArgumentParser(prog="python -m perf", description="Our scaler's cost beside torch's.")
    every = f"{', '.join(QUESTIONS)}; default: all"
    parser.add_argument("questions", nargs="*", choices=[[], *QUESTIONS], metavar="QUESTION", help=every)
    parser.add_argument("--out", type=Path, help="for CSVs; default: perf/results, which the READMEs show")
    parser.add_argument("--runs", type=int, choices=range(1, 10), default=1, metavar="N", help="medians of N runs")
    parser.add_argument("--quick", action="store_true", help="see that all works; its numbers mean nothing")
    parser.add_argument("--pages", action="store_true", help="only write the CSVs' results into the READMEs")
    arguments = parser.parse_args(words)
    context = Context("cuda" if torch.cuda.is_available() else "cpu", arguments.quick)
    torch.set_num_threads(1)  # as torchrun does: threads that wait for a busy core would be all that is timed
    gc.disable()  # else one scaler's time would include the collection of what the other left
    machine, out = here(), arguments.out or (Path("out/perf-quick") if arguments.quick else pages.RESULTS)
    print(f"{machine.device}, torch {machine.torch}, triton {machine.triton}, Python {machine.python}", flush=True)
    chosen = [] if arguments.pages else arguments.questions or QUESTIONS
    rows, failed = {name: [] for name in QUESTIONS if name in chosen}, []
    for name in [*rows] * arguments.runs:
        begin = time.monotonic()
        try:
            rows[name].extend(QUESTIONS[name].measure(context))
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # `timeout` sends it twice
            print(f"\n{name} failed\n{traceback.format_exc()}", flush=True)
            failed.append(f"{name}: {type(error).__name__}: {error}")
        gc.collect()
        if rows[name]:
            write_csv(out / machine.device / f"{name}.csv", pooled(rows[name]), machine)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
        if failed and "KeyboardInterrupt" in failed[-1]:
            break
    gc.enable()
    report(pages.entries_in(out), [name for name in rows if rows[name]])
    if out.resolve() == pages.RESULTS.resolve():
        for block in pages.blocks([*QUESTIONS]):
            pages.put(*block)
    print("".join(f"FAILED: {text}\n" for text in failed), end="")
    return 1 if failed else 0


def report(entries: Sequence[Entry], questions: Sequence[str]) -> None:
    """Print the tables of the questions that were asked, the goals, and which were missed."""
    for name in questions:
        print(f"\n{QUESTIONS[name].__doc__}\n{pages.question_tables(entries, name)}")
    found = answers(entries)
    print(f"\n{pages.goals_table(found)}\n\nMissed:\n{pages.missed(found)}")


if __name__ == "__main__":
    sys.exit(main())
