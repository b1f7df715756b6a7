"""Apply each mutant to a copy of the tree and see its tests fail: `make mutants`; exit status 1 if one survives."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from catalogue import MUTANTS
from mutant import Mutant

ROOT = Path(__file__).parents[2]
LIMIT = 600  # seconds a mutant's tests may take; one that hangs is noticed, too


def copy_tree(folder: Path) -> None:
    """Copy what git tracks, links included."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)


def fails(folder: Path, tests: str) -> bool:
    """Tell whether the tests fail on the tree in `folder`."""
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return True
    return run.returncode == 1 or run.returncode < 0  # tests failed, or a signal ended them; else: no verdict


def killed(folder: Path, mutant: Mutant) -> bool:
    """Tell whether the mutant's tests notice it."""
    path = folder / mutant.path
    original = path.read_text()
    if mutant.old not in original:
        raise SystemExit(f"{mutant.path} no longer holds {mutant.old!r}: bring the catalogue up to date")
    path.write_text(original.replace(mutant.old, mutant.new, 1))
    try:
        return fails(folder, mutant.tests)
    finally:
        path.write_text(original)


def main() -> int:
    """Run all mutants, or those whose path or text holds the first argument."""
    chosen = [m for m in MUTANTS if len(sys.argv) < 2 or sys.argv[1] in f"{m.path} {m.old}"]
    survivors = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        for number, mutant in enumerate(chosen, 1):
            begin = time.monotonic()
            dead = killed(folder, mutant)
            survivors += [] if dead else [mutant]
            seconds = time.monotonic() - begin
            print(f"{number}/{len(chosen)} {'killed' if dead else 'SURVIVED':8} {seconds:4.0f} s  {mutant}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
