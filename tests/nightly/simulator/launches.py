"""What is compiled and reaches the CUDA driver through Triton's C launcher, and by which way, seen without a GPU.

`test_launches.py` runs these tests in a process of their own, on a driver that notes each launch and runs none.
"""

import struct
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from perf import stub_driver
from scaler_triton.kernels import abi, launch, norm, spike, update_scale
from scaler_triton.kernels.clip import _clip_kernel, launch_clip
from scaler_triton.kernels.config import DEFAULT
from scaler_triton.kernels.measure import _measure_kernel, launch_measure
from scaler_triton.kernels.table import GradTable
from scaler_triton.kernels.unscale import _unscale_kernel, launch_check, launch_unscale

CPU = torch.device("cpu")
SCALE, FLAG = torch.ones(()), torch.zeros(())
CHUNK = DEFAULT.chunk_elements(2)
TABLES = [([], 0), ([0], 0), ([1], 1), ([CHUNK, 10], 2), ([17 * CHUNK], 17)]  # elements, and programs
ROWS = [1, 16, 17, 0b101, (1 << 32) - 1]
LENGTHS = [65, 66, 80, 127, 128]  # of windows that one compilation serves
PLACES = (0, 1)  # what is no table's is at an address that is aligned, or at one that is not
TABLE = ["numel_ptr", "chunk_tensor_ptr", "chunk_index_ptr"]


@pytest.fixture(scope="module", autouse=True)
def driver():
    stub_driver.activate()
    with stub_driver.as_gpu():
        yield


def launched(start, *args, params=9, **options):
    """What reached the driver, and so many of its parameters: each kernel has as many, with Triton's own two."""
    stub_driver.note_params(params)
    before = stub_driver.launches()
    start(*args, **options)
    return [stub_driver.launch(number) for number in range(before, stub_driver.launches())]


def assert_launched(launches, name, programs, warps, tensors, numbers=()):
    """One launch, which was given these first; none of no programs."""
    assert len(launches) == (programs > 0)
    for each in launches:
        assert (each.kernel, each.grid, each.block) == (name, (programs, 1, 1), (32 * warps, 1, 1))
        wanted = [*(tensor.data_ptr() for tensor in tensors), *numbers]
        assert [*each.params[: len(wanted)]] == wanted


def assert_compiled(kernel, versions, warps, aligned, types=None, *, fuses=True):
    """No size, alignment or number has made another compilation.

    What is aligned are the table's own tensors, and numbers have the types that the kernel names.
    """
    found, names = list(kernel.device_caches[0][0].values()), kernel.arg_names
    assert len(found) == versions
    for each in found:
        assert (each.metadata.num_warps, each.metadata.enable_fp_fusion) == (warps, fuses)
        assert [names[place] for (place,), attrs in each.src.attrs.items() if attrs] == aligned
        assert each.src.signature.items() >= (types or {}).items()
        if aligned[:3] == TABLE:
            constants = {names[place]: value for (place,), value in each.src.constants.items()}
            assert (constants["BLOCK_SIZE"], constants["UNROLL"]) == (DEFAULT.block_elements(2), DEFAULT.unroll)


def doubles(size):
    return torch.ones(size + 1, dtype=torch.float64)


def tensors_of(table):
    return table.numels, table.chunk_tensors, table.chunk_indices


def test_passes_over_a_table():
    """One launch each, with the table's own addresses."""
    floats = torch.ones(2)
    for place in PLACES:
        scale, flag = floats[place], floats[1 - place]
        for numels, programs in TABLES:
            table = GradTable(numels, torch.float16, CPU)
            marks = table.bits, table.generation
            for launches, number in (
                (launched(launch_check, table, flag), flag),
                (launched(launch_unscale, table, scale, flag, inverse=False), scale),
                (launched(launch_unscale, table, scale, flag, inverse=True), scale),
            ):
                given = [*tensors_of(table), *marks, table.addresses, flag, number]
                assert_launched(launches, "_unscale_kernel", programs, DEFAULT.num_warps, given)
    # By a scale, by its inverse, and a check.
    assert_compiled(_unscale_kernel, 3, DEFAULT.num_warps, [*TABLE, "bits_ptr", "address_ptr"])


