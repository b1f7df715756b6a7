"""A seed says it all: the same programs in another folder, by another process that has imported other modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")

pytestmark = pytest.mark.slow

PROGRAMS = 60  # of each of three seeds
NUMBERS = [101, 128, 200, 254]  # the chance of a rule to be left out is an int up to 254


def start(folder: Path, hash_seed: str, *modules: str) -> subprocess.Popen[str]:
    """Start to print the programs, in a folder of its own."""
    folder.mkdir()
    (folder / "with_numbers.py").write_text(f"NUMBERS = {NUMBERS}\n")
    command = [sys.executable, str(Path(__file__).parent / "drawn.py"), str(PROGRAMS), *modules]
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)


def test_a_seed_draws_the_same_programs_wherever_it_runs(tmp_path: Path) -> None:
    runs = [start(tmp_path / "one", "1"), start(tmp_path / "other", "2", "with_numbers")]
    one, other = (run.communicate(timeout=300)[0].splitlines() for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert len(one) > 3 * 10 * PROGRAMS
    differing = [(place, *pair) for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]]
    assert (differing[:1], len(other)) == ([], len(one))
