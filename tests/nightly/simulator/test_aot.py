"""Every kernel compiles for GPUs that are not here, and its machine code does what the design promises."""

import json
from collections import Counter

import pytest
import triton
from packaging.version import Version

from scaler_triton.kernels.config import CANDIDATES, DEFAULT, MODES

pytestmark = pytest.mark.host_only

NVIDIA = ["sm_70", "sm_75", "sm_80", "sm_90", "sm_100"]
DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
OPS = ["unscale", "unscale_inverse", "check"]
UPDATES = ["update", "update_and_clear"]
BY_HEADROOM = [f"{update}_headroom-{ring}" for update in UPDATES for ring in (16, 1024)]
CLIPS = ["norm", "clip"]
READS = ["check", "norm", "measure"]
PASSES = [*OPS, *CLIPS, "measure"]
JUDGE_WARPS = {"judge-2": 1, "judge-128": 1, "judge-4096": 16}
# Kernels of one program, which may have all of a multiprocessor's registers, and its warps.
ONE_PROGRAM = {**JUDGE_WARPS, **dict.fromkeys(BY_HEADROOM, 1)}
WRITES = ["unscale", "unscale_inverse", "clip"]
DIVIDING = ("unscale", "clip", "finish")  # by the scale
VECTORS = DEFAULT.vectors * DEFAULT.unroll  # of 16 bytes, in a lane
# All warps of a multiprocessor stay resident up to 32 registers, 48 of 64 up to 40, 40 up to 48. A multiprocessor of
# sm_75 has 32 warps only, so 64 registers cost it nothing; sm_70 runs 32 of 64. gfx942 keeps 8 waves a SIMD up to 64.
REGISTERS = {"sm_70": 64, "sm_75": 64, "sm_80": 48, "sm_90": 40, "sm_100": 40, "gfx942": 64}
if Version(triton.__version__) >= Version("3.8"):  # keeps the rare path's addresses for longer; 36 warps stay resident
    REGISTERS |= {"sm_90": 48, "sm_100": 56, "gfx942": 72}


@pytest.fixture(scope="module")
def matrix(run_compiled):
    return json.loads(run_compiled("aot_matrix.py"))


@pytest.fixture(scope="module")
def kernels(matrix):
    return matrix["kernels"]


def test_every_kernel_is_compiled_for_every_target(kernels):
    names = [f"{op}-{dtype}" for op in PASSES for dtype in DTYPES]
    names += [*UPDATES, "finish", *ONE_PROGRAM]
    found = [name for name in kernels if not name.startswith("config-")]
    assert sorted(found) == sorted(f"{target}-{name}" for target in [*NVIDIA, "gfx942"] for name in names)


# What a pass may access beside its gradients, once a program: the table's two int32 and two int64, and
BESIDE = {
    # the scale, the flag, and the generation in each rare path, of which there are two where a product could mislead;
    "unscale": {"ld.global.b32": 3 + 2, "ld.global.b64": 2, "st.global.b32": 1},
    "check": {"ld.global.b32": 2 + 1, "ld.global.b64": 2, "st.global.b32": 1},
    # the weight, sum and flag, and the generation;
    "norm": {"ld.global.b32": 2 + 1, "ld.global.b64": 2 + 1, "st.global.b32": 1, "st.global.b64": 1},
    # the scale, flag and squares, and the norm; and in one program the three other totals, for the ranks' status.
    "clip": {"ld.global.b32": 3, "ld.global.b64": 4 + 3, "st.global.b32": 1 + 4},
    # the largest so far.
    "measure": {"ld.global.b32": 2, "ld.global.b64": 2 + 1},
}


def visits(op, dtype):
    """How often a chunk may be read: the rare paths lift it, or look at its bits."""
    if op == "norm":
        return 3 if dtype in ("bfloat16", "float32") else 2
    return {"check": 2, "clip": 1, "measure": 1}.get(op, 3)


