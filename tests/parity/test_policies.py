"""The models of `docs/compare_policies.py`: measured headroom takes every first step, torch's rule does not."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")

PATH = Path(__file__).parents[2] / "docs/compare_policies.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec: Any = importlib.util.spec_from_file_location("compare_policies", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LoRA", "RL policy"])  # the others take longer
def test_no_first_step_is_lost_in_search_of_a_scale(script: Any, name: str) -> None:
    torchs, ours = (script.train(script.TASKS[name], options, script.FIRST) for options in script.POLICIES.values())
    assert torchs.skipped
    assert not ours.skipped
    assert ours.scales[0] == 1.0 < ours.scales[1]
    assert all(map(math.isfinite, ours.losses))


def test_the_pages_table_is_what_the_script_makes(script: Any) -> None:
    runs = {name: dict.fromkeys(script.POLICIES, script.Run(losses=[0.5] * 20, skipped=[3, 30])) for name in ("a", "b")}
    assert script.rows(runs) == [[name, *["19 of 20", "2 of 300"] * 2, "0.5 / 0.5"] for name in runs]
    page = (PATH.parent / "headroom.md").read_text()
    assert [f"| {name} " in page for name in script.TASKS] == [True] * 5
