"""The house: who may import whom, how little an import costs, what the public names promise."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import scaler_triton
from scaler_triton import ShardedGradScaler, ops
from scaler_triton.patching import cpu_amp, cuda_amp

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "scaler_triton"

FOLDERS = ("auditing", "clipping", "integrations", "patching")

# module -> what of this project it may import when it is imported; kernels only inside functions
ALLOWED = {
    "_version": set(),
    "neighbours": set(),
    "host_memory": set(),
    "inverse": {"host_memory"},
    "placement": set(),
    "batch": {"inverse", "neighbours"},
    "gradients": {"placement"},
    "policy": {"words"},
    "mirror": {"host_memory"},
    "cuda_graphs": set(),
    "waiting": set(),
    "limits": {"policy", "stats"},
    "stats": {"cuda_graphs", "mirror", "waiting"},
    "step_state": set(),
    "copying": {"attributes", "collectives", "stats"},
    "settings": {"attributes", "cuda_graphs", "limits", "policy", "stats", "waiting"},
    "optimizers": set(),
    "lending": set(),
    "dispatch": {"callers", "cuda_graphs", "waiting"},
    "reference": {"neighbours"},
    "reference_update": {"limits", "policy", "stats"},
    "collectives": set(),
    "agreement": {"collectives", "placement"},
    "known_forms": set(),
    "overflow_marks": {"batch", "cuda_graphs", "stats"},
    "plan": {"batch", "gradients", "known_forms", "overflow_marks", "placement"},
    "left_unscaled": {"cuda_graphs", "mirror", "optimizers", "placement"},
    "records": {"cuda_graphs", "left_unscaled", "optimizers", "plan", "step_state"},
    "scale_comparison": {"waiting"},
    "flags": set(),
    "verdict": {"agreement", "cuda_graphs", "flags", "host_memory", "mirror", "scale_comparison"},
    "attributes": {"dispatch", "limits", "records", "stats"},
    "agreeing": {
        "agreement",
        "callers",
        "collectives",
        "patching/stand_in",
        "placement",
        "states",
        "step_state",
        "verdict",
    },
    "flag_buffer": {"verdict", "waiting"},
    "states": {"attributes", "cuda_graphs", "flags", "left_unscaled", "optimizers", "step_state", "verdict"},
    "naming": {"placement"},
    "words": set(),
    "overflow_report": {"overflow_marks", "words"},
    "overflow": {"collectives", "naming", "overflow_report", "placement", "states", "stats", "words"},
    "batch_ops": {"batch", "dispatch", "reference"},
    "ops": {
        "batch",
        "batch_ops",
        "clipping/clip_ops",
        "clipping/reference_norm",
        "dispatch",
        "gradients",
        "placement",
        "policy",
        "reference_update",
    },
    "unscaling": {
        "agreeing",
        "batch_ops",
        "cuda_graphs",
        "dispatch",
        "flag_buffer",
        "flags",
        "inverse",
        "optimizers",
        "plan",
        "stats",
        "step_state",
        "verdict",
    },
    "updating": {
        "batch_ops",
        "cuda_graphs",
        "dispatch",
        "limits",
        "overflow",
        "reference_update",
        "settings",
        "stats",
        "step_state",
        "left_unscaled",
        "words",
    },
    "grad_scaler": {
        "attributes",
        "callers",
        "clipping/clip",
        "copying",
        "cuda_graphs",
        "dispatch",
        "lending",
        "limits",
        "optimizers",
        "patching/stand_in",
        "policy",
        "scaling",
        "step_state",
        "untraced",
        "updating",
    },
    "untraced": set(),
    "compiled": {"batch", "ops"},
    "migration": {"limits", "policy", "stats"},
    "scaling": {"attributes", "cuda_graphs", "left_unscaled"},
    "sharded": {"grad_scaler", "scaling"},
    "clipping/reference_norm": {"reference"},
    "clipping/reference_clip": {"clipping/reference_norm", "neighbours", "reference"},
    "clipping/clip_ops": {"batch", "batch_ops", "clipping/reference_clip", "clipping/reference_norm", "dispatch"},
    "clipping/rank_norms": {"clipping/copies", "gradients", "placement"},
    "clipping/disabled": {
        "agreement",
        "batch",
        "clipping/arguments",
        "clipping/copies",
        "clipping/rank_norms",
        "clipping/reference_clip",
        "clipping/reference_norm",
        "collectives",
        "placement",
    },
    "clipping/arguments": {"callers", "optimizers", "policy", "words"},
    "clipping/copies": {"collectives", "placement"},
    "clipping/parts": {"clipping/rank_norms", "optimizers", "step_state", "unscaling"},
    "clipping/at_once": {
        "batch_ops",
        "clipping/arguments",
        "clipping/copies",
        "clipping/clip_ops",
        "clipping/parts",
        "clipping/reference_norm",
        "dispatch",
        "flags",
        "scale_comparison",
        "verdict",
    },
    "clipping/after_unscaling": {
        "clipping/arguments",
        "clipping/parts",
        "clipping/rank_norms",
        "clipping/reference_clip",
        "clipping/reference_norm",
        "left_unscaled",
    },
    "clipping/clip": {
        "clipping/after_unscaling",
        "clipping/arguments",
        "clipping/at_once",
        "clipping/copies",
        "clipping/disabled",
        "clipping/parts",
        "optimizers",
    },
    "auditing/state": set(),
    "auditing/comparison": {"auditing/state", "words"},
    "auditing/report": {"auditing/comparison", "auditing/state", "words"},
    "auditing/fingerprint": set(),
    "auditing/replicas": {"auditing/fingerprint", "auditing/state", "naming", "optimizers", "placement", "words"},
    "auditing/audit": {
        "auditing/replicas",
        "auditing/report",
        "auditing/state",
        "collectives",
        "optimizers",
        "placement",
        "words",
    },
    "auditing/saved_states": {"auditing/saved_tensors", "auditing/state", "words"},
    "auditing/saved_tensors": {"auditing/fingerprint"},
    "auditing/command": {"auditing/report", "auditing/state", "console", "words"},
    "callers": set(),
    "patching/stand_in": set(),
    "patching/takers": set(),
    "patching/deprecated": {"grad_scaler"},
    "patching/cuda_amp": {"patching/deprecated"},
    "patching/cpu_amp": {"patching/deprecated"},
    "patching/patch": {
        "callers",
        "grad_scaler",
        "patching/cpu_amp",
        "patching/cuda_amp",
        "patching/stand_in",
        "patching/takers",
        "policy",
        "sharded",
    },
    "console": set(),
    "tune": {"_version", "console", "words"},
    "info": {"_version", "console", "words"},
    "integrations/lightning": {"grad_scaler", "integrations/backwards", "integrations/versions"},
    "integrations/accelerate": {"grad_scaler", "integrations/backwards", "integrations/versions", "optimizers"},
    "integrations/backwards": {"left_unscaled"},
    "integrations/versions": {"callers"},
}


def imported(path: Path, *, everywhere: bool) -> set[str]:
    """Return the modules that a file imports: all, or only those imported with it."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else iter(top_level(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def top_level(tree: ast.Module) -> list[ast.stmt]:
    guards = [n for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    return [n for n in tree.body if n not in guards]


def ours(names: set[str]) -> set[str]:
    """Return which of our modules these names mean; a name in a package's folder is "folder/module"."""
    parts = [name.split(".")[1:3] for name in names if name.startswith("scaler_triton.")]
    return {part[0] if part[0] not in FOLDERS else "/".join(part) for part in parts} - set(FOLDERS)


@pytest.mark.parametrize("module", ALLOWED)
def test_imports_point_downwards(module: str) -> None:
    assert ours(imported(PACKAGE / f"{module}.py", everywhere=False)) <= ALLOWED[module]


def test_every_module_is_in_the_list() -> None:
    known = set(ALLOWED) | {"__init__", "__main__", "cli"}
    found = {f"{folder}/{p.stem}" for folder in FOLDERS for p in PACKAGE.glob(f"{folder}/*.py")}
    assert {path.stem for path in PACKAGE.glob("*.py")} | found == known | {f"{folder}/__init__" for folder in FOLDERS}


def test_contributing_says_of_every_module_what_the_module_says() -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    for path in PACKAGE.glob("*.py"):
        if not path.stem.startswith("_"):
            said = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0].rstrip(".")
            assert f"| `{path.name}` | {said} |" in contributing


