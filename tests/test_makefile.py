"""The parts of `make gpu` run one after another whatever becomes of each, alone too, within their time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import Place

ROOT = Path(__file__).parents[1]
PARTS = ["gpu-tests", "gpu-ranks", "gpu-tune", "gpu-perf", "gpu-sanitize"]
LIMIT = 600  # seconds for each part

# Stands for the GPU machine's python3: writes down what it was to run, and fails where it is told to.
PYTHON = """#!/bin/sh
echo "$@" >> calls
case "$*" in *"$FAILING"*) exit 3 ;; esac
"""
SANITIZER = """#!/bin/sh
echo sanitize.sh "$OUT" >> calls
"""
DOES = {
    "gpu-tests": "tests/in_shards.py -W",
    "gpu-ranks": "tests/in_shards.py tests/distributed tests/fuzz/test_ranks.py -W",
    "gpu-sanitize": "sanitize.sh results",
    "gpu-perf": "-m perf --out results",
    "gpu-tune": "-m scaler_triton tune --out results/tuned",
}

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(folder: Path, target: str, failing: str = "nothing") -> tuple[int, list[str]]:
    """Run a target of the Makefile in `folder`; its status, and what it ran."""
    for path, text in {"python3": PYTHON, "tests/kernels/sanitize.sh": SANITIZER}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        (folder / path).chmod(0o755)
    shutil.copy(ROOT / "Makefile", folder)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "FAILING": failing}
    command = ["make", target, "OUT=results"]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return run.returncode, (folder / "calls").read_text().splitlines()


def parts_of(calls: list[str]) -> list[str]:
    """Return the parts that ran, in order."""
    return [part for call in calls for part, sign in DOES.items() if sign in call]


@pytest.mark.parametrize("failing", ["in_shards", "-m perf", "tune"])
def test_a_part_that_fails_stops_no_other_and_is_told(failing: str, tmp_path: Path) -> None:
    status, calls = make(tmp_path, "gpu", failing)
    assert parts_of(calls) == PARTS
    assert status != 0


def test_all_is_well_when_every_part_is(tmp_path: Path) -> None:
    status, calls = make(tmp_path, "gpu")
    assert (status, parts_of(calls)) == (0, PARTS)
    assert (tmp_path / "results/versions.txt").exists()


@pytest.mark.parametrize("part", [*PARTS, "sanitize"])
def test_each_part_can_be_called_alone(part: str, tmp_path: Path) -> None:
    status, calls = make(tmp_path, part)
    assert (status, parts_of(calls)) == (0, ["gpu-sanitize" if part == "sanitize" else part])


@pytest.mark.parametrize("part", [*PARTS, "sanitize"])
def test_without_a_gpu_each_part_fails(part: str, tmp_path: Path) -> None:
    status, calls = make(tmp_path, part, "device='cuda'")
    assert status != 0
    assert parts_of(calls) == []


def test_each_part_ends_in_time() -> None:
    recipes = dict(re.findall(r"^([a-z-]+)[^:\n]*:[^=\n]*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M))
    limits = {name: sum(map(int, re.findall(r"timeout (?:--\S+ )*(\d+)", recipe))) for name, recipe in recipes.items()}
    for part in set(PARTS) - {"gpu-sanitize"}:
        assert 0 < limits[part] < LIMIT - limits["has-gpu"], part
    script = (ROOT / "tests/kernels/sanitize.sh").read_text()
    (limit,), (tools,) = re.findall(r"LIMIT:-(\d+)", script), re.findall(r"for tool in (.*); do", script)
    assert 0 < int(limit) * len(tools.split()) < LIMIT - limits["has-gpu"]


def test_the_report_of_gpu_tests_takes_what_tests_record(tmp_path: Path) -> None:
    (tmp_path / "test_recording.py").write_text("def test_it(record_property):\n    record_property('place', 'here')\n")
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}", "-q"]
    command += ["-p", "no:cacheprovider", f"--junitxml={tmp_path / 'junit.xml'}", str(tmp_path / "test_recording.py")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout
    assert '<property name="place" value="here"' in (tmp_path / "junit.xml").read_text()


def test_gpu_tests_go_on_where_a_file_cannot_be_imported(tmp_path: Path) -> None:
    """And tell of it by their status."""
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "test_sound.py").write_text("def test_it():\n    pass\n")
    options = re.search(r"^NATIVELY := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    command = [sys.executable, "-m", "pytest", *options[1].split(), "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    run = subprocess.run(
        [*command, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode != 0
    assert "1 passed, 1 error" in run.stdout


def test_tests_under_a_tool_end_before_the_tool_is_ended() -> None:
    script = (ROOT / "tests/kernels/sanitize.sh").read_text()
    assert "export TEST_SECONDS=$((LIMIT - " in script
    (seconds, limit) = re.search(r"TEST_SECONDS=(\d+) timeout \S+ \S+ (\d+) ", (ROOT / "Makefile").read_text()).groups()
    assert 0 < int(seconds) < int(limit)
    (path, name) = re.search(r"--deselect (\S+)::(\w+)", script).groups()
    assert f"def {name}(" in (ROOT / path).read_text()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_policy.py"]
    environment = {**os.environ, "TEST_SECONDS": "0"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert "out of time" in run.stdout
    assert "1 passed" in run.stdout


def test_what_needs_no_gpu_comes_last_on_a_gpu_machine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time may run out before it. A test that runs everywhere runs on the GPU, too, and is not marked."""
    turn = request.config.pluginmanager.get_plugin(str(ROOT / "tests/conftest.py")).turn

    def item(path: str, *marks: str, **params: object) -> SimpleNamespace:
        callspec = {"callspec": SimpleNamespace(params=params)} if params else {}
        return SimpleNamespace(path=Path(path), get_closest_marker=lambda name: name in marks, **callspec)

    items = [
        item("tests/test_gpu.py", "gpu"),
        item("tests/kernels/test_probe.py"),
        item("tests/test_tune.py", "native"),
        item("tests/test_norms.py", place=Place("cuda", "triton"), dtype="float32"),
        item("tests/frameworks/test_accelerate.py", "gpu"),
        item("tests/frameworks/test_recipes.py", "native"),
        item("tests/distributed/test_offload.py", "gpu", "distributed"),
        item("tests/demo/test_demo_on_gpu.py", "gpu", "distributed"),
        item("tests/test_norms.py", place=Place("cpu", "torch")),
        item("tests/kernels/test_aot.py", "host_only"),
        item("tests/test_policy.py"),
        item("tests/distributed/test_matrix.py", "distributed"),
    ]
    assert [turn(each) for each in items] == [0, 1, 1, 1, 2, 2, 3, 4, 5, 5, 5, 5]
    monkeypatch.setenv("RANKS_ON", "cuda")
    assert [turn(each) for each in items] == [0, 1, 1, 1, 2, 2, 3, 4, 5, 5, 5, 1]


