"""The probe tells whether the kernels work here, before any gradient is written."""

import itertools
from unittest import mock

import pytest
import torch
from kernel_cases import DEVICE, NATIVE, SIMULATED, launched

from scaler_triton.gradients import DTYPES
from scaler_triton.kernels import probe as probe_module
from scaler_triton.kernels.probe import probe, probe_clipping

EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
TABLE_KERNELS = ["_check_nonfinite_kernel", "_unscale_kernel", "_unscale_kernel"]


@EVERY_DTYPE
def test_every_kernel_is_tried(dtype):
    with launched(*TABLE_KERNELS, *["_update_scale_kernel"] * 2):  # the second as every step launches it
        probe(DEVICE, dtype)


@pytest.mark.parametrize(
    "name", ["launch_check_nonfinite", "launch_unscale", "launch_update_scale", "launch_update_rows"]
)
def test_a_kernel_that_does_nothing_is_found_out(name):
    with mock.patch.object(probe_module, name), pytest.raises(RuntimeError, match=r"the Triton kernel for .* gives"):
        probe(DEVICE, torch.float32)


NORM, CLIP = ["_sum_squares_kernel", "_finish_kernel"], "_clip_kernel"


@EVERY_DTYPE
def test_what_clips_is_tried_apart(dtype):
    with launched(*NORM, *NORM, CLIP, *NORM, CLIP, "_defer_kernel"):
        probe_clipping(DEVICE, dtype)


@pytest.mark.parametrize("name", ["launch_sum_of_squares", "launch_clip", "launch_defer"])
def test_a_pass_of_clipping_that_does_nothing_is_found_out(name):
    with mock.patch.object(probe_module, name), pytest.raises(RuntimeError, match=r"the Triton kernel for .* gives"):
        probe_clipping(DEVICE, torch.float32)


def test_a_norm_that_flags_nothing_is_found_out():
    def blind(table, scale, found_inf, totals, *, inverse):
        start(table, scale, torch.zeros_like(found_inf), totals, inverse=inverse)
        totals[1] = 0

    start = probe_module.launch_sum_of_squares
    with (
        mock.patch.object(probe_module, "launch_sum_of_squares", blind),
        pytest.raises(RuntimeError, match=r"the Triton kernel for the norm of .* gives"),
    ):
        probe_clipping(DEVICE, torch.float32)


def test_flags_that_are_left_set_are_found_out():
    def leave(*args, clear):
        start(*args, clear=False)

    start = probe_module.launch_update_rows
    with (
        mock.patch.object(probe_module, "launch_update_rows", leave),
        pytest.raises(RuntimeError, match="the Triton kernel for clearing flags"),
    ):
        probe(DEVICE, torch.float32)


def test_a_check_that_writes_is_found_out():
    def write(table, found_inf):
        probe_module.launch_unscale(table, torch.tensor(2.0, device=DEVICE), found_inf, inverse=True)

    with (
        mock.patch.object(probe_module, "launch_check_nonfinite", write),
        pytest.raises(RuntimeError, match="check_nonfinite of"),
    ):
        probe(DEVICE, torch.float32)


# Launch, which call of it, which argument it writes, and how many numbers.
WRITTEN = {
    probe: [
        ("launch_check_nonfinite", 0, 1, 1),
        ("launch_unscale", 0, 2, 1),
        ("launch_unscale", 1, 2, 1),
        ("launch_update_scale", 0, 0, 1),
        ("launch_update_scale", 0, 1, 1),
        ("launch_update_rows", 0, 0, 1),
        ("launch_update_rows", 0, 1, 1),
        ("launch_update_rows", 0, 2, 160),
        ("launch_update_rows", 0, 4, 7),
    ],
    probe_clipping: [
        *(("launch_sum_of_squares", call, 3, 5) for call in range(3)),
        ("launch_clip", 0, 4, 1),
        ("launch_clip", 1, 5, 4),
        ("launch_defer", 0, 3, 1),
        ("launch_defer", 0, 4, 1),
        ("launch_defer", 0, 5, 4),
    ],
}


@pytest.mark.parametrize(
    ("tried", "name", "call", "argument", "place"),
    [
        (tried, *written, place)
        for tried, launches in WRITTEN.items()
        for *written, numbers in launches
        for place in sorted({0, numbers // 2, numbers - 1})
    ],
)
def test_every_number_that_a_kernel_writes_is_looked_at(tried, name, call, argument, place):
    def spoil(*args, **options):
        start(*args, **options)
        if next(calls) == call:
            args[argument].view(-1)[place] = 77

    start, calls = getattr(probe_module, name), itertools.count()
    with (
        mock.patch.object(probe_module, name, spoil),
        pytest.raises(RuntimeError, match=r"the Triton kernel for .* gives"),
    ):
        tried(DEVICE, torch.float32)
    assert next(calls) > call


@pytest.mark.parametrize("seen", [0, 1], ids=["nothing", "NaN"])
def test_a_pass_that_tells_other_kinds_is_found_out(seen):
    def mistaken(table, *args, inverse):
        start(table, *args, inverse=inverse)
        table.bits.fill_(seen)

    start = probe_module.launch_unscale
    with (
        mock.patch.object(probe_module, "launch_unscale", mistaken),
        pytest.raises(RuntimeError, match="the Triton kernel for bits of"),
    ):
        probe(DEVICE, torch.float32)


def test_what_triton_raises_comes_through():
    error = OSError("Failed to find C compiler")
    with (
        mock.patch.object(probe_module, "launch_unscale", side_effect=error),
        pytest.raises(OSError, match="Failed to find C compiler"),
    ):
        probe(DEVICE, torch.float32)


@pytest.mark.skipif(SIMULATED is not None, reason="there the kernels take any tensor")
def test_the_other_backends_device_is_refused():
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        probe(torch.device("cpu" if NATIVE else "cuda"), torch.float32)


def test_the_users_defaults_change_nothing():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            probe(DEVICE, torch.float16)
    finally:
        torch.set_default_dtype(before)
