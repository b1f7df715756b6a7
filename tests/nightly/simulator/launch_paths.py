"""Which way each launch takes: through Triton's dispatch, or straight to the compiled kernel. Prints JSON.

Run in a process of its own, started with the stub driver's environment.
"""

import json
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton.runtime.jit import JITFunction

from perf import stub_driver
from scaler_triton.kernels import launch
from scaler_triton.kernels.table import GradTable
from scaler_triton.kernels.unscale import launch_unscale

CPU = torch.device("cpu")
SCALE, FLAG = torch.ones(()), torch.zeros(())


class Odd:
    """A compiled kernel of a Triton that launches otherwise."""

    def __init__(self, compiled, **others):
        self.__dict__.update(function=compiled.function, packed_metadata=compiled.packed_metadata, run=compiled.run)
        self.__dict__.update(others)


refusals = []


def refuse(*args):
    refusals.append(args)
    raise TypeError("function takes exactly 3 arguments (99 given)")


def paths(count, *, other=None, hooks=(), when="enter"):
    """Launch `count` times over one table: how many went through dispatch, and what reached the driver."""
    dispatched = []

    def dispatch(kernel, *args, **kwargs):
        dispatched.append(kernel)
        compiled = run(kernel, *args, **kwargs)
        return compiled if other is None else Odd(compiled, **other)

    chain = getattr(triton.knobs.runtime, f"launch_{when}_hook")
    table, run, before = GradTable([3], torch.float32, CPU), JITFunction.run, stub_driver.launches()
    with mock.patch.object(JITFunction, "run", dispatch):
        for number in range(count):
            if number == 2:
                for hook in hooks:
                    chain.add(hook)
            launch_unscale(table, SCALE, FLAG, inverse=False)
    for hook in hooks:
        chain.remove(hook)
    launches = [stub_driver.launch(number) for number in range(before, stub_driver.launches())]
    return {"dispatched": len(dispatched), "same": len({each[1:] for each in launches}) == 1, "launches": len(launches)}


def without_stream():
    """As `paths`, on a Triton whose driver tells of streams otherwise."""
    with mock.patch.object(launch, "driver", SimpleNamespace(active=SimpleNamespace())):
        return paths(4)


def elsewhere():
    """As `paths`, while another device is the current one: and how many launches were made on the table's."""
    guarded, current = [], [1]

    @contextmanager
    def on(device):
        begin, before, current[0] = stub_driver.launches(), current[0], device.index
        yield
        current[0] = before
        guarded.append(stub_driver.launches() - begin)

    query = mock.patch.object(launch, "_current_device_query", return_value=lambda: current[0])
    with query, mock.patch.object(launch, "_on", on):
        found = paths(4)
    return {**found, "guarded": sum(guarded)}


def inner():
    """As `paths`, without Triton's function in C; and whether this Triton has it where it is looked for."""
    with mock.patch.object(launch, "_inner", side_effect=launch._inner) as looked:
        usual = paths(4)
        known = launch._inner(*looked.call_args.args) is not None
    with mock.patch.object(launch, "_inner", return_value=None):
        return {"with": usual, "without": paths(4), "is_known": known}


def calls():
    """How many calls of Python functions a later launch takes."""
    table, names = GradTable([3], torch.float32, CPU), []
    for _ in range(2):
        launch_unscale(table, SCALE, FLAG, inverse=False)
    sys.setprofile(lambda frame, event, arg: event == "call" and names.append(frame.f_code.co_name))
    launch_unscale(table, SCALE, FLAG, inverse=False)
    sys.setprofile(None)
    return names


def main():
    stub_driver.activate()
    stub_driver.note_params(6)
    seen = []
    with stub_driver.as_gpu():
        answers = {
            "usual": paths(4),
            "hooked": paths(5, hooks=[lambda metadata: seen.append(metadata.get()["name"])]),
            "hooked behind": paths(5, hooks=[lambda metadata: seen.append("behind")], when="exit"),
            "without run": paths(4, other={"run": None}),
            "refusing": paths(4, other={"run": refuse}),
            "without stream": without_stream(),
            "elsewhere": elsewhere(),
            "inner": inner(),
            "calls": calls(),
        }
    json.dump({**answers, "seen": seen, "refusals": len(refusals), "interpreted": launch.INTERPRETED}, sys.stdout)


if __name__ == "__main__":
    main()
