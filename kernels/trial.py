"""Trials: each runs some kernels on a few numbers, and raises if they do not compile, do not run or are wrong.

`dispatch.choose` asks them before the first step, while torch's ops can still take over.
"""

import math

import torch
from torch import Tensor

from scaler_triton.kernels import abi
from scaler_triton.kernels.clip import launch_clip
from scaler_triton.kernels.measure import launch_measure
from scaler_triton.kernels.norm import launch_sum_of_squares
from scaler_triton.kernels.spike import launch_judge
from scaler_triton.kernels.table import GradTable
from scaler_triton.kernels.unscale import launch_check, launch_unscale


def unscaling(device: torch.device, dtype: torch.dtype) -> None:
    """Try the kernels of every step."""
    grads = torch.full((8,), 4.0, dtype=dtype, device=device)
    grads[5] = float("inf")
    table, (scale, checked, unscaled) = _table_of(grads), _numbers(device, 2.0, 0.0, 0.0)
    launch_check(table, checked)
    launch_unscale(table, scale, unscaled, inverse=False)
    got = [*grads.tolist(), checked.item(), unscaled.item()]
    _require(got, [2.0] * 5 + [float("inf")] + [2.0] * 2 + [1.0, 1.0], device)


def clipping(device: torch.device, dtype: torch.dtype) -> None:
    """Try the kernels of norms and clipping."""
    grads = torch.full((16,), 4.0, dtype=dtype, device=device)
    table, (scale, found_inf, norm) = _table_of(grads), _numbers(device, 2.0, 0.0, 0.0)
    totals = torch.zeros(abi.TOTALS, dtype=torch.float64, device=device)
    launch_sum_of_squares(table, scale, found_inf, totals)
    launch_clip(table, scale, totals, 16.0, norm)
    _require([*grads.tolist(), norm.item()], [2.0] * 16 + [8.0], device)


def measuring(device: torch.device, dtype: torch.dtype) -> None:
    """Try the kernel that measures."""
    grads = torch.full((20,), 2.0**-15, dtype=dtype, device=device)
    grads[3], grads[7] = 0.0, 8.0
    measured = torch.zeros(abi.MEASURED_ROW, dtype=torch.float64, device=device)
    launch_measure(_table_of(grads), measured)
    _require(measured.tolist(), [8.0, 1.0, 18.0, 20.0, 0.0], device)


def guarding(device: torch.device, dtype: torch.dtype) -> None:
    """Try the kernel that judges norms."""
    memory = torch.zeros(abi.HEADER + 2, dtype=torch.float64, device="cpu")
    memory[abi.COUNT], memory[abi.LAST], memory[abi.SIGMA], memory[abi.HEADER] = 1.0, 3.0, 2.0, 1.0
    totals = torch.tensor([25.0] + [0.0] * (abi.TOTALS - 1), dtype=torch.float64, device="cpu").to(device)
    memory, status = memory.to(device), torch.zeros(abi.STATUS, dtype=torch.float32, device=device)
    counters = torch.zeros(abi.COUNTERS, dtype=torch.int64, device=device)
    launch_judge(totals, status, memory, counters, 2, 0, first=True)
    got = [memory[abi.SPIKE_LIMIT].item(), status[abi.FLAG].item()]
    _require(got, [2.0 + 2.0 * math.sqrt(2.0), 1.0], device)


def _table_of(grads: Tensor) -> GradTable:
    table = GradTable([grads.numel()], grads.dtype, grads.device)
    table.set_addresses((grads.data_ptr(),))
    return table


def _numbers(device: torch.device, *values: float) -> tuple[Tensor, ...]:
    return torch.tensor(values, dtype=torch.float32, device="cpu").to(device).unbind()


def _require(got: list[float], expected: list[float], device: torch.device) -> None:
    if got != expected:
        raise RuntimeError(f"the Triton kernels run on {device} but give {got} instead of {expected}")
