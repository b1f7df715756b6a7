"""Launches a kernel on the first GPU twice as it should be, then with a number of the device that is named."""

import sys

import torch

from scaler_triton.kernels.table import GradTable
from scaler_triton.kernels.unscale import launch_unscale


def main(device):
    """Say of each launch that it came back."""
    here = torch.device("cuda", 0)
    grad, table = torch.ones(8, device=here), GradTable([8], torch.float32, here)
    table.set_addresses([grad.data_ptr()])
    for place in (here, here, device):  # the first goes through Triton's dispatch, which would refuse
        launch_unscale(table, torch.ones((), device=place), torch.zeros((), device=here), inverse=False)
        print("launched", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
