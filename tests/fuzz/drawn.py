"""Prints the programs of three seeds: `python drawn.py PROGRAMS MODULE...`, whose modules are imported before."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SEEDS = (0, 2, 3)  # with 60 programs, all of them draw others where hypothesis finds ints that it may draw
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]


def steps_of(chunk: Any) -> list[str]:
    """Return what hypothesis tells of the steps of all programs of a chunk, a line for each."""
    from fuzz_profile import settings_for
    from hypothesis import Verbosity, seed, settings
    from hypothesis.reporting import with_reporter
    from hypothesis.stateful import run_state_machine_as_test
    from single_programs import Programs

    told: list[str] = []
    machine = seed(chunk.seed)(type("Programs", (Programs,), {}))
    with with_reporter(told.append):
        run_state_machine_as_test(machine, settings=settings(settings_for(chunk.programs), verbosity=Verbosity.debug))
    return [line for line in told if line.startswith("state.")]


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    from fuzz_profile import Chunk

    for first in SEEDS:
        print("\n".join(steps_of(Chunk(first, int(sys.argv[1])))))
