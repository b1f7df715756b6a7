"""Nothing that the library reads can make it run code: no eval, no shell, no unpickling from a file."""

from __future__ import annotations

import ast
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import started

from scaler_triton import GradScaler, ShardedGradScaler

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "scaler_triton").rglob("*.py"))  # which does not follow the link to the kernels
FILES += sorted((ROOT / "kernels").rglob("*.py"))

FORBIDDEN = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {
    *("builtins", "importlib", "runpy", "ctypes"),
    *("pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"),
    *("subprocess", "pty", "asyncio"),
    *("socket", "urllib", "http"),
}
FORBIDDEN_STARTS = ("os.system", "os.popen", "os.exec", "os.spawn", "os.posix_spawn")
# Whoever has them: torch, numpy, a pickler, a process group; * could bring any of them.
FORBIDDEN_ENDS = {
    *("load", "loads", "*"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
HARMLESS = {"json.loads", "triton.language.load"}
# The audit reads what ranks have saved: by torch's loader of tensors and plain values, nothing else.
SAFE_LOADER = "torch.load(path, map_location='cpu', weights_only=True, mmap=True)"
ALLOWED = {
    ("auditing/saved.py", "torch.load"),
    # Modules of ours, or of a framework that is named in the code, when they are first wanted.
    *((file, "importlib.import_module") for file in ("__init__.py", "cli/__init__.py", "integrations/lightning.py")),
    # Is one there, and which version.
    ("cli/console.py", "importlib.util.find_spec"),
    ("integrations/versions.py", "importlib.metadata.version"),
    ("integrations/versions.py", "importlib.metadata.PackageNotFoundError"),
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT)).removeprefix("scaler_triton/")


def called(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield the dotted name of everything that is called by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def imported(tree: ast.AST) -> dict[str, str]:
    """Return what every name that is imported anywhere in the file stands for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update({a.asname or top(a.name): a.name if a.asname else top(a.name) for a in node.names})
        elif isinstance(node, ast.ImportFrom):
            found.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return found


def mentioned(tree: ast.AST) -> set[str]:
    """Return the full dotted names of all that is used or imported, called or not; of `a.b` not `a` as well."""
    known = imported(tree)
    used = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)]
    names = {*known.values(), *(known.get(top(name), top(name)) + name[len(top(name)) :] for name in used)}
    return names - {name.rpartition(".")[0] for name in names}


def top(name: str) -> str:
    return name.partition(".")[0]


def offences(source: str) -> list[str]:
    """Return what a file does that no file here may."""
    tree = ast.parse(source)
    shells = [name for name, call in called(tree) if any(word.arg == "shell" for word in call.keywords)]
    return shells + sorted(name for name in mentioned(tree) - HARMLESS if is_forbidden(name))


def is_forbidden(name: str) -> bool:
    return (
        name in FORBIDDEN
        or top(name) in FORBIDDEN_MODULES
        or name.startswith(FORBIDDEN_STARTS)
        or name.rpartition(".")[2] in FORBIDDEN_ENDS
    )


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_can_run_what_it_reads(path: Path) -> None:
    allowed = [word for file, word in ALLOWED if file == name_of(path)]
    assert [offence for offence in offences(path.read_text()) if offence not in allowed] == []


@pytest.mark.parametrize(
    "source",
    ["eval('1')", "import os as o\no.popen('ls')", "f(['ls'], shell=True)", "from torch import load as l", "e = eval"],
)
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert offences(source)


def test_what_is_allowed_is_there() -> None:
    found = {(name_of(path), offence) for path in FILES for offence in offences(path.read_text())}
    assert found >= ALLOWED


def test_the_only_file_that_is_loaded_is_loaded_safely() -> None:
    tree = ast.parse((ROOT / "scaler_triton/auditing/saved.py").read_text())
    assert [ast.unparse(call) for name, call in called(tree) if name == "torch.load"] == [SAFE_LOADER]


class Recorder(pickle.Unpickler):
    """Notes what a pickle asks to be imported."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.asked: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.asked.add((module, name))
        return super().find_class(module, name)


@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
def test_a_pickled_scaler_asks_for_its_own_class_only(cls: Any) -> None:
    """Whatever else it asked for could never move."""
    recorder = Recorder(pickle.dumps(started(cls, "cpu")))
    assert type(recorder.load()) is cls
    assert recorder.asked - {("copyreg", "_reconstructor"), ("builtins", "object")} == {(cls.__module__, cls.__name__)}