@pytest.mark.parametrize("op", PASSES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", NVIDIA)
def test_bodies_move_by_128_bits_only(kernels, target, dtype, op):
    """And edges by one narrow access a step."""
    accesses = Counter(kernels[f"{target}-{op}-{dtype}"]["accesses"])
    wide, narrow, times = "v2.b64" if dtype == "float64" else "v4.b32", f"b{8 * DTYPES[dtype]}", visits(op, dtype)
    assert VECTORS + times - 1 <= accesses.pop(f"ld.global.{wide}") <= VECTORS * times
    want = Counter(BESIDE[op.removesuffix("_inverse")])
    want[f"ld.global.{narrow}"] += times
    if op not in READS:
        want += Counter({f"st.global.{wide}": VECTORS, f"st.global.{narrow}": 1})
    assert accesses == want


@pytest.mark.parametrize("target", NVIDIA)
def test_what_one_program_reads_and_writes(kernels, target):
    assert kernels[f"{target}-finish"]["accesses"]["st.global.b64"] == 5
    for name in UPDATES:
        # The scale, the tracker and the flags, of which a lane reads one; the policy's five and the counters' seven.
        accesses = kernels[f"{target}-{name}"]["accesses"]
        assert (accesses["ld.global.b32"], accesses["ld.global.b64"]) == (3, 6 + 6)
        assert (accesses["st.global.b32"], accesses["st.global.b64"]) == (2 + 3 * (name != "update"), 7)
    for name in BY_HEADROOM:
        # In addition the largest and its scale, the cap, the count and the ring; the cap, the count and a norm's place.
        update, _, ring = name.rpartition("_headroom-")
        more = Counter({"ld.global.b64": 4 + -(-int(ring) // 32), "st.global.b64": 3})
        assert kernels[f"{target}-{name}"]["accesses"] == Counter(kernels[f"{target}-{update}"]["accesses"]) + more
    for name, warps in JUDGE_WARPS.items():
        # Four of the header, two counters, the five totals, and the norms, one at a time in each lane, which begin
        # anywhere in the ring; six of the header, a norm, a counter and the flag's total; the flag and the status.
        accesses, norms = kernels[f"{target}-{name}"]["accesses"], -(-int(name.removeprefix("judge-")) // (32 * warps))
        assert accesses == {"ld.global.b64": 4 + 2 + 5 + norms, "st.global.b64": 6 + 1 + 1 + 1, "st.global.b32": 1 + 4}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", NVIDIA)
def test_a_program_adds_what_it_has_measured_by_two_atomics(kernels, target, dtype):
    """Of the largest, and of the counts together, each in a lane: all programs make them at the same place."""
    assert kernels[f"{target}-measure-{dtype}"]["atomics"] == {"max.s64": 1, "add.f64": 1}


@pytest.mark.parametrize("op", WRITES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", NVIDIA)
def test_bodies_and_shared_edges_are_loaded_before_any_of_them_is_stored(kernels, target, dtype, op):
    """Else a lane has a single load under way, too little for fast memory; and a warp reads what others wrote."""
    report = kernels[f"{target}-{op}-{dtype}"]
    assert report["loads_between_stores"] == 0
    assert report["barrier_before_edge_store"] or op == "clip"  # whose first narrow store is that of the norm


@pytest.mark.parametrize("target", [*NVIDIA, "gfx942"])
def test_registers_and_spills(kernels, target):
    reports = {name: report for name, report in kernels.items() if name.startswith(f"{target}-")}
    if not all("registers" in report for report in reports.values()):
        pytest.skip("this Triton comes without cuobjdump")
    assert {report["spilled"] for report in reports.values()} == {0}
    registers = {name.removeprefix(f"{target}-"): report["registers"] for name, report in reports.items()}
    for name, warps in ONE_PROGRAM.items():
        assert 32 * warps * registers.pop(name) <= 65536
    measuring = [registers.pop(f"measure-{dtype}") for dtype in DTYPES]
    assert max(measuring) <= REGISTERS[target] + 8  # on sm_70 24 warps stay resident, more elsewhere
    assert max(registers.values()) <= REGISTERS[target]


# Divisions and roots in fp64: of the ranks' scales, which are compared, and of the norm; a judgement's mean and
# deviation; the largest gradient, unscaled.
FP64 = {"finish": (1, 0), "clip": (1, 1), "judge": (1 + 2, 1 + 1)}
FP64 |= {"update_headroom": (1, 0), "update_and_clear_headroom": (1, 0)}


@pytest.mark.parametrize("target", NVIDIA)
def test_arithmetic_is_ieee(kernels, target):
    for name, report in kernels.items():
        if name.startswith(f"{target}-"):
            assert not report["flushes"], name
            assert not report["approximates"], name
            op = name.split("-")[1]
            # The inverse of the scale, and that of the norm.
            assert report["div_rn"] == (op in DIVIDING) + (op == "clip"), name
            assert (report["div_rn_f64"], report["sqrt_rn_f64"]) == FP64.get(op, (0, 0)), name
            assert not report["fuses"] or op != "judge", name  # torch's ops round twice, and limits are compared
    for name in [*UPDATES, *BY_HEADROOM]:
        assert kernels[f"{target}-{name}"]["mul_f64"] == 2  # the factors have stayed fp64


@pytest.mark.parametrize("op", PASSES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bodies_move_by_16_bytes_on_amd(kernels, dtype, op):
    report = kernels[f"gfx942-{op}-{dtype}"]
    assert report["wide_loads"] >= VECTORS
    assert report["wide_stores"] == (0 if op in READS else VECTORS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", MODES)
def test_launch_configurations(matrix, op, dtype, record_property):
    """No candidate spills, and what is shipped keeps 48 warps of sm_90 resident."""
    reports = {str(each): matrix["kernels"][f"config-{op}-{dtype}-{each}"] for each in CANDIDATES}
    if not all(reports.values()):
        pytest.skip("this Triton comes without cuobjdump")
    record_property("registers", {config: report["registers"] for config, report in reports.items()})
    assert {config: report["spilled"] for config, report in reports.items()} == dict.fromkeys(reports, 0)

    shipped = matrix["shipped"][f"{op}-{dtype}"]
    assert str(DEFAULT) in shipped
    for config in shipped:
        report = matrix["kernels"][f"config-{op}-{dtype}-{config}"]
        assert report["registers"] <= REGISTERS["sm_90"], config
        assert report["spilled"] == 0, config
