"""Launches every kernel through Triton's own C launcher, on a driver that notes each launch and runs none.

Run in a process of its own, started with the stub driver's environment. Prints JSON.
"""

import json
import sys

import torch

from perf import stub_driver
from scaler_triton.kernels import update_scale
from scaler_triton.kernels.launch_config import DEFAULT
from scaler_triton.kernels.nonfinite import launch_check_nonfinite
from scaler_triton.kernels.table import GradTable
from scaler_triton.kernels.unscale import launch_unscale
from scaler_triton.kernels.update_scale import launch_update_scale

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
    policy = update_scale._policy_on(cpu, (1.1, 0.5, 2000))
    for numels in ([], [1], [chunk, 10], [17 * chunk]):
        table = GradTable(numels, torch.float16, cpu)
        yield {
            "table": [getattr(table, name).data_ptr() for name in TABLE_PARAMS],
            "check": launched(launch_check_nonfinite, table, floats[0]),
            "unscale": launched(launch_unscale, table, floats[1], floats[0], inverse=False),
            "inverse": launched(launch_unscale, table, floats[1], floats[0], inverse=True),
            "update": launched(launch_update_scale, floats[1], tracker, floats[0], 1.1, 0.5, 2000),
            "policy": [policy.data_ptr(), *policy.tolist()],
            "counters": update_scale._scratch_on(cpu).data_ptr(),
            "scalars": [floats[1].data_ptr(), tracker.data_ptr(), floats[0].data_ptr()],
        }


def main():
    stub_driver.activate()
    stub_driver.note_params(6)  # each kernel takes as many or more, all of 8 bytes
    with stub_driver.as_gpu():
        json.dump(list(launch_all()), sys.stdout)


if __name__ == "__main__":
    main()