def test_kernels_import_nothing_above_themselves() -> None:
    for path in (ROOT / "kernels").glob("*.py"):
        assert ours(imported(path, everywhere=True)) <= {"kernels"}, path


MEASURE = """
import json, sys, time
start = time.process_time()  # others may use the machine, too
import torch
sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False  # the first run compiles what is ours
begin = time.process_time()
import scaler_triton
scaler_triton.GradScaler
seconds = time.process_time() - begin
heavy = [n for n in ("triton", "torch.distributed.fsdp", "scaler_triton.sharded", "numpy.testing") if n in sys.modules]
print(json.dumps([seconds, begin - start, heavy, torch.cuda.is_initialized()]))
"""


def test_import_is_light(tmp_path: Path) -> None:
    run = [sys.executable, "-c", MEASURE, str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}  # it would be measured
    results = [json.loads(subprocess.check_output(run, cwd=ROOT, env=env, timeout=120)) for _ in range(3)]
    # Seconds; where that takes torch more than two of them, the machine is slow or has much else to do.
    assert min(ours / max(1.0, torchs / 2) for ours, torchs, *_ in results) < 0.05
    assert results[0][2:] == [[], False]


def public_functions() -> list[object]:
    found: list[object] = [getattr(ops, name) for name in ops.__all__]
    for cls in (scaler_triton.GradScaler, ShardedGradScaler):
        found.append(cls)
        found.extend(
            member
            for name, member in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_") and member.__module__.startswith("scaler_triton")
        )
    return found


