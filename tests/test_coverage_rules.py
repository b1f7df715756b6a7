"""What `make coverage` leaves out: kernels, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

coverage = pytest.importorskip("coverage", reason="coverage is measured where the development environment is")

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "scaler_triton").rglob("*.py"))  # which does not follow the link to the kernels
FILES += sorted((ROOT / "kernels").glob("*.py"))


def left_out(path: Path) -> set[int]:
    """Return the lines of a file that are not measured, but for empty ones."""
    measured = coverage.Coverage(data_file=None, config_file=str(ROOT / "pyproject.toml"))
    lines = path.read_text().splitlines()
    try:
        return {number for number in measured.analysis2(str(path))[2] if lines[number - 1].strip()}
    finally:
        measured.get_data().close(force=True)  # as it is in memory it would stay open


def kernels_in(text: str) -> set[int]:
    """Return the lines of kernels, decorators included, but for empty ones."""
    kernels = [node for node in ast.walk(ast.parse(text)) if is_kernel(node)]
    spans = [range(kernel.decorator_list[0].lineno, kernel.end_lineno + 1) for kernel in kernels]
    lines = text.splitlines()
    return {number for span in spans for number in span if lines[number - 1].strip()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_are_left_out_and_nothing_else(path: Path) -> None:
    text = path.read_text()
    kernels, found = kernels_in(text), left_out(path)
    assert kernels <= found
    assert found - kernels <= lines_for_the_type_checker(ast.parse(text))


def is_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)


def lines_for_the_type_checker(tree: ast.Module) -> set[int]:
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    return {line for guard in guards for line in range(guard.lineno, (guard.body[-1].end_lineno or 0) + 1)}


def test_there_are_kernels_to_leave_out() -> None:
    assert len(left_out(ROOT / "kernels/common.py")) > 50
