"""The house: imports go down, an import is light."""

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import scaler_triton

ROOT = Path(__file__).parents[2]
PACKAGE, KERNELS = ROOT / "scaler_triton", ROOT / "kernels"
ROOMS = ("clipping", "guard", "measuring", "report", "watch")
CORE = {f"scaler_triton.{path.stem}": path for path in PACKAGE.glob("*.py") if path.stem != "patching"}
CORE |= {
    f"scaler_triton.{room}.{path.stem}": path for room in ("core", *ROOMS) for path in (PACKAGE / room).glob("*.py")
}
CORE |= {f"scaler_triton.kernels.{path.stem}": path for path in KERNELS.glob("*.py")}
MOST_FLOORS = 12  # seven of them the core


def imported_with(path: Path) -> set[str]:
    """Return the modules of the core that are imported together with a file, or for its types only not at all."""
    found: set[str] = set()
    for node in statements(ast.parse(path.read_text()).body):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(CORE)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield what runs when a module is imported."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from statements(node.body + node.orelse)
        elif isinstance(node, ast.Try | ast.With):
            yield from statements(node.body)


@functools.cache
def floor(module: str) -> int:
    """Return how many files' imports stand on top of each other; a circle ends in a RecursionError."""
    return 1 + max(map(floor, imported_with(CORE[module])), default=0)


def test_imports_go_down_without_a_circle() -> None:
    assert max(map(floor, CORE)) <= MOST_FLOORS


def modules_that_are_named(path: Path) -> set[str]:
    """Return the parts of the package that a file imports anywhere, also for its types only or when it is called."""
    tree = [*ast.walk(ast.parse(path.read_text()))]
    names = {node.module or "" for node in tree if isinstance(node, ast.ImportFrom)}
    names |= {f"{n.module}.{a.name}" for n in tree if isinstance(n, ast.ImportFrom) for a in n.names}
    return {name.split(".")[1] for name in names if name.startswith("scaler_triton.")}


def test_what_is_around_is_known_to_no_module_within_nor_the_scaler_to_the_kernels() -> None:
    around = {"cli", "demo", "auditing", "integrations", "patching"}
    for module, path in CORE.items():
        named = modules_that_are_named(path)
        assert not named & around or path.stem.startswith("__"), module
        assert named <= {"kernels"} or ".kernels." not in module, module


def test_the_core_neither_imports_nor_names_a_room() -> None:
    """A step reads without them: they register as looks, observers or the rule. torch's guards are its own."""
    of_rooms = re.compile(r"spike|measur|headroom|report|\bmark|clip|\bnorms?\b|watch|\bguard", re.IGNORECASE)
    of_torch = re.compile(r"torch's (private )?guards?|torch\._C\._dynamo\.guards|share a guard|^guard finds")
    for path in (PACKAGE / "core").glob("*.py"):
        assert modules_that_are_named(path) <= {"core", "kernels", "policy", "text"}, path
        lines = [of_torch.sub("", line) for line in path.read_text().splitlines()]
        assert [line for line in lines if of_rooms.search(line)] == [], path


FACADES = {"grad_scaler": "GradScaler", "sharded": "ShardedGradScaler", "guard.step_guard": "StepGuard"}
# They are about the user's object itself: older optimizers ask for it, and a subclass has methods of its own.
ABOUT_THE_SCALER = {("core.fused", "step_by_argument"), ("core.overrides", "overrides")}


def uses_of_a_scaler(module: str, source: str) -> list[str]:
    """Return the imports, names and parameters by which a module below the scaler could read all of it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            from_module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = {from_module} | {alias.name for alias in node.names}
            names |= {f"{from_module}.{alias.name}" for alias in node.names}
            found += sorted(names & {f"scaler_triton.{each}" for each in FACADES})
        elif isinstance(node, ast.FunctionDef | ast.Lambda):
            named = node.name if isinstance(node, ast.FunctionDef) else "lambda"
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            if (module, named) not in ABOUT_THE_SCALER:
                found += [f"{named}({each.arg})" for each in every if each and each.arg in ("scaler", "grad_scaler")]
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            found += [name] * (name in FACADES.values())
        elif isinstance(node, ast.Constant) and node.value in FACADES.values():  # an annotation in quotes
            found.append(node.value)
    return found


def test_below_the_scaler_nobody_takes_it_or_knows_its_class() -> None:
    """They get what they need. Who has the whole scaler may keep its scale, which users assign, or miss an override."""
    around = "import scaler_triton.sharded\ndef f(scaler: 'GradScaler', *, grad_scaler=lambda scaler: StepGuard): ..."
    assert len(uses_of_a_scaler("parts", around)) == 6
    assert uses_of_a_scaler("parts", "from scaler_triton import grad_scaler") == ["scaler_triton.grad_scaler"]
    above = {"__init__", "__main__", *FACADES}
    for path in [PACKAGE / "parts.py", *(each for room in ("core", *ROOMS) for each in (PACKAGE / room).glob("*.py"))]:
        module = path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
        if module not in above:
            assert uses_of_a_scaler(module, path.read_text()) == [], module


def test_an_import_loads_neither_triton_nor_fsdp() -> None:
    heavy = ["triton", "torch.distributed.fsdp", "scaler_triton.sharded", "scaler_triton.demo"]
    show = f"import json, sys, torch, scaler_triton; scaler_triton.GradScaler('cpu'); print([x for x in {heavy} "
    show += "if x in sys.modules], torch.cuda.is_initialized())"
    assert subprocess.check_output([sys.executable, "-c", show], cwd=ROOT, text=True, timeout=60) == "[] False\n"
    lazy = "import json, sys, scaler_triton; print(json.dumps([dir(scaler_triton), 'torch' in sys.modules]))"
    names, is_loaded = json.loads(subprocess.check_output([sys.executable, "-c", lazy], cwd=ROOT, timeout=60))
    assert "GradScaler" in names
    assert not is_loaded


def test_the_frameworks_lines_are_imported_from_the_package_and_name_what_is_absent() -> None:
    code = """
import sys
sys.modules["accelerate"] = None
import scaler_triton
from scaler_triton import fsdp_precision, mixed_precision, step_guard_precision, use_scaler_triton, use_step_guard
for use in (use_scaler_triton, use_step_guard):
    try:
        use(object())
    except ImportError as error:
        print(error)
try:
    mixed_precision(object)
except TypeError as error:
    print(error)
"""
    said = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=120)
    needed = "needs accelerate, which is not installed here: pip install accelerate"
    lines = said.splitlines()
    assert lines[:2] == [f"use_scaler_triton {needed}", f"use_step_guard {needed}"]
    assert lines[2].startswith("framework must be Lightning's class Trainer or Fabric")


def test_a_broken_framework_is_not_called_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> None:
        raise ModuleNotFoundError("No module named 'psutil'", name="psutil")

    monkeypatch.setattr(scaler_triton, "import_module", import_module)
    with pytest.raises(ModuleNotFoundError, match="psutil"):
        scaler_triton.use_step_guard  # noqa: B018


def test_exports() -> None:
    assert scaler_triton.__all__ == sorted(scaler_triton.__all__, key=str)
    for name in scaler_triton.__all__:
        assert getattr(scaler_triton, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        scaler_triton.nothing  # noqa: B018
