"""The README's yes/no table says what happens, cell by cell."""

from __future__ import annotations

from pathlib import Path

import matrix_cases
import pytest
from cases import Report
from matrix_cases import CLASS_NAMES, FUSED, PLAIN, ROWS

pytestmark = pytest.mark.distributed

README = Path(__file__).parents[2] / "README.md"
# TP's local clip would mix meshes, which torch refuses: there `unscale_` is called without it.
UNSCALE = {"fsdp2-tp": [False]}


def agreed(reports: list[Report | str]) -> bool:
    """Whether nobody raised, and all ranks hold the same scale, took the same steps and have finite parameters."""
    if not all(isinstance(report, Report) for report in reports):
        return False
    traces = {(tuple(report.scales), tuple(report.stepped)) for report in reports}
    return len(traces) == 1 and all(report.finite for report in reports)


def cell(four, row, whose: str, optimizer: str) -> str:
    """ "yes" if the ranks agree with and without `unscale_`."""
    ways = UNSCALE.get(row.wrapper, [False, True])
    return "yes" if all(agreed(four.run(matrix_cases.run, row, whose, optimizer, way)) for way in ways) else "**no**"


def test_readme_matrix(four) -> None:
    lines = ["| | torch, plain | torch, fused | ours, plain | ours, fused |", "| --- | --- | --- | --- | --- |"]
    for row in ROWS:
        cells = [cell(four, row, whose, optimizer) for whose in ("torch", "ours") for optimizer in (PLAIN, FUSED)]
        assert cells[2:] == ["yes", "yes"], row.name
        lines.append(f"| {row.name}, `{CLASS_NAMES[row.kind]}` | {' | '.join(cells)} |")
    text = README.read_text()
    begin, end = "<!-- matrix -->\n", "\n<!-- /matrix -->"
    shown = text[text.index(begin) + len(begin) : text.index(end)]
    assert shown == "\n".join(lines), "README.md's table is not what was measured:\n" + "\n".join(lines)