def annotated() -> list[object]:
    classes = (scaler_triton.GradScaler, ShardedGradScaler)
    functions = [thing for thing in public_functions() if not inspect.isclass(thing)]
    return [*(cls.__init__ for cls in classes), *functions, scaler_triton.audit]


@pytest.mark.parametrize("function", annotated(), ids=lambda function: getattr(function, "__qualname__", "?"))
def test_annotations_are_there_for_programs(function: object) -> None:
    """Command lines and configurations are made of them."""
    assert typing.get_type_hints(function)


@pytest.mark.parametrize("cls", [scaler_triton.GradScaler, ShardedGradScaler, cuda_amp.GradScaler, cpu_amp.GradScaler])
def test_annotations_of_classes_can_be_read(cls: type) -> None:
    """As those of torch's classes; it raises where a name is missing."""
    assert isinstance(typing.get_type_hints(cls), dict)


@pytest.mark.parametrize("thing", public_functions(), ids=lambda thing: getattr(thing, "__qualname__", "?"))
def test_public_names_are_documented(thing: object) -> None:
    assert thing.__doc__
    first = thing.__doc__.strip().splitlines()[0]
    assert first.endswith(".")  # one sentence


def test_names_that_load_late_are_seen_before_they_are_loaded() -> None:
    show = "import sys, scaler_triton; print(*dir(scaler_triton)); assert 'torch' not in sys.modules"
    shown = subprocess.check_output([sys.executable, "-c", show], cwd=ROOT, text=True, timeout=60)
    assert shown.split() == scaler_triton.__all__


def test_a_type_checker_finds_a_misspelt_name(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    use = tmp_path / "use.py"
    use.write_text("import scaler_triton\n\nscaler_triton.GradScaler\nscaler_triton.GradScalr\n")
    command = [sys.executable, "-m", "mypy", "--follow-imports=skip", "--cache-dir", str(tmp_path / "cache")]
    found = subprocess.run(
        [*command, str(PACKAGE / "__init__.py"), str(use)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert [line.partition(" error: ")[2] for line in found.stdout.splitlines()[:-1]] == [
        'Module has no attribute "GradScalr"; maybe "GradScaler"?  [attr-defined]'
    ]


def functions(path: Path) -> list[tuple[str, int]]:
    """Return each function's name and its length in lines, docstring left out."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            first = body[0].lineno if body else node.lineno
            found.append((f"{path.name}:{node.name}", (node.end_lineno or first) - first + 1))
    return found


def test_functions_can_be_read_at_a_glance() -> None:
    paths = [path for pattern in ("*.py", "*/*.py") for path in PACKAGE.glob(pattern)]
    lengths = [entry for path in paths for entry in functions(path)]
    assert sorted(length for _, length in lengths)[len(lengths) // 2] < 12
    assert [entry for entry in lengths if entry[1] > 40] == []
