"""What is compiled and reaches the CUDA driver through Triton's C launcher, and by which way, seen without a GPU."""

import platform
import shutil
import struct

import pytest
import triton
from packaging.version import Version

from perf import stub_driver
from scaler_triton.kernels.config import DEFAULT

pytestmark = [
    pytest.mark.host_only,
    pytest.mark.skipif(
        (platform.system(), platform.machine()) != ("Linux", "x86_64") or shutil.which("gcc") is None,
        reason="the stub driver needs gcc on Linux, x86-64",
    ),
]

PROGRAMS = [0, 0, 1, 2, 17] * 2  # of the table of each round in launches.py
WINDOWS = [65, 66, 80, 127, 128] * 2
TABLE = ["address_ptr", "numel_ptr", "chunk_tensor_ptr", "chunk_index_ptr", "bits_ptr"]


@pytest.fixture(scope="module")
def found(run_compiled, tmp_path_factory):
    return run_compiled("launches.py", stub_driver.environment(tmp_path_factory.mktemp("stub_driver")))


@pytest.mark.parametrize("op", ["check", "check_measuring", "unscale", "inverse"])
def test_a_table_is_one_launch_with_its_own_addresses(found, op):
    for programs, seen in zip(PROGRAMS, found["rounds"], strict=True):
        assert len(seen[op]) == (programs > 0)
        for launch in seen[op]:
            assert launch["kernel"] == "_unscale_kernel"
            assert launch["grid"] == [programs, 1, 1]
            assert launch["block"] == [32 * DEFAULT.num_warps, 1, 1]
            scale, flag = seen["scalars"]
            assert launch["params"][:7] == [*seen["table"], flag, flag if op.startswith("check") else scale]
            if op == "check_measuring":
                assert launch["params"][8] == seen["measured_tensors"][0]


def test_what_a_table_has_measured_is_added_by_one_program(found):
    for programs, seen in zip(PROGRAMS, found["rounds"], strict=True):
        assert len(seen["add_measured"]) == (programs > 0)
        for launch in seen["add_measured"]:
            assert launch["kernel"] == "_add_measured_kernel"
            assert (launch["grid"], launch["block"]) == ([1, 1, 1], [128, 1, 1])
            assert launch["params"] == [*seen["measured_tensors"][:2], programs]


def test_clipping_is_given_its_tensors_in_their_order_and_the_bound_in_fp32(found):
    bounds = [struct.unpack("I", struct.pack("f", bound))[0] for bound in (0.3, 1, 1, 0.3, 16)]
    for programs, bound, seen in zip(PROGRAMS, bounds * 2, found["rounds"], strict=True):
        first, later = seen["clip"]  # through Triton's dispatch, and without it
        assert len(first) == len(later) == (programs > 0)
        for launch in first + later:
            *tensors, max_norm = launch["params"]
            assert tensors == [*seen["table"][:4], *seen["clip_tensors"]]
            assert max_norm & 0xFFFFFFFF == bound


def test_the_scale_is_updated_by_one_warp(found):
    for rows, window, seen in zip([1, 16, 17, 0b101, (1 << 32) - 1] * 2, WINDOWS, found["rounds"], strict=True):
        policy = seen["update_tensors"][4]
        numbers = {"update": [policy, policy, rows], "by_headroom": [*seen["measured_tensors"][1:], rows]}
        for op, params in numbers.items():
            (launch,) = seen[op]
            assert launch["kernel"] == "_update_scale_kernel"
            assert (launch["grid"], launch["block"]) == ([1, 1, 1], [32, 1, 1])
            assert launch["params"][:9] == [*seen["update_tensors"], *params]
        assert launch["params"][9:] == [rows % 31, window]


def test_a_judgement_is_one_launch_of_one_warp(found):
    windows = zip(WINDOWS, [1, 1, 16, 17, 2**40] * 2, found["rounds"], strict=True)
    for length, ranks, seen in windows:
        for first, launches in zip((1, 0), seen["judge"], strict=True):
            (launch,) = launches
            assert launch["kernel"] == "_judge_kernel"
            assert (launch["grid"], launch["block"]) == ([1, 1, 1], [32, 1, 1])
            assert launch["params"][:7] == [*seen["judge_tensors"], length, ranks, first]


@pytest.mark.parametrize(
    ("kernel", "versions", "num_warps", "aligned", "types"),
    [
        # Of a scale, of its inverse, a check, and one that measures.
        ("_unscale_kernel", 4, DEFAULT.num_warps, TABLE, {}),
        ("_clip_kernel", 1, DEFAULT.num_warps, TABLE[:4], {"max_norm": "fp32", "ranks": "i64"}),
        ("_update_scale_kernel", 2, 1, [], {"rows": "i64", "bits": "i64", "window": "i64"}),  # of windows of 65 to 128
        ("_add_measured_kernel", 1, 4, ["measured_ptr"], {"n_chunks": "i64"}),
        ("_judge_kernel", 1, 1, [], {"window": "i64", "ranks": "i64", "first": "i64"}),  # of windows of 65 to 128
    ],
)
def test_no_size_alignment_or_number_makes_another_compilation(found, kernel, versions, num_warps, aligned, types):
    """What is aligned are the table's own tensors, and numbers have the types that the kernels name."""
    compiled = found["kernels"][kernel]
    assert len(compiled) == versions
    for each in compiled:
        assert (each["num_warps"], each["enable_fp_fusion"]) == (num_warps, kernel != "_judge_kernel")
        assert each["aligned"] == aligned
        assert each["types"].items() >= types.items()
        if aligned[:4] == TABLE[:4]:
            constants = each["constants"]
            assert (constants["BLOCK_SIZE"], constants["UNROLL"]) == (DEFAULT.block_elements(2), DEFAULT.unroll)


@pytest.mark.parametrize(
    ("case", "launches", "dispatched"),
    [
        ("usual", 4, 1),
        ("hooked", 5, 4),
        ("hooked behind", 5, 4),
        ("without run", 4, 4),
        ("without stream", 4, 4),
        ("refusing", 4, 4),
        ("without inner", 4, 1),
    ],
)
def test_every_launch_is_the_same_whichever_way_it_takes(found, case, launches, dispatched):
    """Triton's dispatch is left out, unless somebody watches or this Triton cannot do without it."""
    assert not found["interpreted"]
    wanted = {"dispatched": dispatched, "same": True, "launches": launches}
    assert found["paths"][case].items() >= wanted.items()


def test_a_profilers_hook_sees_every_launch(found):
    assert found["seen"] == ["_unscale_kernel"] * 3 + ["behind"] * 3


def test_a_refusal_is_remembered(found):
    assert found["refusals"] == 1


def test_a_later_launch_takes_few_calls(found):
    is_known = found["paths"]["without inner"]["is_known"]  # Triton's function in C
    if Version("3.7") <= Version(triton.__version__) < Version("3.8"):
        assert is_known
    ours = [name for name in found["calls"] if name != "<lambda>"]  # the stand-ins for queries in C
    assert ours == ["launch_unscale", "_launch", "__call__"] or not is_known


def test_the_driver_is_compiled_once(tmp_path):
    library = stub_driver.build(tmp_path)
    built = library.stat().st_mtime_ns
    assert stub_driver.build(tmp_path) == library
    assert library.stat().st_mtime_ns == built
    assert [path.name for path in library.parent.iterdir()] == [stub_driver.LIBRARY]
