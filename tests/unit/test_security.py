"""Nothing that the library reads can make it run code: no eval, no shell, no unpickling from a file."""

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

# Words that no file may use, whatever they are a part of: a name, an attribute, an import, an argument.
FORBIDDEN = {
    *("eval", "exec", "compile", "__import__", "shell", "*"),
    *("builtins", "importlib", "runpy", "ctypes"),
    *("load", "loads", "pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"),
    *("system", "popen", "subprocess", "pty", "asyncio", "socket", "urllib", "http"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
FORBIDDEN_STARTS = ("exec", "spawn", "posix_spawn")
HARMLESS = {"json.loads", "tl.load", "re.compile", "platform.system"}
# The audit reads what ranks have saved: by torch's loader of tensors and plain values, nothing else.
SAFE_LOADER = "torch.load(path, map_location='cpu', weights_only=True, mmap=True)"
ALLOWED = {
    ("auditing/saved.py", "load"),
    # Modules of ours, or of a framework that is named in the code, when they are first wanted; and their versions.
    *((f"{file}.py", "importlib") for file in ("__init__", "cli/__init__", "cli/console")),
    *((f"integrations/{file}.py", "importlib") for file in ("lightning", "versions")),
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT)).removeprefix("scaler_triton/")


def words(tree: ast.AST) -> Iterator[str]:
    """Yield every word that a file uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node) not in HARMLESS:
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
        elif isinstance(node, ast.keyword):
            yield node.arg or ""


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_can_run_what_it_reads(path: Path) -> None:
    used = words(ast.parse(path.read_text()))
    found = {(name_of(path), word) for word in used if word in FORBIDDEN or word.startswith(FORBIDDEN_STARTS)}
    assert found <= ALLOWED


def test_the_only_file_that_is_loaded_is_loaded_safely() -> None:
    tree = ast.parse((ROOT / "scaler_triton/auditing/saved.py").read_text())
    calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert [call for call in calls if call.startswith("torch.load(")] == [SAFE_LOADER]


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
