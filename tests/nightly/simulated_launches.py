"""Lets kernels be launched on the simulator: compiled for a GPU that need not be there, on CPU tensors."""

from contextlib import contextmanager
from unittest import mock

import aot_matrix
from ptx_simulator import Kernel

from scaler_triton.kernels import launcher, probe


@contextmanager
def simulated(target):
    """Within, every launch runs as compiled for `target`, one of `aot_matrix.TARGETS`; yields the kernels.

    A launch may touch, of a table, the tensors at its addresses; of any other tensor its elements; and nothing else.
    """
    kernels = {}

    def start(launch, n_programs, *args):
        key = launch._kernel.fn.__name__, tuple(launch._options.items())
        if key not in kernels:
            kernels[key] = _compiled(launch, target)
        tensors = dict(zip(launch._kernel.arg_names, (*launch._fixed, *args), strict=False))
        params = [arg if isinstance(arg, int) else arg.data_ptr() for arg in tensors.values()]
        kernels[key].run(n_programs, params, list(_spans(launch, tensors)))

    with (
        mock.patch.object(launcher, "check_device"),
        mock.patch.object(probe, "check_device"),
        mock.patch.object(launcher.Launch, "__call__", start),
    ):
        yield kernels


def _compiled(launch, target):
    constants = {name: value for name, value in launch._options.items() if name.isupper()}
    compiled = aot_matrix.compile_for(
        aot_matrix.TARGETS[target], launch._kernel, constants, launch._options["num_warps"]
    )
    return Kernel(compiled.asm["ptx"], compiled.metadata.shared)


def _spans(launch, tensors):
    """(address, bytes) of all that a launch may touch."""
    for name, tensor in tensors.items():
        if name == "flags_ptr":  # what an update keeps follows the flags in their memory
            yield tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        elif not isinstance(tensor, int):
            yield tensor.data_ptr(), tensor.numel() * tensor.element_size()
    if "address_ptr" in tensors:
        itemsize = launch._options["DTYPE"].primitive_bitwidth // 8
        for address, numel in zip(tensors["address_ptr"].tolist(), tensors["numel_ptr"].tolist(), strict=True):
            yield address, numel * itemsize if address else 0
