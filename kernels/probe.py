"""A trial run of the kernels on a device, compared with expected values, before they run on gradients."""

import torch
from torch import Tensor

from scaler_triton.kernels.clip import launch_clip, launch_defer
from scaler_triton.kernels.common import SAW_INF
from scaler_triton.kernels.launcher import check_device
from scaler_triton.kernels.nonfinite import launch_check_nonfinite
from scaler_triton.kernels.norm import NormTable, launch_sum_of_squares
from scaler_triton.kernels.table import GradTable
from scaler_triton.kernels.unscale import launch_unscale
from scaler_triton.kernels.update_scale import (
    MAX_FLAGS,
    N_COUNTERS,
    DevicePolicy,
    launch_update_rows,
    launch_update_scale,
)


def probe(device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels of every step for `device`, run them on a few numbers and compare the results; waits.

    Args:
        device: a GPU; under TRITON_INTERPRET=1 the CPU.
        dtype: of gradients; takes three compilations without a cache, the first dtype five.

    Raises:
        RuntimeError: a kernel ran and was wrong, or the kernels do not take tensors on `device`.
        Exception: whatever Triton or the driver raised: no C compiler, a read-only cache, an old GPU.
    """
    check_device(device)
    _probe_table_kernels(dtype, device)
    _probe_update_scale(device)
    _probe_update_rows(device)


def probe_clipping(device: torch.device, dtype: torch.dtype) -> None:
    """As `probe`, for the kernels of norms and clipping."""
    check_device(device)
    _probe_norm_and_clip(dtype, device)
    _probe_defer(device)


def _probe_norm_and_clip(dtype: torch.dtype, device: torch.device) -> None:
    grad = torch.full((66,), 16.0, dtype=dtype, device=device)
    view = grad[1:65]  # a misaligned start takes the edges' path too
    table = NormTable([view.numel()], dtype, device)
    table.set_addresses([view.data_ptr()])
    found_inf, norm, scale, inv_scale = _floats([0.0, 0.0, 2.0, 1.0], device)
    totals, status = torch.ones(5, dtype=torch.float64, device=device), _floats([0.0] * 4, device)
    read = f"the norm of {dtype}"

    launch_sum_of_squares(table, inv_scale, found_inf, totals, inverse=True)
    _expect(read, totals, _floats([128.0**2, 0.0, 0.0, 1.0, 1.0]).double())
    launch_sum_of_squares(table, scale, found_inf, totals, inverse=False)
    _expect(read, totals, _floats([64.0**2, 0.0, 0.0, 2.0, 0.5]).double())
    launch_clip(table, scale, totals, 32.0, norm)  # a half, and a half
    view[7] = float("inf")
    launch_sum_of_squares(table, scale, found_inf, totals, inverse=False)
    _expect(read, totals, _floats([float("inf"), 1.0, 0.0, 2.0, 0.5]).double())
    _expect(read, norm, _floats(64.0))
    launch_clip(table, scale, totals, 32.0, norm, status, 1)  # only unscaled now

    want = _floats([16.0, *[2.0] * 64, 16.0])
    want[8] = float("inf")
    _expect(f"clipping of {dtype}", grad.float(), want)
    _expect(f"clipping of {dtype}", status, _floats([1.0, 0.0, 2.0, 0.0]))


def _probe_defer(device: torch.device) -> None:
    scale, norm, factor = _floats([6.0, 0.0, 0.0], device)
    totals = torch.tensor([64.0, 0.0, 1.0, 3.0, 1.5], dtype=torch.float64, device=device)
    status = _floats([0.0] * 4, device)
    launch_defer(scale, totals, 4.0, norm, factor, status, 2)
    coef = (4.0 / (_floats(8.0) + 1e-6)).clamp(max=1.0)
    _expect("deferred clipping", torch.stack([norm, factor]), torch.stack([_floats(8.0), 6.0 / coef]))
    _expect("deferred clipping", status, _floats([0.0, 1.0, 3.0, 0.125]))


def _probe_table_kernels(dtype: torch.dtype, device: torch.device) -> None:
    start = torch.arange(100, dtype=dtype, device="cpu")
    start[50] = float("inf")
    grad = start.to(device, copy=True)
    view = grad[1:]  # a misaligned start takes the edges' path too
    table = GradTable([view.numel()], dtype, device)
    table.set_addresses([view.data_ptr()])
    found_inf = _floats([0.0, 0.0, 0.0], device)
    scale, inv_scale = _floats([4.0, 0.5], device)

    launch_check_nonfinite(table, found_inf[0])
    _expect(f"check_nonfinite of {dtype}", grad, start)
    launch_unscale(table, scale, found_inf[1], inverse=False)
    launch_unscale(table, inv_scale, found_inf[2], inverse=True)

    start[1:] /= 8
    _expect(f"unscale of {dtype}", grad, start)
    _expect(f"found_inf of {dtype}", found_inf, _floats([1.0, 1.0, 1.0]))
    _expect(f"bits of {dtype}", table.bits[:, 0], torch.full((1,), SAW_INF.value, dtype=torch.int32, device="cpu"))


def _probe_update_scale(device: torch.device) -> None:
    scale, found_inf = _floats([3.0, 0.0], device)
    growth_tracker = torch.ones((), dtype=torch.int32, device=device)
    launch_update_scale(scale, growth_tracker, found_inf, 1.1, 0.5, 2)
    # 1.1 must have arrived in fp64: its fp32 neighbour gives another product.
    _expect("update_scale", scale, _floats(3.0 * 1.1))
    _expect("growth_tracker", growth_tracker, torch.zeros((), dtype=torch.int32, device="cpu"))


def _probe_update_rows(device: torch.device) -> None:
    scale, growth_tracker = _floats(8.0, device), torch.ones((), dtype=torch.int32, device=device)
    # Rows of 4 and, behind them, the last flags, to which the flag of the second row is moved.
    before, after = (torch.zeros(5 * MAX_FLAGS.value, dtype=torch.float32, device="cpu") for _ in range(2))
    before[4], after[4 * MAX_FLAGS.value + 1] = 1.0, 1.0
    flags, counters = before.to(device, copy=True), torch.zeros(N_COUNTERS, dtype=torch.int64, device=device)
    policy = DevicePolicy(device).hold(2.0, 0.5, 2000)
    launch_update_rows(scale, growth_tracker, flags, policy, counters, 0b11, clear=True)
    _expect("update_scale by several flags", torch.stack([scale, growth_tracker.float()]), _floats([4.0, 0.0]))
    _expect("clearing flags", flags, after)
    _expect("counting", counters, torch.tensor([1, 1, 1, 0, 1, 1, 1], dtype=torch.int64, device="cpu"))


def _floats(values: float | list[float], device: torch.device | str = "cpu") -> Tensor:
    # Whatever default dtype and device the user has set.
    return torch.tensor(values, dtype=torch.float32, device=device)


def _expect(what: str, got: Tensor, want: Tensor) -> None:
    if not torch.equal(got.cpu(), want):
        raise RuntimeError(
            f"the Triton kernel for {what} runs on {got.device} but gives {got.tolist()}, not {want.tolist()}"
        )
