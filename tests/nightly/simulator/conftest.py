"""Compiled kernels and interpreted ones cannot live in one process: the compiled ones get their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CASES = ROOT / "tests" / "unit" / "kernels"


@pytest.fixture(scope="session")
def run_compiled(tmp_path_factory):
    """Runs a script of this folder without the interpreter, with a compilation cache of its own: its JSON."""

    def run(script, variables=()):
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | dict(variables)
        env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), str(CASES), env.get("PYTHONPATH")]))
        done = subprocess.run([sys.executable, HERE / script], env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
