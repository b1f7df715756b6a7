"""The suite in several processes: every test in one of them, and nothing that ended is lost with what did not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import in_shards
import pytest

ROOT = Path(__file__).parents[1]
TEST = "def test_it():\n    {}\n"
# What no interrupt ends, as a GPU that hangs.
STUCK = """
import signal, time
def test_it():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("stuck", flush=True)
    time.sleep(600)
"""


class Item(SimpleNamespace):
    """Stands for a test."""

    __hash__ = object.__hash__


def start(folder: Path, shards: int, *, grace: float = 6.0, **files: str) -> subprocess.Popen[str]:
    """Start the shards of these tests, the one in `kernels` taken for one that uses the GPU."""
    (folder / "kernels").mkdir()
    for name, text in files.items():
        (folder / ("kernels" if name == "gpu" else ".") / f"test_{name}.py").write_text(text)
    program = f"import sys, in_shards; in_shards.GRACE = {grace}; sys.exit(in_shards.main())"
    command = [sys.executable, "-c", program, f"--shards={shards}", "-qs", "-p", "tests.conftest"]
    command += ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={folder}", str(folder)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    # On a GPU machine these tests run where the GPU is hidden: so it would be from those that use it here.
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment = {**kept, "OUT": str(folder / "out"), "PYTHONPATH": paths, "TEST_SECONDS": "100"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def run(folder: Path, shards: int, **files: str) -> tuple[int, str]:
    """Run them; the status, and what was printed."""
    process = start(folder, shards, **files)
    said, _ = process.communicate(timeout=60)
    return process.returncode, said


def reported(path: Path) -> list[list[str]]:
    """Return the modules whose tests a report holds, one shard's after the other's."""
    suites = ElementTree.parse(path).iter("testsuite")
    return [[case.get("classname", "").split(".")[-1] for case in suite.iter("testcase")] for suite in suites]


def test_every_test_is_in_one_shard(tmp_path: Path) -> None:
    sound = TEST.format("pass")
    status, said = run(tmp_path, 4, gpu=sound, a=sound, b=sound)
    assert status == 0, said
    assert reported(tmp_path / "out/junit.xml") == [["test_gpu"], [], ["test_a"], ["test_b"]]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["junit.xml", "tests.log"]
    log = (tmp_path / "out/tests.log").read_text()
    for number in range(4):
        assert f"shard {number}/4, status " in log
        assert f"shard {number}/4, status " in said


@pytest.mark.parametrize("shards", [2, 4])
def test_what_uses_no_gpu_does_not_see_it(tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as this test is run beside a GPU
    seen = "import os\n" + TEST.format("assert os.environ.get('CUDA_VISIBLE_DEVICES') {} ''")
    status, said = run(tmp_path, shards, gpu=seen.format("!="), a=seen.format("=="))
    assert status == 0, said


def test_several_shards_share_what_uses_the_gpu(request: pytest.FixtureRequest) -> None:
    """The largest files first; of the processes that use it one shard has all."""
    shards_of = request.config.pluginmanager.get_plugin(str(ROOT / "tests/conftest.py")).shards_of

    def items(path: str, count: int, *marks: str) -> list[SimpleNamespace]:
        return [Item(path=Path(path), get_closest_marker=lambda name: name in marks) for _ in range(count)]

    several = [("kernels/test_a.py", 1), ("kernels/test_b.py", 5), ("kernels/test_c.py", 2), ("kernels/test_d.py", 2)]
    found = [item for path, count in several for item in items(path, count)]
    found += items("distributed/test_e.py", 2, "gpu", "distributed") + items("test_f.py", 1) + items("test_g.py", 2)
    shards = shards_of(found, 6)
    held = {(item.path.name[5], shards[item]) for item in found}
    assert held == {("b", 0), ("c", 1), ("d", 2), ("a", 1), ("e", 3), ("g", 4), ("f", 5)}


def test_of_many_shards_two_have_the_processes_that_use_the_gpu() -> None:
    assert [(in_shards.by_itself(count), in_shards.on_gpu(count)) for count in (2, 3, 6, 8, 9)] == [
        *[(1, 1), (1, 2), (3, 4), (3, 5), (3, 5)]
    ]


def test_a_gpu_that_is_needed_and_missing_fails(tmp_path: Path) -> None:
    """Else all of its tests would pass by being skipped; the shards that are not to see it do not need it."""
    (tmp_path / "test_it.py").write_text(TEST.format("pass"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += [f"--rootdir={tmp_path}", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "CUDA_VISIBLE_DEVICES": ""}
    for variables, status in ({"NEEDS_GPU": "1"}, 3), ({"NEEDS_GPU": "1", **in_shards.HIDDEN}, 0):
        run = subprocess.run(command, cwd=ROOT, env=environment | variables, capture_output=True, timeout=60)
        assert run.returncode == status, run.stdout


def test_a_shard_that_fails_is_shown_and_is_the_status(tmp_path: Path) -> None:
    """Of two shards the second has all that uses no GPU."""
    sound = TEST.format("pass")
    status, said = run(tmp_path, 2, gpu=sound, a=TEST.format("assert 'us' == 'them'"), b=sound)
    assert status == 1
    assert "shard 0/2, status 0: 1 passed, 2 deselected" in said
    assert "shard 1/2, status 1: 1 failed, 1 passed, 1 deselected" in said
    assert "assert 'us' == 'them'" in said
    assert reported(tmp_path / "out/junit.xml") == [["test_gpu"], ["test_a", "test_b"]]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["junit.xml", "tests.log"]


def test_an_interrupt_ends_all_and_loses_no_report(tmp_path: Path) -> None:
    """As `timeout` sends it: twice."""
    slow = "import time\n" + TEST.format("print('slow', flush=True); time.sleep(600)")
    process = start(tmp_path, 5, grace=4.0, gpu=STUCK, a=TEST.format("pass"), b=TEST.format("pass"), c=slow)
    logs = [tmp_path / f"out/tests-{number}.log" for number in range(5)]
    wanted = ["stuck", "deselected", "1 passed", "1 passed", "slow"]
    end = time.monotonic() + 40
    while not all(log.exists() and text in log.read_text() for log, text in zip(logs, wanted, strict=True)):
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "shard 0/5, status -9: " in said
    assert f"no report in {tmp_path / 'out/junit-0.xml'}: " in said
    assert reported(tmp_path / "out/junit.xml")[1:3] == [["test_a"], ["test_b"]]  # the shard before them has no tests


def test_a_shard_that_cannot_start_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(command: list[str], *, env: dict[str, str], **options: object) -> subprocess.Popen[bytes]:
        if env["SHARD"] == "1/3":
            raise BlockingIOError("no process to be had")
        return real([sys.executable, "-c", "print('1 passed')"], env=env, **options)

    real = subprocess.Popen
    monkeypatch.setattr(in_shards.subprocess, "Popen", popen)
    monkeypatch.setenv("OUT", str(tmp_path))
    before = signal.getsignal(signal.SIGINT)
    try:
        assert in_shards.main(["--shards=3"]) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    log = (tmp_path / "tests.log").read_text()
    assert log.count("status 0\n1 passed\n") == 2
    assert "shard 1/3, status -1\ndid not start: no process to be had\n" in log


@pytest.mark.parametrize(("cores", "count"), [(None, 2), (1, 2), (2, 2), (4, 3), (6, 4), (16, 12), (200, 12)])
def test_three_processes_for_each_four_cores(cores: int | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert in_shards.default_count() == count
