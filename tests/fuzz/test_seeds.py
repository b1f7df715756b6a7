"""A seed says it all: the same programs in another folder, by another process that has imported other modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
NUMBERS = [101, 128, 200, 254]  # the chance of a rule to be left out is an int up to 254
# Prints a line for each step of the programs of three seeds: with 60 programs each, all of them draw others where
# hypothesis finds ints that it may draw.
DRAW = f"""
import sys
sys.path[:0] = {[str(HERE), str(HERE.parent), str(HERE.parents[1])]}
for name in sys.argv[1:]:
    __import__(name)
from fuzz_profile import settings_for
from hypothesis import Verbosity, seed, settings
from hypothesis.reporting import with_reporter
from hypothesis.stateful import run_state_machine_as_test
from programs import Programs
shown = []
for first in (0, 2, 3):
    machine = seed(first)(type("Programs", (Programs,), {{}}))
    with with_reporter(shown.append):
        run_state_machine_as_test(machine, settings=settings(settings_for(60), verbosity=Verbosity.debug))
print("\\n".join(line for line in shown if line.startswith("state.")))
"""


def start(folder: Path, hash_seed: str, *modules: str) -> subprocess.Popen[str]:
    """Start to print the programs, in a folder of its own."""
    folder.mkdir()
    (folder / "with_numbers.py").write_text(f"NUMBERS = {NUMBERS}\n")
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DRAW, *modules]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)


def test_a_seed_draws_the_same_programs_wherever_it_runs(tmp_path: Path) -> None:
    runs = [start(tmp_path / "one", "1"), start(tmp_path / "other", "2", "with_numbers")]
    one, other = (run.communicate(timeout=300)[0].splitlines() for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert len(one) > 1800
    differing = [(place, *pair) for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]]
    assert (differing[:1], len(other)) == ([], len(one))
