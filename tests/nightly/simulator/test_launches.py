"""What reaches the CUDA driver through Triton's C launcher, seen without a GPU: `launches.py`."""

import platform
import re
import shutil

import pytest

from perf import stub_driver

CAN_BUILD = (platform.system(), platform.machine()) == ("Linux", "x86_64") and shutil.which("gcc")
REASON = "the stub driver needs gcc on Linux, x86-64"
LEAST = 8  # tests in it
pytestmark = [pytest.mark.host_only, pytest.mark.skipif(not CAN_BUILD, reason=REASON)]


def test_launches(run_compiled, tmp_path):
    # A torch with CUDA asks this driver, too, which has no devices for it.
    ignored = "ignore:CUDA initialization:UserWarning"
    words = "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-W", ignored, "launches.py"
    said = run_compiled(*words, **stub_driver.environment(tmp_path))
    assert int(re.search(r"(\d+) passed", said)[1]) >= LEAST
