"""The flag of a step: its row, its agreement by MAX or by sums, its way to the host; what ranks have measured."""

import gc
import math
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scaler_triton.core import flag
from scaler_triton.core.flag import Flag, FlagRows
from scaler_triton.core.memory import HostCopy
from scaler_triton.core.step import OptimizerStep
from scaler_triton.kernels.abi import FAILED, FLAG, MAX_SCALE, ROWS

CPU, META = torch.device("cpu"), torch.device("meta")


def cleared(rows: FlagRows | None = None, *, on_gpu: bool = False) -> Flag:
    """Return a flag as a check begins with it; as one on a GPU, which Python does not read where it is, if asked."""
    made = (rows or FlagRows(CPU)).flag()
    if on_gpu:
        made._memory = None
    made.clear()
    return made


# Rows


def test_a_row_is_freed_with_its_flag_and_the_next_flag_on_it_is_clear() -> None:
    rows = FlagRows(CPU)
    flags = [cleared(rows) for _ in range(ROWS)]
    flags[3].found_inf.fill_(1.0)
    del flags[3]
    gc.collect()
    again = cleared(rows)
    assert (again.row, again.is_set()) == (3, False)


def test_each_flag_has_an_element_of_one_tensor_and_one_too_many_has_memory_of_its_own() -> None:
    rows = FlagRows(CPU)
    flags = [cleared(rows) for _ in range(ROWS + 1)]
    for made in flags[1::2] + flags[ROWS:]:
        made.found_inf.fill_(1.0)
    assert rows.status[:, FLAG].tolist() == [0.0, 1.0] * (ROWS // 2)
    assert [made.rows is rows for made in flags] == [True] * ROWS + [False]


class Made(TorchDispatchMode):
    """Notes which operations return tensors on the meta device, views apart, and what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.by: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if result.is_meta and not func.is_view:
            self.by.append((func._schema.name, kwargs or {}))
        return result


def test_rows_are_zeroed_by_copies_from_the_host_that_are_waited_for() -> None:
    """A kernel could zero them after another stream has set a flag."""
    with Made() as made:
        FlagRows(META)
    assert [name for name, _ in made.by] == ["aten::_to_copy"] * 2
    assert not any(given.get("non_blocking") for _, given in made.by)


def test_rows_made_in_inference_mode_are_written_outside() -> None:
    with torch.inference_mode():
        rows = FlagRows(CPU)
        made = rows.flag()
    assert not any(each.is_inference() for each in (rows.status, rows.last_flags, made.found_inf))


# One check


@pytest.mark.parametrize("on_gpu", [False, True])
def test_clear_forgets_the_last_check(on_gpu: bool) -> None:
    made = cleared(on_gpu=on_gpu)
    made.status.copy_(torch.tensor([1.0, 1.0, 3.0, 6.0]))
    made.summed_over = 2
    made.start_copy()
    made.saved, made.cleared = True, False
    made.clear()
    assert made.status[[FLAG, FAILED]].tolist() == [0.0, 0.0]
    assert not made.on_host()  # no comparison, no old copy
    assert (made.saved, made.is_final) == (False, False)


@pytest.mark.parametrize("captured", [False, True])
def test_a_row_that_an_update_has_cleared_is_cleared_again_only_in_a_capture(captured: bool) -> None:
    made = cleared(on_gpu=True)
    made.cleared = True
    version = made.status._version
    made.clear(captured)
    assert (made.status._version > version) is captured


@pytest.mark.parametrize("own", [0.0, 1.0])
@pytest.mark.parametrize("others", [[], [0.0], [0.0, 1.0, 0.0], [math.nan], [2.0]])
def test_add_sets_the_flag_if_any_is_set_and_never_clears_it(own: float, others: list[float]) -> None:
    made = cleared()
    made.found_inf.fill_(own)
    made.add([made.found_inf, *map(torch.tensor, others)])
    assert made.found_inf.item() == float(bool(own or any(others)))


@pytest.mark.parametrize(("overflows", "want"), [(0.0, 0.0), (1.0, 1.0), (3.0, 1.0), (math.nan, 1.0)])
def test_share_sets_the_flag_to_that_of_several_optimizers(overflows: float, want: float) -> None:
    made = cleared()
    made.found_inf.fill_(1.0 - want)
    made.share(torch.tensor(overflows, dtype=torch.float64))
    assert (made.found_inf.item(), made.is_final) == (want, True)


def test_it_is_given_to_each_device_once_in_their_order_and_is_itself_at_home() -> None:
    made = cleared()
    given = made.on_devices([META, CPU, META])
    assert [*given] == [META, CPU]
    assert given[CPU] is made.found_inf
    assert given[META].is_meta


# On the host

ITS_OWN: Any = None  # the flag itself stands in the step
ON_HOST = [
    # the flag, then written by others after the copy was started, or where no copy is; what stands in the step
    (0.0, 0.0, ITS_OWN, False, False),
    (1.0, 1.0, ITS_OWN, False, True),
    (math.nan, math.nan, ITS_OWN, False, True),
    (1.0, 1.0, {META: torch.zeros((), device="meta")}, False, True),  # a copy of it, which need not be read
    (0.0, 1.0, ITS_OWN, True, True),
    (0.0, 1.0, {CPU: torch.tensor(0.0)}, True, False),
    (0.0, 0.0, {CPU: torch.tensor([2.0])}, True, True),
    (0.0, 0.0, {CPU: torch.tensor(0.0), META: torch.tensor(1.0)}, True, True),
    (1.0, 1.0, {}, True, False),
]


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(("value", "later", "flags", "exposed", "skips"), ON_HOST)
def test_a_step_is_skipped_by_what_stands_in_it_once_other_code_has_seen_it(
    value: float, later: float, flags: Any, exposed: bool, skips: bool, on_gpu: bool
) -> None:
    made, step = cleared(on_gpu=on_gpu), OptimizerStep()
    made.found_inf.fill_(value)
    step.checked(made, {CPU: made.found_inf} if flags is ITS_OWN else flags, divided=True)
    made.start_copy()
    made.found_inf.fill_(later)
    assert step.is_bad(exposed) is skips


@pytest.mark.parametrize("starts", [False, True])
def test_a_fresh_check_is_read_from_the_copy_that_it_started_if_it_did(starts: bool) -> None:
    """One that was captured starts none: its event could never be waited for."""
    made = cleared(on_gpu=True)
    if starts:
        made.start_copy()
    made.found_inf.fill_(1.0)
    assert made.on_host() is not starts


@pytest.mark.parametrize("saved", [False, True])
def test_last_is_what_an_update_has_saved_before_it_cleared_the_flag(saved: bool) -> None:
    rows = FlagRows(CPU)
    made = cleared(rows)
    rows.last_flags[made.row] = 1.0
    made.saved = saved
    assert made.last() is saved


def agreed(mine: float, *others: list[float]) -> Flag:
    """Return the flag of this rank once it has agreed with others, of which each has a status."""

    def reduce_(values: Tensor, op: str) -> None:
        values.copy_(torch.cat([values[None], torch.tensor(others)]).amax(0))

    made = cleared()
    made.found_inf.fill_(mine)
    made.agree(made.numbers(torch.tensor(4.0)), SimpleNamespace(reduce_=reduce_))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("read", [lambda made: made.on_host(), Flag.last])
@pytest.mark.parametrize(
    ("other", "error"),
    [
        ([1.0, 1.0, -math.inf, -math.inf], "^Another rank failed to check its gradients, so this step is skipped"),
        ([0.0, 0.0, 8.0, -8.0], "^The ranks hold different scales, from 4.0 to 8.0: they no longer train one model"),
        ([0.0, 0.0, 2.0, -2.0], "^The ranks hold different scales, from 2.0 to 4.0: .* with update"),
    ],
)
def test_who_reads_the_flag_learns_of_another_ranks_failure_or_scale(
    read: Any, other: Any, error: str, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on_host:  # as on a GPU
        monkeypatch.setattr(flag, "host_memory", lambda tensor: None)
    with pytest.raises(RuntimeError, match=error):
        read(agreed(0.0, other))


# Ranks that compare by sums


def of_totals(totals: Sequence[Any], ranks: int) -> Flag:
    made = cleared()
    made.summed_over = ranks
    made.read_sums(torch.tensor(totals, dtype=torch.float64))
    return made


def reads(made: Flag) -> bool:
    return made.on_host()


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 256, 1000, 65537, 100_000])
def test_equal_scales_are_equal_by_their_sums(ranks: int) -> None:
    """A ring adds one after the other, which errs most."""
    ends = torch.tensor([0.0, 2.0**-126, 1e-38, 0.1, 3.0, 65536.0 / 3, MAX_SCALE, math.inf])
    for scale in torch.cat([ends, torch.logspace(-37, 38, 50)]):
        row = torch.zeros(2, dtype=torch.float64)
        flag.write_scales(row, scale)
        sums = row.expand(ranks, 2).cumsum(0)[-1]
        assert not reads(of_totals([0.0, 0.0, 0.0, *sums], ranks))


@pytest.mark.parametrize(
    ("ranks", "factor"),
    [*((ranks, factor) for ranks in (2, 7, 256) for factor in (0.5, 1.00001, 1.1)), (16384, 0.5), (100_000, 1.01)],
)
def test_one_scale_apart_is_found_by_the_sums(ranks: int, factor: float) -> None:
    usual, one = 65536.0, 65536.0 * factor
    sums = (ranks - 1) * usual + one, (ranks - 1) / usual + 1 / one
    with pytest.raises(RuntimeError, match="^The ranks hold different scales, some below .*, some above "):
        reads(of_totals([0.0, 0.0, 0.0, *sums], ranks))


@pytest.mark.parametrize(("failures", "error"), [(0.0, None), (2.0, "^Another rank failed")])
def test_sums_of_flags_and_failures_are_one_flag_and_one_failure(failures: float, error: str | None) -> None:
    made = of_totals([0.0, 2.0, failures, 6.0, 2 / 3], 2)
    assert made.found_inf.item() == 1.0
    with pytest.raises(RuntimeError, match=error) if error else nullcontext():
        assert reads(made)


# Functions


@pytest.mark.parametrize("made", [torch.tensor([2.0]), torch.tensor(True), torch.tensor(math.nan, dtype=torch.float64)])
def test_a_flag_of_any_kind_becomes_fp32_without_dimensions(made: Tensor) -> None:
    for result in (flag.as_flag(made, CPU), flag.any_flag([torch.zeros(1), made], CPU)):
        assert (result.item(), result.dtype, result.shape) == (1.0, torch.float32, ())
    assert flag.any_flag([], CPU).item() == flag.any_flag([torch.zeros(())], CPU).item() == 0.0
