"""Launches the compiled kernels through Triton's own dispatch, on a driver that notes each launch and runs none.

Run in a process of its own, without TRITON_INTERPRET and without a GPU. CPU tensors stand in for a GPU's: what
is checked is all that happens before the driver. Prints JSON.
"""

import json
import sys
from contextlib import nullcontext
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from scaler_triton.kernels import abi, launch
from scaler_triton.kernels.clip import _clip_kernel, launch_clip
from scaler_triton.kernels.table import GradTable
from scaler_triton.kernels.unscale import _unscale_kernel, launch_check, launch_unscale
from scaler_triton.kernels.update_scale import _update_scale_kernel, launch_update

launches = []


class Launcher:
    """Stands for the C launcher of one compiled kernel."""

    def __init__(self, source, metadata):
        self.source, self.metadata = source, metadata

    def __call__(self, grid_x, grid_y, grid_z, stream, function, packed, launch_metadata, enter, leave, *args):
        values = dict(zip(self.source.fn.arg_names, args, strict=True))
        launches.append(
            {
                "kernel": self.source.fn.__name__,
                "grid": [grid_x, grid_y, grid_z],
                "num_warps": self.metadata.num_warps,
                "enable_fp_fusion": self.metadata.enable_fp_fusion,
                "types": dict(self.source.signature),
                "aligned": [self.source.fn.arg_names[place] for (place,), attrs in self.source.attrs.items() if attrs],
                "constants": {
                    self.source.fn.arg_names[place]: value
                    for (place,), value in self.source.constants.items()
                    if isinstance(value, int)
                },
                "numbers": {name: values[name] for name in ("rows", "max_norm", "ranks") if name in values},
            }
        )


class Driver:
    """An sm_90 that has nothing to compute with."""

    launcher_cls = Launcher

    def __init__(self):
        self.utils = self

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return {"max_shared_mem": 1 << 17}

    def load_binary(self, name, binary, shared, device):
        return "module", "function", 32, 0, 1024


def launch_all():
    cpu = torch.device("cpu")
    three = torch.ones(4)  # slices of it have every alignment that a float can have
    for numels in ([], [0], [1], [10, 7], [8192 * 16], [8192 * 17]):
        table = GradTable(numels, torch.float16, cpu)
        for flag, scale in ((three[0], three[1]), (three[1], three[0])):
            launch_check(table, flag)
            launch_unscale(table, scale, flag, inverse=False)
            launch_unscale(table, scale, flag, inverse=True)
    totals = torch.zeros(abi.TOTALS + 1, dtype=torch.float64)
    table = GradTable([10, 7], torch.float16, cpu)
    for max_norm, ranks in ((1, 1), (1.0, 16), (0.3, 17), (16, 2**40)):
        launch_clip(table, three[0], totals[ranks % 2 :], max_norm, three[1], three, ranks)
    tracker, policy = torch.zeros(2, dtype=torch.int32), torch.ones(abi.POLICY + 1, dtype=torch.float64)
    counters, flags = torch.zeros(abi.COUNTERS, dtype=torch.int64), torch.zeros(abi.ROWS, abi.STATUS)
    for rows in (1, 16, 17, (1 << 32) - 1):
        launch_update(three[0], tracker[0], flags, three, policy[:-1], counters, rows, clear=False)
        launch_update(three[1:2], tracker[1:], flags[1], three[1:], policy[1:], counters, rows, clear=False)


def main():
    driver.set_active(Driver())
    with (
        mock.patch.object(launch, "check_device"),
        mock.patch.object(launch, "_on", return_value=nullcontext()),
    ):
        launch_all()
    kernels = (_unscale_kernel, _clip_kernel, _update_scale_kernel)
    variants = {kernel.fn.__name__: len(kernel.device_caches[0][0]) for kernel in kernels}
    json.dump({"launches": launches, "variants": variants}, sys.stdout)


if __name__ == "__main__":
    main()
