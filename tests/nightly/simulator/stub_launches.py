"""Launches every kernel through Triton's own C launcher, on a driver that notes each launch and runs none.

Run in a process of its own, started with the stub driver's environment. Prints JSON.
"""

import json
import sys

import torch

from perf import stub_driver
from scaler_triton.kernels import abi
from scaler_triton.kernels.clip import launch_clip
from scaler_triton.kernels.config import DEFAULT
from scaler_triton.kernels.table import GradTable
from scaler_triton.kernels.unscale import launch_check, launch_unscale
from scaler_triton.kernels.update_scale import launch_update

TABLE_PARAMS = ("addresses", "numels", "chunk_tensors", "chunk_indices", "bits")


def launched(launch, *args, **options):
    """What reached the driver, launch by launch."""
    before = stub_driver.launches()
    launch(*args, **options)
    return [stub_driver.launch(number)._asdict() for number in range(before, stub_driver.launches())]


def launch_all():
    cpu = torch.device("cpu")
    floats = torch.ones(2)
    tracker = torch.zeros((), dtype=torch.int32)
    chunk = DEFAULT.chunk_elements(2)
    policy = torch.ones(abi.POLICY, dtype=torch.float64)
    flags, last_flags = torch.zeros(abi.ROWS, abi.STATUS), torch.zeros(abi.ROWS)
    counters, totals = torch.zeros(abi.COUNTERS, dtype=torch.int64), torch.zeros(abi.TOTALS, dtype=torch.float64)
    update = floats[1], tracker, flags, last_flags, policy, counters
    for numels in ([], [1], [chunk, 10], [17 * chunk]):
        table = GradTable(numels, torch.float16, cpu)
        yield {
            "table": [getattr(table, name).data_ptr() for name in TABLE_PARAMS],
            "check": launched(launch_check, table, floats[0]),
            "unscale": launched(launch_unscale, table, floats[1], floats[0], inverse=False),
            "inverse": launched(launch_unscale, table, floats[1], floats[0], inverse=True),
            "clip": [launched(launch_clip, table, floats[1], totals, 0.3, floats[0]) for _ in range(2)],
            "update": launched(launch_update, *update, 0b101, clear=False),
            "clip_scalars": [totals.data_ptr(), floats[0].data_ptr(), floats[0].data_ptr()],
            "update_tensors": [tensor.data_ptr() for tensor in update],
            "scalars": [floats[1].data_ptr(), floats[0].data_ptr()],
        }


def main():
    stub_driver.activate()
    stub_driver.note_params(9)  # each kernel takes as many or more, Triton's own two with them
    with stub_driver.as_gpu():
        json.dump(list(launch_all()), sys.stdout)


if __name__ == "__main__":
    main()
