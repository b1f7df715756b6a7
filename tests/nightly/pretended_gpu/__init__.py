"""A GPU that is not there, for a torch with CUDA or without: tests of what needs one run in a process that has it.

Its memory is the host's, its operations are the CPU's, and kernels run as compiled for an sm_90, on
`../simulator/ptx_simulator.py`, launched by Triton's own launcher on `perf/stub_driver`. torch.cuda is torch's own;
below it, `torch_cuda.py` and `native/` take the place of what is compiled only with CUDA. Work is done when it is
given, in one stream as in several, but copies to pinned memory arrive late, and those from it must not change
meanwhile. What waits for the GPU raises where torch would (in a capture, and as `torch.cuda.set_sync_debug_mode`
says), tensors of two devices do not mix, kernels reach no memory but their GPU's, new memory is garbage, and graphs are
captured and replayed. gloo stands in for NCCL, and refuses what it has for the host's tensors only.
`CUDA_VISIBLE_DEVICES=0,1` makes it two GPUs.

    subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu"], env=os.environ | pretended_gpu.environment(folder))

Needs g++ and Python's headers, on Linux.
"""

import os
import subprocess
import sysconfig
from pathlib import Path

from perf import stub_driver

HERE = Path(__file__).parent
VARIABLE = "PRETENDED_GPU"  # the path of the library; without it, at_start/ does nothing
LIBRARY = "pretended_gpu.so"


def environment(folder: Path) -> dict[str, str]:
    """Return the variables that a process needs from its start to have the GPU; builds it in `folder`."""
    folders = HERE / "at_start", HERE.parent, HERE.parent / "simulator", HERE.parents[2]
    search = [*folders, os.environ.get("PYTHONPATH", "")]
    return stub_driver.environment(folder) | {
        VARIABLE: str(build(folder)),
        "PYTHONPATH": os.pathsep.join(filter(None, map(str, search))),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def build(folder: Path) -> Path:
    """Compile what is native, each file in a process of its own, and return the library."""
    from torch.utils import cpp_extension

    include = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    flags = ["-std=c++20", "-O1", "-fPIC", "-w", f"-DTORCH_EXTENSION_NAME={LIBRARY.partition('.')[0]}"]
    flags += [option for path in include for option in ("-isystem", path)]
    objects, running = [], []
    for source in sorted((HERE / "native").glob("*.cpp")):
        objects.append(folder / f"{source.stem}.o")
        running.append(subprocess.Popen(["g++", *flags, "-c", source, "-o", objects[-1]]))
    assert [process.wait() for process in running] == [0] * len(running)
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    subprocess.run(["g++", "-shared", *objects, *libraries, "-o", folder / LIBRARY], check=True)
    return folder / LIBRARY
