"""The catalogue of mutants fits the code; `make mutants` runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from catalogue import MUTANTS
from mutant import Mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.path}:{mutant.old[:40]}")
def test_every_mutant_still_applies(mutant: Mutant) -> None:
    text = (ROOT / mutant.path).read_text()
    assert mutant.old in text
    wrong = text.replace(mutant.old, mutant.new, 1)
    assert wrong != text
    if mutant.path.endswith(".py"):
        compile(wrong, mutant.path, "exec")  # a syntax error would be noticed for nothing
    for name in mutant.tests.split():
        assert (ROOT / name).exists()


def test_the_number_that_is_told_is_true() -> None:
    assert f"| {len(MUTANTS)} mutants |" in (ROOT / "README.md").read_text()
    assert f" {len(MUTANTS)} wrong versions of the code" in (ROOT / "Makefile").read_text()
