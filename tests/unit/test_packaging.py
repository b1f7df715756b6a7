"""The wheel and the checkout hold what they should, and `import kernels` is never ours."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Build a wheel by way of an sdist, of a checkout without symbolic links; return the names in it."""
    # Not "build": a checkout's folder of that name, which `pip install .` leaves, can be imported, too.
    pytest.importorskip("build.__main__", reason="wheels are built where the development environment is")
    pytest.importorskip("setuptools", minversion="77")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    for name in tracked():
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, source / name)
    (source / "kernels/tuned/SomeGPU.json").write_text("{}")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)]
    run = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        return archive.namelist()


def test_the_wheel_holds_the_package_only_all_of_it_and_the_tuned_files(wheel: list[str]) -> None:
    assert {name.split("/")[0] for name in wheel if ".dist-info/" not in name} == {"scaler_triton"}
    sources = [n for n in tracked() if n.endswith(".py") and n.startswith(("scaler_triton/", "kernels/"))]
    wanted = {n if n.startswith("scaler_triton/") else f"scaler_triton/{n}" for n in sources}
    assert {n for n in wheel if n.endswith(".py")} == wanted
    assert {"scaler_triton/py.typed", "scaler_triton/kernels/tuned/SomeGPU.json"} <= set(wheel)


def test_pyproject_alone_says_where_the_repository_is() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    docs = [path for path in ROOT.glob("docs/**/*") if path.suffix in (".md", ".py", ".ipynb")]
    texts = [path.read_text() for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *docs)]
    named = {url for text in texts for url in re.findall(r"https://github\.com/[\w-]+/scaler_triton", text)}
    assert {*urls.values()} == named | {urls["Source"]}


def test_the_kernels_are_a_link_in_a_checkout() -> None:
    assert (ROOT / "scaler_triton/kernels").readlink() == Path("../kernels")


def test_an_installed_kernels_package_wins_over_our_folder(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("theirs = True")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; assert kernels.theirs"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
