"""Apply each mutant to a copy of the tree and see its tests fail: `make mutants`; exit status 1 if one survives.

python tests/nightly/mutants/run.py            all of them
python tests/nightly/mutants/run.py flag.py    those whose file, text or tests hold a word
python tests/nightly/mutants/run.py --check    only that each one's text occurs exactly once in its file
"""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from catalogue import MUTANTS, Mutant

ROOT = Path(__file__).parents[3]
LIMIT = 600  # seconds a mutant's tests may take; one that hangs is noticed, too


def misfits() -> list[str]:
    """Return what no longer fits the code."""
    wrong = [f"{each} is not there" for each in sorted({m.noticed_by for m in MUTANTS}) if not (ROOT / each).exists()]
    for each in MUTANTS:
        count = (ROOT / each.path).read_text().count(each.old)
        if count != 1 or each.old == each.new:
            wrong.append(f"{each.path} holds {each.old!r} {count} times")
        elif each.path.endswith(".py"):  # a syntax error would be noticed for nothing
            compile((ROOT / each.path).read_text().replace(each.old, each.new), each.path, "exec")
    return wrong


def copy_tree(folder: Path) -> None:
    """Copy what git tracks, links included."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)


@functools.cache
def with_gpu(folder: Path) -> dict[str, str]:
    """Return the variables of a process that has a pretended GPU, which is built once."""
    sys.path[:0] = [str(folder), str(folder / "tests/nightly")]
    import pretended_gpu

    (folder / "out").mkdir()
    return pretended_gpu.environment(folder / "out")


def is_noticed(folder: Path, mutant: Mutant) -> bool:
    """Return whether the tests fail with the mutant in the tree in `folder`."""
    path = folder / mutant.path
    original = path.read_text()
    variables = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    if mutant.noticed_by.startswith("tests/gpu"):
        variables |= with_gpu(folder)
    path.write_text(original.replace(mutant.old, mutant.new))
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", mutant.noticed_by]
    try:
        run = subprocess.run(command, cwd=folder, env=variables, capture_output=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(original)
    return run.returncode == 1 or run.returncode < 0  # tests failed, or a signal ended them; anything else says nothing


def main() -> int:
    """Run all mutants, or those that were asked for."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if wrong := misfits():
        print(*wrong, sep="\n")
    if word == "--check":
        return 1 if wrong else 0
    chosen = [each for each in MUTANTS if word in f"{each.path} {each.old} {each.noticed_by}"]
    survivors = 0
    with tempfile.TemporaryDirectory() as name:
        copy_tree(Path(name))
        for number, mutant in enumerate(chosen, 1):
            begin = time.monotonic()
            noticed = is_noticed(Path(name), mutant)
            survivors += not noticed
            said = f"{'noticed' if noticed else 'SURVIVED':8} {time.monotonic() - begin:4.0f} s"
            print(f"{number}/{len(chosen)} {said}  {mutant.path}: {mutant.old!r}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
