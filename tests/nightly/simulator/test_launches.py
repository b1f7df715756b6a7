"""What reaches the CUDA driver through Triton's C launcher, seen without a GPU: `launches.py`."""

import platform
import shutil

import pytest

from perf import stub_driver

pytestmark = [
    pytest.mark.host_only,
    pytest.mark.skipif(
        (platform.system(), platform.machine()) != ("Linux", "x86_64") or shutil.which("gcc") is None,
        reason="the stub driver needs gcc on Linux, x86-64",
    ),
]


def test_launches(run_compiled, tmp_path):
    said = run_compiled(
        "-m", "pytest", "-qx", "-p", "no:cacheprovider", "launches.py", **stub_driver.environment(tmp_path)
    )
    assert "9 passed" in said
