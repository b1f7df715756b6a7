"""The notebook for a T4 runs cell by cell, on the CPU where there is no GPU; its recipe is the same program."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NOTEBOOK, RECIPE = ROOT / "docs/notebooks/qlora_t4.ipynb", ROOT / "docs/recipes/qlora_t4.py"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
INSTALL, *CODE = ["".join(cell["source"]) for cell in CELLS]
RUN = "import json, sys\nfor cell in json.load(sys.stdin): exec(cell)"


def lines_of(*texts: str) -> list[str]:
    return [line for text in texts for line in text.splitlines() if line]


def test_it_is_the_program_of_the_recipe() -> None:
    recipe = RECIPE.read_text()
    after_docstring = recipe.splitlines()[ast.parse(recipe).body[0].end_lineno :]
    assert lines_of(*CODE) == lines_of(*after_docstring)


def test_it_installs_first_and_shows_nothing_that_was_not_run() -> None:
    assert re.fullmatch(r'%pip install "scaler_triton @ git\+https://\S+" trl bitsandbytes peft', INSTALL)
    assert all((cell["outputs"], cell["execution_count"]) == ([], None) for cell in CELLS)


@pytest.mark.heavy
def test_its_cells_run_and_show_that_the_line_took_effect(tmp_path: Path) -> None:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    places = {"PYTHONPATH": paths, "TMPDIR": str(tmp_path), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=tmp_path,
        env=os.environ | places,
        input=json.dumps(CODE),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"^\{torch.bfloat16\}\nGradScaler\(.*; no update yet\)$", run.stdout, re.MULTILINE)
    *_, stats, losses, skips = run.stdout.splitlines()
    found = re.match(r"ScalerStats\(updates=20, skipped=(\d+), ", stats)
    assert found is not None, stats
    first, *_, last = json.loads(losses)
    assert last < 0.9 * first
    assert skips == "no step was skipped" or int(found[1]) > 0
