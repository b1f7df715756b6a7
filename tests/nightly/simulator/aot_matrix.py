"""Compiles every kernel for GPUs that need not be there and prints, as JSON, what their machine code does.

Also compiles, for one GPU, every launch configuration that is shipped or that `tune` may choose.

Run in a process of its own, without TRITON_INTERPRET: the interpreter does not type-check, and a process has
either interpreted kernels or compiled ones.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scaler_triton.kernels import abi, config, launch
from scaler_triton.kernels.clip import _clip_kernel
from scaler_triton.kernels.config import CANDIDATES, DEFAULT, WARP_LANES
from scaler_triton.kernels.measure import _measure_kernel
from scaler_triton.kernels.norm import _FINISH_WARPS, _finish_kernel, _sum_squares_kernel
from scaler_triton.kernels.spike import _judge_kernel, warps_of
from scaler_triton.kernels.table import PARTIALS_BLOCK
from scaler_triton.kernels.unscale import _unscale_kernel
from scaler_triton.kernels.update_scale import _update_scale_kernel, _write_counts_kernel

TARGETS = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (70, 75, 80, 90, 100)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)

_POINTERS = {
    "*i32": ["chunk_tensor", "chunk_index", "bits", "growth_tracker", "generation"],
    "*i64": ["address", "numel", "counters"],
    "*fp32": ["found_inf", "scale", "flags", "last_flags", "norm", "status"],
    "*fp64": ["policy", "weight", "partial", "totals", "window", "measured", "total", "headroom"],
}
TYPES = {f"{name}_ptr": kind for kind, names in _POINTERS.items() for name in names}
CONFIG_TARGET = "sm_90"
# What a launch promises of the table's own tensors, and of nothing else.
ALIGNED = ("numel_ptr", "chunk_tensor_ptr", "chunk_index_ptr", "address_ptr", "bits_ptr")


# Every pass over a table: its kernel, and the constants of its own.
PASSES = {
    "unscale": (_unscale_kernel, {"WRITE": True, "INVERSE": False}),
    "unscale_inverse": (_unscale_kernel, {"WRITE": True, "INVERSE": True}),
    "check": (_unscale_kernel, {"WRITE": False, "INVERSE": False}),
    "norm": (_sum_squares_kernel, {}),
    "clip": (_clip_kernel, {}),
    "measure": (_measure_kernel, {}),
}


def variants():
    """(name, kernel, constexprs, warps of 32 lanes) of every kernel that can be launched; and whether it may fuse."""
    for torch_dtype in launch.TRITON_DTYPES:
        for name, (kernel, own) in PASSES.items():
            constants = table_constants(torch_dtype, DEFAULT) | own
            yield f"{name}-{dtype_name(torch_dtype)}", kernel, constants, DEFAULT.num_warps
    for clear in (False, True):
        for ring in (0, 16, abi.MAX_HEADROOM_WINDOW):
            constants = {"CLEAR": clear, "HEADROOM": ring, "WINDOW": ring, "BITS": 2}
            name = f"update{'_and_clear' * clear}{f'_headroom-{ring}' * bool(ring)}"
            yield name, _update_scale_kernel, constants, 1
    yield "counts", _write_counts_kernel, {}, 1
    yield "finish", _finish_kernel, {"BLOCK_SIZE": PARTIALS_BLOCK}, _FINISH_WARPS
    for size in (2, 128, abi.MAX_WINDOW):
        yield f"judge-{size}", _judge_kernel, {"BLOCK_SIZE": size}, warps_of(size), False


def config_variants():
    """As `variants`, for every launch configuration that `tune` may choose or a file of this package holds."""
    for name in config.MODES:
        kernel, own = PASSES[name]
        for torch_dtype in launch.TRITON_DTYPES:
            for each in sorted({*CANDIDATES, *shipped_configs(name, torch_dtype.itemsize)}, key=str):
                constants = table_constants(torch_dtype, each) | own
                yield f"{name}-{dtype_name(torch_dtype)}-{each}", kernel, constants, each.num_warps


def shipped_configs(mode, itemsize):
    """The default and what the tuned files of this package hold for a pass."""
    found = {DEFAULT}
    for path in config.SHIPPED.glob("*.json"):
        configs = config.read(path, json.loads(path.read_text())["gpu"])
        found |= {each for (its_mode, size, _), each in configs.items() if (its_mode, size) == (mode, itemsize)}
    return found


def table_constants(torch_dtype, shape):
    block = shape.block_elements(torch_dtype.itemsize)
    return {"DTYPE": launch.TRITON_DTYPES[torch_dtype], "BLOCK_SIZE": block, "UNROLL": shape.unroll}


def dtype_name(torch_dtype):
    return str(torch_dtype).removeprefix("torch.")


def compile_for(target, kernel, constants, num_warps, fuses=True):
    # The types that a launch gives parameters: a number's is its annotation's.
    signature = {each.name: TYPES.get(each.name) or each.annotation_type or "constexpr" for each in kernel.params}
    attrs = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(kernel.arg_names) if name in ALIGNED}
    source = ASTSource(kernel, signature, constants, attrs)
    warps = max(1, num_warps * WARP_LANES // target.warp_size)
    return triton.compile(source, target=target, options={"num_warps": warps, "enable_fp_fusion": fuses})


def report_ptx(compiled):
    ptx = compiled.asm["ptx"]
    accesses = Counter(re.findall(r"\b((?:ld|st)\.global\.[\w.]+)", ptx))
    atomics = Counter(re.findall(r"\b(?:atom|red)\.global\.[\w.]*?((?:max|add|or)\.\w+)", ptx))
    wide_order = "".join(re.findall(r"\b([ls])[dt]\.global\.v", ptx))
    behind_body = ptx.rpartition("st.global.v")[2]
    before_narrow_store = re.split(r"st\.global\.b(?:16|32|64)", behind_body)[0].rpartition("ld.global")[2]
    return {
        "accesses": accesses,
        "atomics": atomics,
        "loads_between_stores": wide_order.strip("l").count("l"),
        "barrier_before_edge_store": "bar.sync" in before_narrow_store,
        "flushes": ".ftz" in ptx,
        "approximates": ".approx" in ptx or "div.full" in ptx,
        "div_rn": len(re.findall(r"\bdiv\.rn\.f32", ptx)),
        "div_rn_f64": len(re.findall(r"\bdiv\.rn\.f64", ptx)),
        "sqrt_rn_f64": len(re.findall(r"\bsqrt\.rn\.f64", ptx)),
        "fuses": "fma." in ptx,
        "mul_f64": len(re.findall(r"\bmul(?:\.rn)?\.f64", ptx)),
        **report_resources(compiled),
    }


def report_resources(compiled):
    """Registers and spills, or nothing where Triton's package has no cuobjdump."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
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


def jobs():
    """(key, target, report, variant) of everything that is compiled."""
    for target_name, target in TARGETS.items():
        report = report_amdgcn if target.backend == "hip" else report_ptx
        for variant in variants():
            yield f"{target_name}-{variant[0]}", target, report, variant
    for variant in config_variants():
        yield f"config-{variant[0]}", TARGETS[CONFIG_TARGET], report_resources, variant


def compile_job(number):
    key, target, report, (_, *variant) = JOBS[number]
    return key, report(compile_for(target, *variant))


JOBS = list(jobs())


def main():
    assert not launch.INTERPRETED
    # A forked worker has the kernels already. They compile without a GPU: no driver is open in this process.
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        reports = dict(pool.map(compile_job, range(len(JOBS)), chunksize=4))
    shipped = {
        f"{mode}-{dtype_name(dtype)}": sorted(map(str, shipped_configs(mode, dtype.itemsize)))
        for mode in config.MODES
        for dtype in launch.TRITON_DTYPES
    }
    json.dump({"kernels": reports, "shipped": shipped}, sys.stdout)


if __name__ == "__main__":
    main()
