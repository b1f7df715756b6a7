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

from scaler_triton.kernels import launcher
from scaler_triton.kernels.nonfinite import _check_nonfinite_kernel, launch_check_nonfinite
from scaler_triton.kernels.table import GradTable
from scaler_triton.kernels.unscale import _unscale_kernel, launch_unscale
from scaler_triton.kernels.update_scale import _update_scale_kernel, launch_update_scale

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
                "rows": values.get("rows"),
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
            launch_check_nonfinite(table, flag)
            launch_unscale(table, scale, flag, inverse=False)
            launch_unscale(table, scale, flag, inverse=True)
    tracker = torch.zeros(2, dtype=torch.int32)
    for interval in (1, 16, 17, 2000, 2**40):
        launch_update_scale(three[0], tracker[0], three[1], 1.1, 0.5, interval)
        launch_update_scale(three[1:2], tracker[1:], three[0], 2.0, 1.0, interval)


def main():
    driver.set_active(Driver())
    with (
        mock.patch.object(launcher, "check_device"),
        mock.patch.object(launcher, "_on", return_value=nullcontext()),
        mock.patch.object(torch.cpu, "current_device", return_value=None),  # the index of torch.device("cpu")
    ):
        launch_all()
    kernels = (_check_nonfinite_kernel, _unscale_kernel, _update_scale_kernel)
    variants = {kernel.fn.__name__: len(kernel.device_caches[0][0]) for kernel in kernels}
    json.dump({"launches": launches, "variants": variants}, sys.stdout)


if __name__ == "__main__":
    main()
