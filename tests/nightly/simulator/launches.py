"""Launches every kernel through Triton's own C launcher, on a driver that notes each launch and runs none.

Prints as JSON what reached the driver, what was compiled for it, and which way launches take: through Triton's
dispatch, or straight to the compiled kernel. Run in a process of its own, started with the stub driver's environment.
"""

import json
import sys
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton.runtime.jit import JITFunction

from perf import stub_driver
from scaler_triton.kernels import abi, launch, measure, spike, update_scale
from scaler_triton.kernels.clip import _clip_kernel, launch_clip
from scaler_triton.kernels.config import DEFAULT
from scaler_triton.kernels.table import GradTable
from scaler_triton.kernels.unscale import _unscale_kernel, launch_check, launch_unscale

CPU = torch.device("cpu")
SCALE, FLAG = torch.ones(()), torch.zeros(())
TABLE_PARAMS = ("addresses", "numels", "chunk_tensors", "chunk_indices", "bits")
CHUNK = DEFAULT.chunk_elements(2)
# (elements of the table's tensors, a clip's bound and ranks, rows of an update, norms in a guard's window or exponents
# in that of the headroom): each launch is its Launch's first.
ROUNDS = [
    ([], 0.3, 1, 1, 65),
    ([0], 1, 1, 16, 66),
    ([1], 1, 16, 17, 80),
    ([CHUNK, 10], 0.3, 17, 0b101, 127),
    ([17 * CHUNK], 16, 2**40, (1 << 32) - 1, 128),
]


def launched(start, *args, params=9, **options):
    """What reached the driver, and so many of its parameters: each kernel has as many, with Triton's own two."""
    stub_driver.note_params(params)
    before = stub_driver.launches()
    start(*args, **options)
    return [stub_driver.launch(number)._asdict() for number in range(before, stub_driver.launches())]


def addresses(*tensors):
    return [tensor.data_ptr() for tensor in tensors]


def launch_all():
    """Yield each round, with what is no table's at an address that is aligned, or with one that is not."""
    floats, flags = torch.ones(4), torch.zeros(abi.ROWS + 1, abi.STATUS)
    trackers, counters = torch.zeros(2, dtype=torch.int32), torch.zeros(abi.COUNTERS, dtype=torch.int64)
    sizes = abi.POLICY, abi.TOTALS, abi.HEADER + 128, abi.MEASURED_ROW, abi.HEADROOM_HEADER + 128
    policy, totals, window, measured, ring = (torch.ones(count + 1, dtype=torch.float64) for count in sizes)
    for place in (0, 1):
        scale, flag, norm = floats[place], floats[1 - place], floats[2 + place]
        clip = scale, totals[place:], norm
        update = scale, trackers[place], flags[place:], floats, policy[place:], counters
        judged = totals[place:], flags[place], window[place:], counters
        for numels, bound, ranks, rows, length in ROUNDS:
            table = GradTable(numels, torch.float16, CPU)
            headroom = ring[place : place + abi.HEADROOM_HEADER + length]
            given = {"measured": measured[place:], "headroom": headroom, "bits": rows % 31}
            update_scale._launch_on.cache_clear()
            spike._launch_on.cache_clear()
            yield {
                "table": addresses(*(getattr(table, name) for name in TABLE_PARAMS)),
                "scalars": addresses(scale, flag),
                "clip_tensors": addresses(*clip, norm),
                "update_tensors": addresses(*update),
                "judge_tensors": addresses(*judged),
                "measured_tensors": addresses(table.measured, measured[place:], headroom),
                "check": launched(launch_check, table, flag),
                "check_measuring": launched(launch_check, table, flag, measures=True),
                "add_measured": launched(measure.launch_add_measured, table, measured[place:], params=3),
                "unscale": launched(launch_unscale, table, scale, flag, inverse=False),
                "inverse": launched(launch_unscale, table, scale, flag, inverse=True),
                "clip": [launched(launch_clip, table, *clip[:2], bound, norm, None, ranks) for _ in range(2)],
                "update": launched(update_scale.launch_update, *update, rows, clear=False),
                "by_headroom": launched(update_scale.launch_update, *update, rows, clear=False, **given, params=11),
                "judge": [launched(spike.launch_judge, *judged, length, ranks, first=first) for first in (True, False)],
            }


