"""The kernel tests under compute-sanitizer, which here is a script that says what it is told to."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SANITIZER = """#!/bin/bash
echo "$@" >> "$OUT/calls"
while [[ $1 != --log-file ]]; do shift; done
echo "========= ERROR SUMMARY: $FOUND" > "$2"
printf "$SAID\\n"
exit $STATUS
"""
EARLY = "!!!! Interrupted: out of time, TEST_SECONDS are over !!!!\\n"
NONE = "0 errors"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def sanitize(folder: Path, status: int, said: str, found: str = NONE) -> tuple[int, list[str]]:
    """Run the script; its status, and the lines of sanitize.txt."""
    (folder / "sanitizer").write_text(SANITIZER)
    (folder / "sanitizer").chmod(0o755)
    told = {"SANITIZER": str(folder / "sanitizer"), "STATUS": str(status), "SAID": said, "FOUND": found}
    environment = {**os.environ, **told, "OUT": str(folder)}
    command = [ROOT / "tests/nightly/sanitize.sh"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return run.returncode, (folder / "sanitize.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("status", "said", "found", "wanted"),
    [
        (0, "9 passed", NONE, 0),
        (1, "1 failed, 8 passed", NONE, 1),
        (99, "9 passed", "2 errors", 1),
        (2, "ERROR: not found", NONE, 1),
        (2, EARLY + "9 passed", NONE, 0),
        (2, EARLY + "1 failed, 8 passed", NONE, 1),
        (2, EARLY + "8 passed, 1 error", NONE, 1),
        (2, EARLY + "9 passed", "2 errors", 1),
        (2, EARLY + "no tests ran", NONE, 1),
        (2, EARLY + "9 skipped", NONE, 1),
        (124, EARLY, NONE, 1),
    ],
)
def test_a_finding_fails_and_want_of_time_does_not(
    status: int, said: str, found: str, wanted: int, tmp_path: Path
) -> None:
    ended, lines = sanitize(tmp_path, status, said, found)
    assert ended == wanted
    early = ["not all of the tests: out of time"] if status == 2 and not wanted else []
    told = [said.split("\\n")[-1], f"========= ERROR SUMMARY: {found}"]
    assert lines == ["== memcheck", *told, *early, "== racecheck", *told, *early]


def test_a_device_that_it_does_not_support_is_no_finding(tmp_path: Path) -> None:
    ended, lines = sanitize(tmp_path, 1, "1 error", "Device not supported")
    assert ended == 0
    refused = "it does not support this device: SKIPPED"
    assert lines == ["== memcheck", refused, "== racecheck", refused]


def test_each_file_is_run_once_and_what_writes_comes_first(tmp_path: Path) -> None:
    sanitize(tmp_path, 0, "9 passed")
    for call in (tmp_path / "calls").read_text().splitlines():
        files = re.findall(r" tests/unit/kernels/(test_\w+)\.py(?!:)", call)
        assert sorted(files) == sorted(path.stem for path in (ROOT / "tests/unit/kernels").glob("test_*.py"))
        assert files[:4] == ["test_unscale", "test_clip", "test_norm", "test_update_scale"]
        assert " -m not host_only " in call
