"""What reaches the CUDA driver through Triton's C launcher, seen without a GPU."""

import platform
import shutil
import struct

import pytest

from perf import stub_driver
from scaler_triton.kernels.launch_config import DEFAULT

pytestmark = [
    pytest.mark.host_only,
    pytest.mark.skipif(
        (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="the stub driver is for Linux on x86-64"
    ),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the stub driver is compiled with gcc"),
]

PROGRAMS = [0, 1, 2, 17]  # of each table in stub_launches.py


@pytest.fixture(scope="module")
def rounds(run_compiled, tmp_path_factory):
    return run_compiled("stub_launches.py", stub_driver.environment(tmp_path_factory.mktemp("stub_driver")))


@pytest.mark.parametrize(
    ("op", "kernel"),
    [("check", "_check_nonfinite_kernel"), ("unscale", "_unscale_kernel"), ("inverse", "_unscale_kernel")],
)
def test_a_table_is_one_launch_with_its_own_addresses(rounds, op, kernel):
    assert len(rounds) == len(PROGRAMS)
    for programs, seen in zip(PROGRAMS, rounds, strict=True):
        assert len(seen[op]) == (programs > 0)
        for launch in seen[op]:
            assert launch["kernel"] == kernel
            assert launch["grid"] == [programs, 1, 1]
            assert launch["block"] == [32 * DEFAULT.num_warps, 1, 1]
            assert launch["params"] == [*seen["table"], seen["scalars"][2]]


def test_the_scale_is_updated_by_one_warp_with_factors_in_fp64(rounds):
    factors = struct.unpack("2q", struct.pack("2d", 1.1, 0.5))
    bounds = struct.unpack("2q", struct.pack("2d", 2.0**-126, 2.0**128 - 2.0**104))
    for seen in rounds:
        (launch,) = seen["update"]
        assert launch["kernel"] == "_update_scale_kernel"
        assert (launch["grid"], launch["block"]) == ([1, 1, 1], [32, 1, 1])
        address, *numbers = seen["policy"]
        assert numbers == [*factors, 2000, *bounds, 1, 0]
        assert launch["params"][:6] == [*seen["scalars"], address, seen["counters"], 1]


def test_the_driver_is_compiled_once(tmp_path):
    library = stub_driver.build(tmp_path)
    built = library.stat().st_mtime_ns
    assert stub_driver.build(tmp_path) == library
    assert library.stat().st_mtime_ns == built
    assert [path.name for path in library.parent.iterdir()] == [stub_driver.LIBRARY]
