"""The API page has every public name; their docstrings tell each argument and what is returned."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import scaler_triton
from scaler_triton import GradScaler, ShardedGradScaler, ops

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "api.rst").read_text()
INTEGRATIONS = "scaler_triton.integrations."
SHARED = ("__init__", "backwards", "versions")  # by the integrations: for no user
# Imported by their own names; an integration only where its framework is.
MODULES = [
    "scaler_triton.migration",
    *(INTEGRATIONS + f.stem for f in (ROOT / "scaler_triton/integrations").glob("*.py") if f.stem not in SHARED),
]
DIRECTIVE = re.compile(r"^( *)\.\. (currentmodule|auto\w+):: (\S+)$", re.MULTILINE)


def on_the_page() -> dict[str, str]:
    """Return the directive of each name that the page has; a method's has its class before it."""
    found: dict[str, str] = {}
    module = owner = ""
    for indent, kind, name in DIRECTIVE.findall(PAGE):
        if kind == "currentmodule":
            module = name
            continue
        full = f"{owner}.{name}" if indent else name if name.startswith("scaler_triton.") else f"{module}.{name}"
        owner = owner if indent else full
        found[full] = kind
    return found


ON_THE_PAGE = on_the_page()
FUNCTIONS = [name for name, kind in ON_THE_PAGE.items() if kind in ("autofunction", "automethod")]
CLASSES = [name for name, kind in ON_THE_PAGE.items() if kind == "autoclass"]


def resolved(name: str) -> Any:
    """Import what a dotted name means; an integration only where its framework is."""
    if name.startswith(INTEGRATIONS):
        pytest.importorskip(name.removeprefix(INTEGRATIONS).partition(".")[0])
    return pkgutil.resolve_name(name)


def public() -> dict[str, Any]:
    """Return what users may call, by name: without what the scalers have of torch."""
    found = {name: getattr(scaler_triton, name) for name in scaler_triton.__all__ if name not in ("__version__", "ops")}
    found |= {f"ops.{name}": getattr(ops, name) for name in ops.__all__}
    for cls in (GradScaler, ShardedGradScaler):
        for name, member in inspect.getmembers(cls):
            home = getattr(getattr(member, "fget", member), "__module__", None) or ""
            if not name.startswith("_") and home.startswith("scaler_triton"):
                found[f"{cls.__name__}.{name}"] = member
    return found


def test_every_public_name_is_on_the_page() -> None:
    documented = [resolved(name) for name in ON_THE_PAGE if not name.startswith(INTEGRATIONS)]
    assert [name for name, thing in public().items() if thing not in documented] == []


def defined(module: str) -> list[str]:
    """Return the functions and classes that a module's source gives users."""
    body = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text()).body
    names = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [f"{module}.{name}" for name in names if not name.startswith("_")]


@pytest.mark.parametrize("module", MODULES)
def test_so_is_that_of_a_module_which_users_import(module: str) -> None:
    assert defined(module) != []
    assert [name for name in defined(module) if name not in ON_THE_PAGE] == []


def described(thing: Any) -> set[str]:
    """Return the arguments that a docstring's section has."""
    section = re.search(r"^Args:\n((?:    .*\n?)+)", inspect.getdoc(thing) or "", re.MULTILINE)
    lines = re.findall(r"^    (\w+(?:, \w+)*): \S", section[1] if section else "", re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


def described_elsewhere(name: str) -> set[str]:
    """Return the arguments of what a docstring refers to for its own: its neighbour on the page."""
    doc = inspect.getdoc(resolved(name)) or ""
    refers = re.search(r"^(?:Args and raises: as|The other arguments are) `(\w+)`", doc, re.MULTILINE)
    return described(resolved(f"{name.rpartition('.')[0]}.{refers[1]}")) if refers else set()


def is_setter(name: str, arguments: set[str], doc: str) -> bool:
    """Tell whether one line says all."""
    return ".set_" in name and len(arguments) == 1 and "\n" not in doc


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_a_docstring_describes_each_argument_and_no_other(name: str) -> None:
    thing = resolved(name)
    arguments = set(inspect.signature(thing).parameters) - {"self"}
    if not is_setter(name, arguments, inspect.getdoc(thing) or ""):
        assert described(thing) <= arguments <= described(thing) | described_elsewhere(name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_docstring_says_what_is_returned(name: str) -> None:
    """In a section, or because all of it is about that: it begins with "Return" or, for a bool, with "Tell whether"."""
    function = resolved(name)
    doc, returns = inspect.getdoc(function) or "", inspect.signature(function).return_annotation
    begins = ("Return ", "Tell whether ") if returns == "bool" else ("Return ",)
    assert (returns != "None") == (doc.startswith(begins) or "\n\nReturns: " in doc)
