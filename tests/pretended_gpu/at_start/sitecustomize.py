"""Python imports this at its start, where this folder is on its path: torch is given a GPU while it is imported."""

import importlib.abc
import importlib.util
import os
import sys


class Installer(importlib.abc.MetaPathFinder):
    """Calls what installs each part: torch's bindings before torch.cuda looks for them, the rest after its module."""

    def find_spec(self, name, path, target=None):
        if name == "torch.cuda" and sys.modules["torch._C"] is not None:
            self._once("torch_cuda", sys.modules["torch._C"])
        part = AFTER.pop(name, None)
        if part is None:
            return None
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            self._once(part, module)

        spec.loader.exec_module = exec_module
        return spec

    def __init__(self):
        self._installed = set()

    def _once(self, part, module):
        if part not in self._installed:
            self._installed.add(part)
            importlib.import_module(f"pretended_gpu.{part}").install(module)


AFTER = {
    "triton.compiler.compiler": "launches",
    "torch.profiler": "profiling",
    "torch.distributed.distributed_c10d": "gloo_for_nccl",
}

if os.environ.get("PRETENDED_GPU"):
    sys.meta_path.insert(0, Installer())
