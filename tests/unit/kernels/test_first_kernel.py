"""docs/kernel.md's first kernel passes its own test, and kernels are registered where it says."""

import importlib.util
import re
import sys
from pathlib import Path

import kernel_cases as cases
import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/kernel.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
EXAMPLE = dict(zip(("multiply", "test_multiply"), BLOCKS, strict=True))
NIGHTLY = ROOT / "tests/nightly"
# Of one warp, which move a few numbers whatever the gradients.
NO_TRAFFIC = {"_update_scale_kernel", "_write_counts_kernel"}
NOT_TRIED = {"update_scale"}  # it runs after a step whose kernels did


def load(name, folder, monkeypatch, package=""):
    """Import a block of the text as a module, from a file: Triton reads a kernel's source there."""
    path = folder / f"{name}.py"
    path.write_text(EXAMPLE[name])
    spec = importlib.util.spec_from_file_location(f"{package}{name}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_the_first_kernel_passes_its_test(dtype, tmp_path, monkeypatch):
    load("multiply", tmp_path, monkeypatch, "scaler_triton.kernels.")
    load("test_multiply", tmp_path, monkeypatch).test_products_are_torchs(dtype)


def missing_from(module, kernel):
    """Return the places in which a kernel of `kernels/<module>.py` is not registered."""
    simulator = NIGHTLY / "simulator"
    places = [simulator / "aot_matrix.py", simulator / "launches.py"]
    places += [simulator / "test_traffic.py"] * (kernel not in NO_TRAFFIC)
    words = dict.fromkeys(places, rf"\b{kernel}\b") | {NIGHTLY / "mutants/catalogue.py": f'"kernels/{module}.py": '}
    missing = [path.name for path, word in words.items() if not re.search(word, path.read_text())]
    trials = (ROOT / "kernels/trial.py").read_text()
    is_tried = f"scaler_triton.kernels.{module} import" in trials or module in NOT_TRIED
    return missing + ["trial.py"] * (not is_tried)


def test_every_kernel_is_registered_in_five_places():
    found = {}
    for path in sorted((ROOT / "kernels").glob("*.py")):
        for kernel in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.MULTILINE):
            found[path.stem, kernel] = missing_from(path.stem, kernel)
    assert len(found) >= 7
    assert {name: missing for name, missing in found.items() if missing} == {}
    assert len(missing_from("nothing", "_nothing_kernel")) == 5
