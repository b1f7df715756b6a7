"""The wheel and the checkout hold what they should, and `import kernels` is never ours."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import scaler_triton

ROOT = Path(__file__).parents[1]


def tracked() -> list[str]:
    """Return the project's files: what git tracks, or everything where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    if shutil.which("git"):
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if run.returncode == 0 and run.stdout:
            return run.stdout.splitlines()
    folders = ("scaler_triton", "kernels")
    found = [str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [*found, "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tree without its link, as a checkout without symbolic links has it."""
    pytest.importorskip("build", reason="wheels are built where the development environment is")
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("source")
    for name in tracked():
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / name)
    return folder


def built(source: Path, out: Path, *options: str) -> list[str]:
    """Build, and return the names in the wheel."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *options]
    run = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that `wheel` puts an sdist, and the wheel made of it, into."""
    return tmp_path_factory.mktemp("published")


@pytest.fixture(scope="module")
def wheel(source: Path, published: Path) -> list[str]:
    """Build a wheel by way of an sdist, as it is published."""
    return built(source, published)


def test_wheel_holds_tuned_files(source: Path, tmp_path: Path) -> None:
    (source / "kernels/tuned/SomeGPU.json").write_text("{}")
    assert "scaler_triton/kernels/tuned/SomeGPU.json" in built(source, tmp_path, "--wheel")


def test_an_index_would_take_both(wheel: list[str], published: Path) -> None:
    pytest.importorskip("twine", reason="is in the development environment")
    files = sorted(map(str, published.iterdir()))
    assert [Path(file).suffix for file in files] == [".whl", ".gz"]
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *files]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout
    assert run.stdout.count("PASSED") == 2


def test_wheel_holds_the_package_only(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"scaler_triton"}


def test_wheel_holds_every_module_and_the_kernels(wheel: list[str]) -> None:
    sources = [n for n in tracked() if n.endswith(".py") and n.startswith(("scaler_triton/", "kernels/"))]
    wanted = {n if n.startswith("scaler_triton/") else f"scaler_triton/{n}" for n in sources}
    assert {n for n in wheel if n.endswith(".py")} == wanted
    assert "scaler_triton/py.typed" in wheel


def test_kernels_folder_shadows_nothing() -> None:
    assert not (ROOT / "kernels/__init__.py").exists()
    link = ROOT / "scaler_triton/kernels"
    assert link.is_symlink()
    assert link.readlink() == Path("../kernels")
    assert link.resolve() == (ROOT / "kernels").resolve()


def test_an_installed_kernels_package_wins_over_our_folder(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("theirs = True")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; assert kernels.theirs"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_listed_packages_are_the_folders_on_disk() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    host = {p.parent for p in (ROOT / "scaler_triton").rglob("*.py") if "kernels" not in p.relative_to(ROOT).parts}
    names = {str(p.relative_to(ROOT)).replace("/", ".") for p in host}
    assert listed == names | {"scaler_triton.kernels", "scaler_triton.kernels.tuned"}


def test_version_is_written_in_one_place() -> None:
    """Beside it, the changelog's latest entry has it, released or not yet."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in settings["project"]["dynamic"]
    assert "version" not in settings["project"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "scaler_triton._version.__version__"}
    latest = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert re.fullmatch(rf"## {re.escape(scaler_triton.__version__)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", latest)


def test_version_is_the_installed_ones() -> None:
    from importlib import metadata

    try:
        installed = metadata.version("scaler_triton")
    except metadata.PackageNotFoundError:
        pytest.skip("runs from a checkout that is not installed")
    assert installed == scaler_triton.__version__