def compiled(kernel):
    """What Triton knows of each version of a kernel that was launched."""
    names = kernel.arg_names
    for each in kernel.device_caches[0][0].values():
        source = each.src
        yield {
            "num_warps": each.metadata.num_warps,
            "enable_fp_fusion": each.metadata.enable_fp_fusion,
            "types": dict(source.signature),
            "aligned": [names[place] for (place,), attrs in source.attrs.items() if attrs],
            "constants": {names[place]: value for (place,), value in source.constants.items() if type(value) is int},
        }


refusals, seen = [], []


def refuse(*args):
    refusals.append(args)
    raise TypeError("function takes exactly 3 arguments (99 given)")


def paths(count=4, *, hook=None, when="enter", **other):
    """Launch `count` times over one table, from the third on with a hook: how many went through dispatch, and more.

    What is `other` is so on the compiled kernels of a Triton that launches otherwise.
    """
    dispatched = []

    def dispatch(kernel, *args, **kwargs):
        dispatched.append(kernel)
        compiled = run(kernel, *args, **kwargs)
        known = {name: getattr(compiled, name) for name in ("run", "function", "packed_metadata")}
        return SimpleNamespace(**{**known, **other}) if other else compiled

    def launch_often():
        for number in range(count):
            if hook and number == 2:
                chain.add(hook)
            launch_unscale(table, SCALE, FLAG, inverse=False)

    chain = getattr(triton.knobs.runtime, f"launch_{when}_hook")
    table, run = GradTable([3], torch.float32, CPU), JITFunction.run
    with mock.patch.object(JITFunction, "run", dispatch):
        launches = launched(launch_often)
    if hook:
        chain.remove(hook)
    same = all(each == launches[0] for each in launches)
    return {"dispatched": len(dispatched), "same": same, "launches": len(launches)}


def without_stream():
    """As `paths`, on a Triton whose driver tells of streams otherwise."""
    with mock.patch.object(launch, "driver", SimpleNamespace(active=SimpleNamespace())):
        return paths()


def without_inner():
    """As `paths`, without Triton's function in C; and whether this Triton has it where it is looked for."""
    with mock.patch.object(launch, "_inner", side_effect=launch._inner) as looked:
        paths()
    is_known = launch._inner(*looked.call_args.args) is not None
    with mock.patch.object(launch, "_inner", return_value=None):
        return {**paths(), "is_known": is_known}


def calls():
    """The Python functions that a later launch calls."""
    table, names = GradTable([3], torch.float32, CPU), []
    for _ in range(2):
        launch_unscale(table, SCALE, FLAG, inverse=False)
    sys.setprofile(lambda frame, event, arg: event == "call" and names.append(frame.f_code.co_name))
    launch_unscale(table, SCALE, FLAG, inverse=False)
    sys.setprofile(None)
    return names


def main():
    stub_driver.activate()
    with stub_driver.as_gpu():
        found = {"rounds": list(launch_all()), "interpreted": launch.INTERPRETED}
        kernels = (_unscale_kernel, _clip_kernel, update_scale._update_scale_kernel, spike._judge_kernel)
        kernels += (measure._add_measured_kernel,)
        found["kernels"] = {kernel.fn.__name__: list(compiled(kernel)) for kernel in kernels}
        found["paths"] = {
            "usual": paths(),
            "hooked": paths(5, hook=lambda metadata: seen.append(metadata.get()["name"])),
            "hooked behind": paths(5, hook=lambda metadata: seen.append("behind"), when="exit"),
            "without run": paths(run=None),
            "refusing": paths(run=refuse),
            "without stream": without_stream(),
            "without inner": without_inner(),
        }
        found["calls"] = calls()
    json.dump({**found, "seen": seen, "refusals": len(refusals)}, sys.stdout)


if __name__ == "__main__":
    main()
