"""What reaches the CUDA driver through Triton's C launcher, seen without a GPU."""

import platform
import shutil
import struct

import pytest

from perf import stub_driver
from scaler_triton.kernels.config import DEFAULT

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
    [("check", "_unscale_kernel"), ("unscale", "_unscale_kernel"), ("inverse", "_unscale_kernel")],
)
def test_a_table_is_one_launch_with_its_own_addresses(rounds, op, kernel):
    assert len(rounds) == len(PROGRAMS)
    for programs, seen in zip(PROGRAMS, rounds, strict=True):
        assert len(seen[op]) == (programs > 0)
        for launch in seen[op]:
            assert launch["kernel"] == kernel
            assert launch["grid"] == [programs, 1, 1]
            assert launch["block"] == [32 * DEFAULT.num_warps, 1, 1]
            scale, flag = seen["scalars"]
            assert launch["params"][:7] == [*seen["table"], flag, flag if op == "check" else scale]


def test_clipping_is_given_its_tensors_in_their_order_and_the_bound_in_fp32(rounds):
    (bound,) = struct.unpack("I", struct.pack("f", 0.3))
    for programs, seen in zip(PROGRAMS, rounds, strict=True):
        first, later = seen["clip"]  # through Triton's dispatch, and without it
        assert len(first) == len(later) == (programs > 0)
        for launch in first + later:
            *tensors, max_norm = launch["params"]
            assert tensors == [*seen["table"][:4], seen["scalars"][0], *seen["clip_scalars"]]
            assert max_norm & 0xFFFFFFFF == bound


def test_the_scale_is_updated_by_one_warp(rounds):
    for seen in rounds:
        (launch,) = seen["update"]
        assert launch["kernel"] == "_update_scale_kernel"
        assert (launch["grid"], launch["block"]) == ([1, 1, 1], [32, 1, 1])
        assert launch["params"][:7] == [*seen["update_tensors"], 0b101]


def test_the_driver_is_compiled_once(tmp_path):
    library = stub_driver.build(tmp_path)
    built = library.stat().st_mtime_ns
    assert stub_driver.build(tmp_path) == library
    assert library.stat().st_mtime_ns == built
    assert [path.name for path in library.parent.iterdir()] == [stub_driver.LIBRARY]
