"""The checks that the demo shows: which runs pass them."""

from copy import deepcopy
from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")

from scaler_triton.demo.show import TOLERANCE, judge
from scaler_triton.demo.train import Trace

SCALES, SKIPPED = [8.0, 8.0, 4.0, 4.0, 2.0, 1.0, 1.0], [False, True, False, True, True, False]
LOSSES, START, END = [4.0, 3.5, 3.0, 2.5, 2.0, 1.5], np.zeros(4, np.float32), np.ones(4, np.float32)
TRACE = Trace(True, LOSSES, SCALES, SKIPPED, (3,), START, END)


def moved(by: float) -> Any:
    """Return the parameters at the end, one of them moved."""
    return np.array([1 + by, 1, 1, 1], np.float32)


@pytest.mark.parametrize(
    ("on", "change", "said"),
    [
        ([1], {"enabled": False}, "the scaler is disabled on rank 1"),
        ([1], {"scales": [8.0, 8.0, 4.0, 4.0, 2.0, 1.0, 2.0]}, "step 6; after the last update: 1, 2"),
        ([0, 1], {"scales": [8.0, 8.0, 4.0, 4.0, 2.0, 1.0, 2.0]}, "skipped; scales do NOT match a single process"),
        ([1], {"step_counts": (2,)}, "optimizer step counts differ: 3, 2"),
        ([0, 1], {"step_counts": (2, 3)}, "optimizer step counts differ: 2/3, 2/3"),
        ([0, 1], {"skipped": [False] * 3 + [True] * 2 + [False]}, "wrongly skipped or wrongly taken: step 2"),
        ([0], {"skipped": [False, True] * 3}, "wrongly skipped or wrongly taken: steps 5, 6"),
        ([1], {"end": moved(4 * TOLERANCE)}, "gathered parameters do NOT match"),
        ([0], {"end": moved(nan)}, "gathered parameters do NOT match"),
        ([1], {"end": moved(nan)}, "gathered parameters do NOT match"),
        ([0, 1], {"losses": [4.0] * 5 + [3.9]}, "the loss did NOT fall"),
        ([0], {"losses": [4.0] * 5 + [nan]}, "the loss did NOT fall"),
    ],
)
def test_a_bad_run_fails(on: list[int], change: dict[str, Any], said: str) -> None:
    ranks = [replace(deepcopy(TRACE), **(change if rank in on else {})) for rank in range(2)]
    assert any(said in text for ok, text in judge(ranks, TRACE) if not ok)


def test_a_good_run_passes_and_rounding_is_measured() -> None:
    rounded = replace(TRACE, end=moved(TOLERANCE / 4))
    for ranks, said in (([TRACE], "bitwise"), ([TRACE, TRACE], "bitwise"), ([TRACE, rounded], "relative distance")):
        checks = judge(ranks, TRACE)
        assert all(ok for ok, _ in checks)
        assert any(said in text for _, text in checks)
