"""Lets kernels be launched on the simulator: compiled for a GPU that need not be there, on CPU tensors.

As a plugin of pytest (`-p simulated_launches`) it does so for all tests, on SCALER_TRITON_SIMULATE's target.
"""

from unittest import mock

import aot_matrix
import numpy as np
import pytest
from kernel_cases import SIMULATED
from ptx_simulator import Kernel

from scaler_triton.kernels import launch as launching


@pytest.fixture(scope="session", autouse=True)
def simulated_kernels():
    """The kernels that were launched.

    A launch may touch, of a table, the tensors at its addresses; of any other tensor its elements; and nothing else.
    """
    kernels = {}

    def start(launch, n_programs, *args):
        key = launch._kernel.fn.__name__, tuple(launch._options.items())
        if key not in kernels:
            kernels[key] = _compiled(launch)
        tensors = dict(zip(launch._kernel.arg_names, (*launch._fixed, *args), strict=False))
        params = [_bits(arg) if isinstance(arg, int | float) else arg.data_ptr() for arg in tensors.values()]
        kernels[key].run(n_programs, params, list(_spans(launch, tensors)))

    with mock.patch.object(launching, "check_device"), mock.patch.object(launching.Launch, "__call__", start):
        yield kernels


def _compiled(launch):
    constants = {name: value for name, value in launch._options.items() if name.isupper()}
    warps, fuses = launch._options["num_warps"], launch._options["enable_fp_fusion"]
    compiled = aot_matrix.compile_for(aot_matrix.TARGETS[SIMULATED], launch._kernel, constants, warps, fuses)
    return Kernel(compiled.asm["ptx"], compiled.metadata.shared)


def _bits(number):
    """A number as a kernel is given it: a float in fp32."""
    with np.errstate(over="ignore"):
        return int(np.float32(number).view(np.uint32)) if isinstance(number, float) else number


def _spans(launch, tensors):
    """(address, bytes) of all that a launch may touch."""
    for tensor in tensors.values():
        if not isinstance(tensor, int | float):
            yield tensor.data_ptr(), tensor.numel() * tensor.element_size()
    if "address_ptr" in tensors:
        itemsize = launch._options["DTYPE"].primitive_bitwidth // 8
        for address, numel in zip(tensors["address_ptr"].tolist(), tensors["numel_ptr"].tolist(), strict=True):
            yield address, numel * itemsize if address else 0
