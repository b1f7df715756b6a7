"""Python imports this at its start, where this folder is on its path: torch is given a GPU while it is imported."""

import importlib.abc
import importlib.util
import os
import sys

PARTS = {  # of pretended_gpu, by the module that each of them changes as soon as it was run
    "triton.compiler.compiler": "launches",
    "torch.profiler": "profiling",
    "torch.distributed.distributed_c10d": "gloo_for_nccl",
    "torch.cuda": "torch_cuda",  # but before: it looks for its bindings, in torch._C, when it is imported
}


class Installer(importlib.abc.MetaPathFinder):
    """Calls the `install` of each part with the module that it changes, once."""

    def find_spec(self, name, path, target=None):
        part = PARTS.pop(name, None)
        if name == "torch.cuda" and part:
            install(part, sys.modules["torch._C"])
            return None
        return changed_spec(name, part) if part else None


def changed_spec(name, part):
    spec = importlib.util.find_spec(name)
    run = spec.loader.exec_module

    def run_and_install(module):
        run(module)
        install(part, module)

    spec.loader.exec_module = run_and_install
    return spec


def install(part, module):
    importlib.import_module(f"pretended_gpu.{part}").install(module)


if os.environ.get("PRETENDED_GPU"):
    sys.meta_path.insert(0, Installer())
