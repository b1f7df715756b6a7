"""What reaches the driver when compiled kernels are launched, seen without a GPU."""

import pytest

from scaler_triton.kernels.launch_config import DEFAULT

pytestmark = pytest.mark.host_only

TABLE = ["address_ptr", "numel_ptr", "chunk_tensor_ptr", "chunk_index_ptr", "bits_ptr"]


@pytest.fixture(scope="module")
def dispatch(run_compiled):
    return run_compiled("native_dispatch.py")


def launches_of(dispatch, kernel):
    return [launch for launch in dispatch["launches"] if launch["kernel"] == kernel]


def test_no_size_alignment_or_interval_makes_another_compilation(dispatch):
    # A scale and its inverse are two kernels; anything else is one, however it is called.
    want = {"_check_nonfinite_kernel": 1, "_unscale_kernel": 2, "_update_scale_kernel": 1}
    assert dispatch["variants"] == want


def test_one_launch_a_table_with_one_program_a_chunk_and_none_for_no_chunk(dispatch):
    launches = launches_of(dispatch, "_unscale_kernel")
    assert [launch["grid"] for launch in launches[::4]] == [[1, 1, 1], [2, 1, 1], [16, 1, 1], [17, 1, 1]]
    assert len(launches) == 16
    assert len(launches_of(dispatch, "_check_nonfinite_kernel")) == 8


def test_launch_options_are_explicit(dispatch):
    assert {launch["enable_fp_fusion"] for launch in dispatch["launches"]} == {True}
    for kernel in ("_unscale_kernel", "_check_nonfinite_kernel"):
        for launch in launches_of(dispatch, kernel):
            assert launch["num_warps"] == DEFAULT.num_warps
            assert launch["constants"]["BLOCK_SIZE"] == DEFAULT.block_elements(2)
            assert launch["constants"]["UNROLL"] == DEFAULT.unroll
    assert {launch["num_warps"] for launch in launches_of(dispatch, "_update_scale_kernel")} == {1}


def test_only_the_tables_own_tensors_are_taken_to_be_aligned(dispatch):
    for kernel, want in (
        ("_unscale_kernel", TABLE),
        ("_check_nonfinite_kernel", TABLE),
        ("_update_scale_kernel", []),
    ):
        assert all(launch["aligned"] == want for launch in launches_of(dispatch, kernel))


def test_the_rows_of_flags_are_64_bits(dispatch):
    launches = launches_of(dispatch, "_update_scale_kernel")
    assert {launch["types"]["rows"] for launch in launches} == {"i64"}
    assert {launch["rows"] for launch in launches} == {1}
