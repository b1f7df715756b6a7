"""What reaches the driver when compiled kernels are launched, seen without a GPU."""

import pytest

from scaler_triton.kernels.config import DEFAULT

pytestmark = pytest.mark.host_only

TABLE = ["address_ptr", "numel_ptr", "chunk_tensor_ptr", "chunk_index_ptr", "bits_ptr"]


@pytest.fixture(scope="module")
def dispatch(run_compiled):
    return run_compiled("native_dispatch.py")


def launches_of(dispatch, kernel):
    return [launch for launch in dispatch["launches"] if launch["kernel"] == kernel]


def test_no_size_alignment_or_number_makes_another_compilation(dispatch):
    # A scale, its inverse and a check are three kernels; anything else is one, however it is called.
    assert dispatch["variants"] == {"_unscale_kernel": 3, "_clip_kernel": 1, "_update_scale_kernel": 1}


def test_one_launch_a_table_with_one_program_a_chunk_and_none_for_no_chunk(dispatch):
    launches = launches_of(dispatch, "_unscale_kernel")
    assert [launch["grid"] for launch in launches[::6]] == [[1, 1, 1], [2, 1, 1], [16, 1, 1], [17, 1, 1]]
    assert len(launches) == 24


def test_launch_options_are_explicit(dispatch):
    assert {launch["enable_fp_fusion"] for launch in dispatch["launches"]} == {True}
    for kernel in ("_unscale_kernel", "_clip_kernel"):
        for launch in launches_of(dispatch, kernel):
            assert launch["num_warps"] == DEFAULT.num_warps
            assert launch["constants"]["BLOCK_SIZE"] == DEFAULT.block_elements(2)
            assert launch["constants"]["UNROLL"] == DEFAULT.unroll
    assert {launch["num_warps"] for launch in launches_of(dispatch, "_update_scale_kernel")} == {1}


def test_only_the_tables_own_tensors_are_taken_to_be_aligned(dispatch):
    for kernel, want in (("_unscale_kernel", TABLE), ("_clip_kernel", TABLE[:4]), ("_update_scale_kernel", [])):
        assert all(launch["aligned"] == want for launch in launches_of(dispatch, kernel))


def test_numbers_have_the_types_that_the_kernels_name(dispatch):
    updates, clips = launches_of(dispatch, "_update_scale_kernel"), launches_of(dispatch, "_clip_kernel")
    assert {launch["types"]["rows"] for launch in updates} == {"i64"}
    assert [launch["numbers"]["rows"] for launch in updates[::2]] == [1, 16, 17, (1 << 32) - 1]
    assert {(launch["types"]["max_norm"], launch["types"]["ranks"]) for launch in clips} == {("fp32", "i64")}
    assert [launch["numbers"]["max_norm"] for launch in clips] == [1.0, 1.0, 0.3, 16.0]
