"""Compiles every kernel for GPUs that need not be there and prints, as JSON, what their machine code does.

Run in a process of its own, without TRITON_INTERPRET: the interpreter does not type-check, and a process has
either interpreted kernels or compiled ones.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from scaler_triton.kernels import launcher
from scaler_triton.kernels.launch_config import DEFAULT, WARP_LANES
from scaler_triton.kernels.nonfinite import _check_nonfinite_kernel
from scaler_triton.kernels.table import GradTable
from scaler_triton.kernels.unscale import _unscale_kernel, launch_unscale
from scaler_triton.kernels.update_scale import _update_scale_kernel

TARGETS = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (70, 75, 80, 90, 100)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)

TYPES = {
    "address_ptr": "*i64",
    "numel_ptr": "*i64",
    "chunk_tensor_ptr": "*i32",
    "chunk_index_ptr": "*i32",
    "bits_ptr": "*i32",
    "found_inf_ptr": "*fp32",
    "scale_ptr": "*fp32",
    "growth_tracker_ptr": "*i32",
}
SCALARS = {"growth_factor": 1.1, "backoff_factor": 0.5, "growth_interval": 2000}
# What a launch promises of the table's own tensors, and of nothing else.
ALIGNED = ("address_ptr", "numel_ptr", "chunk_tensor_ptr", "chunk_index_ptr", "bits_ptr")


def variants():
    """(name, kernel, constexprs, warps of 32 lanes) of every kernel that can be launched."""
    for torch_dtype, dtype in launcher.TRITON_DTYPES.items():
        name = str(torch_dtype).removeprefix("torch.")
        itemsize = torch_dtype.itemsize
        table = {"DTYPE": dtype, "BLOCK_SIZE": DEFAULT.block_elements(itemsize), "UNROLL": DEFAULT.unroll}
        yield f"unscale-{name}", _unscale_kernel, {**table, "INVERSE": False}, DEFAULT.num_warps
        yield f"unscale_inverse-{name}", _unscale_kernel, {**table, "INVERSE": True}, DEFAULT.num_warps
        yield f"check-{name}", _check_nonfinite_kernel, table, DEFAULT.num_warps
    yield "update", _update_scale_kernel, {}, 1


def type_of(param):
    """The type that a launch gives a parameter: an unannotated float would be fp32."""
    if param.name in SCALARS:
        return param.annotation_type or mangle_type(SCALARS[param.name])
    return TYPES.get(param.name, "constexpr")


def compile_for(target, kernel, constants, num_warps):
    signature = {param.name: type_of(param) for param in kernel.params}
    attrs = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(kernel.arg_names) if name in ALIGNED}
    options = {
        "num_warps": max(1, num_warps * WARP_LANES // target.warp_size),
        "enable_fp_fusion": True,
    }
    source = ASTSource(kernel, signature, constants, attrs)
    return triton.compile(source, target=target, options=options)


def report_ptx(compiled):
    ptx = compiled.asm["ptx"]
    accesses = Counter(re.findall(r"\b((?:ld|st)\.global\.[\w.]+)", ptx))
    before_narrow_store = re.split(r"st\.global\.b(?:16|32|64)", ptx)[0].rpartition("ld.global")[2]
    return {
        "accesses": accesses,
        "barrier_before_edge_store": "bar.sync" in before_narrow_store,
        "flushes": ".ftz" in ptx,
        "approximates": ".approx" in ptx or "div.full" in ptx,
        "div_rn": len(re.findall(r"\bdiv\.rn\.f32", ptx)),
        "mul_f64": len(re.findall(r"\bmul(?:\.rn)?\.f64", ptx)),
        **report_resources(compiled.asm["cubin"]),
    }


def report_resources(cubin):
    """Registers and spills, or nothing where Triton's package has no cuobjdump."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"]}


def report_amdgcn(compiled):
    code = compiled.asm["amdgcn"]
    return {
        "wide_loads": len(re.findall(r"\b(?:buffer|global)_load_dwordx4", code)),
        "wide_stores": len(re.findall(r"\b(?:buffer|global)_store_dwordx4", code)),
        "registers": int(re.search(r"\.vgpr_count:\s+(\d+)", code)[1]),
        "spilled": int(re.search(r"\.vgpr_spill_count:\s+(\d+)", code)[1]),
    }


def refusal_of_cpu_tensors():
    table = GradTable([1], torch.float32, torch.device("cpu"))
    try:
        launch_unscale(table, torch.ones(()), torch.zeros(()), inverse=True)
    except RuntimeError as error:
        return str(error)


def main():
    assert not launcher.INTERPRETED
    kernels = {}
    for target_name, target in TARGETS.items():
        for name, kernel, constants, num_warps in variants():
            compiled = compile_for(target, kernel, constants, num_warps)
            report = report_amdgcn if target.backend == "hip" else report_ptx
            kernels[f"{target_name}-{name}"] = report(compiled)
    json.dump({"kernels": kernels, "refusal": refusal_of_cpu_tensors()}, sys.stdout)


if __name__ == "__main__":
    main()
