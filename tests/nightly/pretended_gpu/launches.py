"""What Triton's launcher gives the stub driver runs on the PTX simulator, on the addresses that it was given."""

import ctypes
import os
import re
import traceback

import torch

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.POINTER(ctypes.c_void_p))

kernels = {}  # by the driver's handle: the simulator's, and the index of the GPU that it was loaded on


def install(compiler):
    """Let the driver run what is launched, and know each kernel's PTX as soon as it is loaded."""
    from ptx_simulator import Kernel

    library = ctypes.CDLL("libcuda.so.1")
    library.stub_on_launch(_on_launch)
    load = compiler.CompiledKernel._init_handles

    def load_and_remember(kernel):
        load(kernel)
        if kernel.function not in kernels:
            simulated = Kernel(kernel.asm["ptx"], kernel.metadata.shared)
            kernels[kernel.function] = simulated, torch._C._pretended_gpu.current_gpu()

    compiler.CompiledKernel._init_handles = load_and_remember


@CALLBACK
def _on_launch(function, n_programs, params):
    gpu = torch._C._pretended_gpu
    try:
        kernel, index = kernels[function]
        assert index == gpu.current_gpu(), f"a kernel loaded on GPU {index} is launched on another"
        values = [_value(kind, params[number]) for number, kind in enumerate(kernel.params.values())]

        def run():  # it may touch whatever is allocated on its GPU: the driver is told no more
            kernel.run(n_programs, values, gpu.blocks_on(index), watched=False)

        gpu.tick()
        run()
        gpu.note("triton", False)
        if gpu.is_capturing():
            gpu.capture(run)
    except BaseException:  # nobody above would hear of it
        traceback.print_exc()
        os._exit(1)


def _value(kind, address):
    raw = ctypes.string_at(address, int(re.sub(r"\D", "", kind)) // 8)
    return int.from_bytes(raw, "little", signed=kind.startswith("s"))
