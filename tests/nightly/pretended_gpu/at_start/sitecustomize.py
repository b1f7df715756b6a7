"""Python imports this at its start, where this folder is on its path: torch is given a GPU while it is imported."""

import importlib.abc
import importlib.util
import os
import sys

BEFORE = {"torch.cuda": ("torch_cuda", "torch._C")}  # it looks for its bindings when it is imported
AFTER = {
    "triton.compiler.compiler": "launches",
    "torch.profiler": "profiling",
    "torch.distributed.distributed_c10d": "gloo_for_nccl",
}


class Installer(importlib.abc.MetaPathFinder):
    """Calls the `install` of each part with the module that it changes, once."""

    def find_spec(self, name, path, target=None):
        if name in BEFORE:
            part, changed = BEFORE.pop(name)
            install(part, sys.modules[changed])
        return changed_spec(name, AFTER.pop(name)) if name in AFTER else None


def changed_spec(name, part):
    """The spec of a module that `part` changes as soon as it was run."""
    spec = importlib.util.find_spec(name)
    run = spec.loader.exec_module

    def run_and_install(module):
        run(module)
        install(part, module)

    spec.loader.exec_module = run_and_install
    return spec


def install(part, module):
    """Let a module of pretended_gpu change `module`."""
    importlib.import_module(f"pretended_gpu.{part}").install(module)


if os.environ.get("PRETENDED_GPU"):
    sys.meta_path.insert(0, Installer())
