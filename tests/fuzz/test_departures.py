"""The model of what must happen departs from torch only where docs/differences.md says so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = (FOLDER.parents[1] / "docs" / "differences.md").read_text()
SOURCES = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.py")) if path != Path(__file__)}
# Constants for what has no number, and what the page tells of it.
WORDS = {"FAILURE": "\n## When something fails\n", "CLIPPING": "`clip_grad_norm_`"}


def nodes() -> Iterator[tuple[str, ast.AST]]:
    return ((name, node) for name, source in SOURCES.items() for node in ast.walk(ast.parse(source)))


def numbers_told() -> set[int]:
    return {int(number) for number in re.findall(r"^(\d+)\. ", PAGE, re.MULTILINE)}


def constants() -> dict[str, tuple[object, str]]:
    """Return constants of all files: value, and the line that defines it."""
    found = {}
    for name, node in nodes():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            line = SOURCES[name].splitlines()[node.lineno - 1]
            found |= {target.id: (node.value.value, line) for target in node.targets if isinstance(target, ast.Name)}
    return found


def departures() -> list[tuple[str, ast.expr]]:
    """Return the argument of each `departs`, and where it is."""
    calls = ((name, node) for name, node in nodes() if isinstance(node, ast.Call))
    ours = [(name, call) for name, call in calls if isinstance(call.func, ast.Name) and call.func.id == "departs"]
    assert all(len(call.args) == 1 and not call.keywords for _, call in ours)
    return [(f"{name}:{call.lineno}", call.args[0]) for name, call in ours]


def test_each_departure_is_told() -> None:
    known, numbers, used = constants(), numbers_told(), set()
    assert len(departures()) > 20
    for where, argument in departures():
        assert isinstance(argument, ast.Constant | ast.Name), where
        if isinstance(argument, ast.Name) and argument.id in WORDS:
            used.add(argument.id)
            continue
        number = argument.value if isinstance(argument, ast.Constant) else known[argument.id][0]
        assert number in numbers, where
    assert used == set(WORDS)


def test_each_word_is_explained_where_it_is_defined() -> None:
    for name, told in WORDS.items():
        value, line = constants()[name]
        assert isinstance(value, str)
        assert re.search(r'"  # \w+', line), line
        assert told in PAGE


def test_each_number_in_a_comment_is_told() -> None:
    found = {
        (name, int(number))
        for name, source in SOURCES.items()
        for number in re.findall(r"[Dd]ifferences?,? (\d+)", source)
    }
    assert len(found) > 3
    assert {pair for pair in found if pair[1] not in numbers_told()} == set()