def test_a_test_that_takes_too_long_is_interrupted_and_the_report_written(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text("import time\n\ndef test_it():\n    time.sleep(50)\n")
    report = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += [f"--rootdir={tmp_path}", f"--junitxml={report}", str(tmp_path / "test_slow.py")]
    environment = {**os.environ, "TEST_SECONDS": "-9", "PYTHONPATH": str(ROOT / "tests")}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=40, check=False)
    assert run.returncode == 2, run.stdout + run.stderr
    assert "KeyboardInterrupt: out of time" in run.stdout
    assert report.exists()


def test_nothing_interrupts_the_report_or_the_end_of_the_process(tmp_path: Path) -> None:
    tell = "    print('interrupted in', signal.getitimer(signal.ITIMER_REAL)[0])\n"
    (tmp_path / "conftest.py").write_text(f"import signal\n\ndef pytest_terminal_summary():\n{tell}")
    (tmp_path / "test_quick.py").write_text("def test_it():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += [f"--rootdir={tmp_path}", str(tmp_path)]
    environment = {**os.environ, "TEST_SECONDS": "1000", "PYTHONPATH": str(ROOT / "tests")}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "interrupted in 0.0\n" in run.stdout


def test_packages_that_a_target_does_not_install_are_not_asked_for() -> None:
    """With HEAVY=1 a test of theirs fails where they are missing."""
    lines = re.findall(r"^\tHEAVY=1 .*pytest.*", (ROOT / "Makefile").read_text(), re.M)
    assert len(lines) == 3
    for line in lines:
        assert ("out/peers " in line) != ("--ignore tests/frameworks/peers" in line), line


def test_every_target_is_listed() -> None:
    """At the top of the file, where people look, and as no file."""
    text = (ROOT / "Makefile").read_text()
    targets = [name for line in re.findall(r"^([a-z][a-z -]*):", text, re.M) for name in line.split()]
    head = text[: text.index("PYTHON ?=")]
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.M)
    known = phony.replace("$(GPU_PARTS)", " ".join(PARTS)).split()
    assert set(targets) == set(known)
    assert {name for name in targets if name not in head} <= {"has-gpu", "sanitize", "style", "clean"}


def test_every_change_is_linted_documented_and_tested() -> None:
    """A warning of the documentation is an error; the tests are those that the front page names."""
    steps = (ROOT / ".ci/run").read_text().splitlines()
    assert {"set -euo pipefail", "make lint", "make docs", "timeout 1200 $command"} <= {*steps}
    docs = subprocess.run(["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "--fail-on-warning" in docs.stdout
