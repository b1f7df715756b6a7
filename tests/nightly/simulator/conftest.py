"""Compiled kernels and interpreted ones cannot live in one process: the compiled ones get their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PATHS = [str(HERE.parents[1] / folder) for folder in ("..", ".", "unit/kernels")]


@pytest.fixture(scope="session")
def run_compiled(tmp_path_factory):
    """Runs Python in this folder without the interpreter, with a compilation cache of its own: what it prints."""

    def run(*command, **variables):
        kept = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
        env = os.environ | kept | variables
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [*PATHS, env.get("PYTHONPATH")]))
        words = [sys.executable, *command]
        done = subprocess.run(words, cwd=HERE, env=env, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        return done.stdout

    return run
