"""What Triton's launcher gives the stub driver runs on the PTX simulator, on the addresses that it was given."""

import ctypes
import os
import re
import traceback
from types import SimpleNamespace

import numpy as np
import torch

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.POINTER(ctypes.c_void_p))

kernels = {}  # by the driver's handle


def install(compiler):
    """Let the driver run what is launched, and know each kernel's PTX as soon as it is loaded."""
    library = ctypes.CDLL("libcuda.so.1")
    library.stub_on_launch(_on_launch)
    load = compiler.CompiledKernel._init_handles

    def load_and_remember(kernel):
        load(kernel)
        if kernel.function not in kernels:
            gpu = torch._C._pretended_gpu.current_gpu()
            kernels[kernel.function] = _kernel(kernel.asm["ptx"], kernel.metadata.shared, gpu)

    compiler.CompiledKernel._init_handles = load_and_remember


@CALLBACK
def _on_launch(function, n_programs, params):
    gpu = torch._C._pretended_gpu
    try:
        kernel = kernels[function]
        assert kernel.gpu == gpu.current_gpu(), f"a kernel loaded on GPU {kernel.gpu} is launched on another"
        values = [_value(kind, params[number]) for number, kind in enumerate(kernel.kinds)]
        gpu.tick()
        kernel.run(n_programs, values)
        gpu.note("triton", False)
        if gpu.is_capturing():
            gpu.capture(lambda: kernel.run(n_programs, values))
    except BaseException:  # nobody above would hear of it
        traceback.print_exc()
        os._exit(1)


def _value(kind, address):
    raw = ctypes.string_at(address, int(re.sub(r"\D", "", kind)) // 8)
    return int.from_bytes(raw, "little", signed=kind.startswith("s"))


def _kernel(ptx, shared_bytes, gpu):
    """A kernel of the simulator, which may touch whatever is allocated on its GPU: the driver is told no more."""
    from ptx_block import Block
    from ptx_memory import Memory
    from ptx_simulator import Kernel

    kernel = Kernel(ptx, shared_bytes)
    header = ptx.split(".visible .entry", 1)[1].split("$L__func_begin0:", 1)[0]

    def run(n_programs, values):
        params = dict(zip(kernel.params, values, strict=True))
        memory = Memory(torch._C._pretended_gpu.blocks_on(gpu))
        with np.errstate(all="ignore"):
            for number in range(n_programs):
                block = Block(kernel, number, params, memory)
                block.races = dict.fromkeys(block.races, Unwatched())
                block.run()

    return SimpleNamespace(run=run, gpu=gpu, kinds=re.findall(r"\.param \.(\w+)[^,\n]*?_param_\d+", header))


class Unwatched:
    """In place of the simulator's `Races`: the simulator's own tests watch for them."""

    def note(self, *args, **kwargs):
        return 0

    def barrier(self):
        pass