def test_measuring_is_one_launch():
    totals = doubles(abi.MEASURED_ROW)
    for place in PLACES:
        for numels, programs in TABLES:
            table = GradTable(numels, torch.float16, CPU)
            for _ in range(2):  # through Triton's dispatch, and without it
                launches = launched(launch_measure, table, totals[place:], params=5)
                given = [*tensors_of(table), table.addresses, totals[place:]]
                assert_launched(launches, "_measure_kernel", programs, DEFAULT.num_warps, given)
    assert_compiled(_measure_kernel, 1, DEFAULT.num_warps, [*TABLE, "address_ptr"])


def test_a_norm_is_two_launches_the_second_of_one_program():
    floats, totals = torch.ones(2), doubles(abi.TOTALS)
    for place in PLACES:
        scale, flag, total = floats[place], floats[1 - place], totals[place:]
        for numels, programs in TABLES:
            table = GradTable(numels, torch.float16, CPU)
            *first, last = launched(norm.launch_sum_of_squares, table, scale, flag, total, params=7)
            given = [*tensors_of(table), table.bits, table.generation, table.weights, table.partials]
            assert_launched(first, "_sum_squares_kernel", programs, DEFAULT.num_warps, given)
            given = [table.partials, scale, flag, total]
            assert_launched([last], "_finish_kernel", 1, norm._FINISH_WARPS, given, [table.partials.numel()])
    aligned = [*TABLE, "bits_ptr", "address_ptr"]
    assert_compiled(norm._sum_squares_kernel, 1, DEFAULT.num_warps, aligned)
    assert_compiled(norm._finish_kernel, 1, norm._FINISH_WARPS, ["partial_ptr"], {"n_partials": "i64"})


def test_clipping_is_given_the_bound_in_fp32():
    floats, totals = torch.ones(4), doubles(abi.TOTALS)
    for place in PLACES:
        scale, total, norm = floats[place], totals[place:], floats[2 + place]
        for (numels, programs), bound, ranks in zip(TABLES, (0.3, 1, 1, 0.3, 16), (1, 1, 16, 17, 2**40), strict=True):
            table = GradTable(numels, torch.float16, CPU)
            for _ in range(2):  # through Triton's dispatch, and without it
                launches = launched(launch_clip, table, scale, total, bound, norm, None, ranks)
                given = [*tensors_of(table), table.addresses, scale, total, norm, norm]
                assert_launched(launches, "_clip_kernel", programs, DEFAULT.num_warps, given)
                for each in launches:
                    assert each.params[8] & 0xFFFFFFFF == struct.unpack("I", struct.pack("f", bound))[0]
    assert_compiled(_clip_kernel, 1, DEFAULT.num_warps, [*TABLE, "address_ptr"], {"max_norm": "fp32", "ranks": "i64"})


def test_the_scale_is_updated_by_one_warp():
    floats, flags, trackers = torch.ones(4), torch.zeros(abi.ROWS + 1, abi.STATUS), torch.zeros(2, dtype=torch.int32)
    policies, counters = doubles(abi.POLICY), torch.zeros(abi.COUNTERS, dtype=torch.int64)
    measured, rings = doubles(abi.MEASURED_ROW), doubles(abi.HEADROOM_HEADER + 17)
    for place in PLACES:
        policy = policies[place:]
        state, moved = (flags[place:], floats, policy, counters), (floats[place], trackers[place])
        for rows in ROWS:
            update_scale._launch_on.cache_clear()  # each launch is its Launch's first
            for for_good in (False, True):
                launch = update_scale.bind_update(*state, clear=False, for_good=for_good)
                launches = launched(launch, *moved, rows)
                assert_launched(launches, "_update_scale_kernel", 1, 1, [*state, policy, policy, *moved], [rows])
            ring = rings[place : place + abi.HEADROOM_HEADER + 16]
            options = {"measured": measured[place:], "headroom": ring, "bits": 2}
            launches = launched(update_scale.bind_update(*state, clear=False, **options), *moved, rows)
            given = [*state, measured[place:], ring, *moved]
            assert_launched(launches, "_update_scale_kernel", 1, 1, given, [rows])
    assert_compiled(update_scale._update_scale_kernel, 2, 1, [], {"rows": "i64"})


def test_counts_are_written_by_one_warp():
    trackers, counters = torch.zeros(2, dtype=torch.int32), torch.zeros(abi.COUNTERS, dtype=torch.int64)
    for place in PLACES:
        update_scale._counts_on.cache_clear()
        for numbers in ((1, 2), (16, 2**31), (2**31 - 1, 2**33)):
            launches = launched(update_scale.launch_counts, trackers[place], counters, *numbers)
            given = [trackers[place], counters]
            assert_launched(launches, "_write_counts_kernel", 1, 1, given, list(numbers))
    assert_compiled(update_scale._write_counts_kernel, 1, 1, [], {"tracker": "i64", "updates": "i64"})


def test_a_judgement_is_one_launch_of_one_warp():
    windows, counters = doubles(abi.HEADER + 128), torch.zeros(abi.COUNTERS, dtype=torch.int64)
    totals, statuses = doubles(abi.TOTALS), torch.zeros(2, abi.STATUS)
    for place in PLACES:
        given = totals[place:], statuses[place], windows[place:], counters
        for length, ranks in zip(LENGTHS, (1, 1, 16, 17, 2**40), strict=True):
            spike._launch_on.cache_clear()
            for first in (True, False):
                launches = launched(spike.launch_judge, *given, length, ranks, first=first)
                assert_launched(launches, "_judge_kernel", 1, 1, given, [length, ranks, first])
    assert_compiled(spike._judge_kernel, 1, 1, [], {"window": "i64", "ranks": "i64", "first": "i64"}, fuses=False)


def dispatched(count=4, **other):
    """Launch `count` times over one table; how often through Triton's dispatch. All launches are the same.

    What is `other` is so on the compiled kernels of a Triton that launches otherwise.
    """
    kernels, run = [], JITFunction.run

    def dispatch(kernel, *args, **kwargs):
        compiled = run(kernel, *args, **kwargs)
        known = {name: getattr(compiled, name) for name in ("run", "function", "packed_metadata")}
        kernels.append(kernel)
        return SimpleNamespace(**{**known, **other}) if other else compiled

    table = GradTable([3], torch.float32, CPU)
    with mock.patch.object(JITFunction, "run", dispatch):
        launches = [launched(launch_unscale, table, SCALE, FLAG, inverse=False) for _ in range(count)]
    assert launches == [launches[0]] * count
    return len(kernels)


def test_a_later_launch_leaves_out_tritons_dispatch_unless_this_triton_cannot_do_without_it():
    assert dispatched() == 1
    assert dispatched(run=None) == 4
    refusing = mock.Mock(side_effect=TypeError("function takes exactly 3 arguments (99 given)"))
    assert dispatched(run=refusing) == 4
    assert refusing.call_count == 1  # is remembered
    with mock.patch.object(launch, "driver", SimpleNamespace(active=SimpleNamespace())):  # tells of streams otherwise
        assert dispatched() == 4
    with mock.patch.object(launch, "_in_c", return_value=None):
        assert dispatched() == 1


@pytest.mark.parametrize("when", ["enter", "exit"])
def test_a_profilers_hook_sees_every_launch(when):
    seen, table = [], GradTable([3], torch.float32, CPU)
    chain = getattr(triton.knobs.runtime, f"launch_{when}_hook")
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    for number in range(5):
        if number == 2:
            chain.add(hook)
        assert len(launched(launch_unscale, table, SCALE, FLAG, inverse=False)) == 1
    chain.remove(hook)
    assert seen == ["_unscale_kernel"] * 3
