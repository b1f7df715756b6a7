"""The flag of a step: its row, its parts on several devices, its way to the host."""

import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scaler_triton.core import flag
from scaler_triton.core.flag import Flag, FlagRows
from scaler_triton.core.step import OptimizerStep
from scaler_triton.kernels.abi import FAILURE, FLAG, ROWS

CPU, META = torch.device("cpu"), torch.device("meta")


def cleared(rows: FlagRows | None = None, *, on_gpu: bool = False) -> Flag:
    """Return a flag as a check begins with it; as one on a GPU, which Python does not read where it is, if asked."""
    made = (rows or FlagRows(CPU)).flag()
    if on_gpu:
        made = Flag(made.status, made.rows, made.row)
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


def test_each_flag_keeps_as_many_numbers_as_the_looks_want() -> None:
    rows = FlagRows(CPU, n_extra=3)
    for made in [cleared(rows) for _ in range(ROWS + 1)]:
        assert isinstance(made.extra, Tensor)
        assert (made.extra.dtype, made.extra.tolist()) == (torch.float64, [0.0] * 3)
        made.extra.fill_(made.row + 1.0)
    assert isinstance(rows.extra, Tensor)
    assert rows.extra[:, 0].tolist() == [row + 1.0 for row in range(ROWS)]
    assert cleared().extra is None


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
    made.is_saved, made.is_zero = True, False
    made.clear()
    assert made.status[[FLAG, FAILURE]].tolist() == [0.0, 0.0]
    assert not made.on_host()  # no comparison, no old copy
    assert (made.is_saved, made.is_final) == (False, False)


@pytest.mark.parametrize("captured", [False, True])
def test_a_row_that_an_update_has_cleared_is_cleared_again_only_in_a_capture(captured: bool) -> None:
    made = cleared(on_gpu=True)
    made.is_zero = True
    version = made.status._version
    made.clear(captured)
    assert (made.status._version > version) is captured


@pytest.mark.parametrize("own", [0.0, 1.0])
@pytest.mark.parametrize("others", [[], [0.0], [0.0, 1.0, 0.0], [math.nan], [2.0]])
def test_gather_sets_the_flag_if_any_part_is_set_and_never_clears_it(own: float, others: list[float]) -> None:
    made = cleared()
    made.found_inf_on(CPU).fill_(own)
    made.elsewhere |= {torch.device("cuda", index): torch.tensor(other) for index, other in enumerate(others)}
    assert made.gather() == bool(own or any(others))
    assert made.found_inf.item() == float(bool(own or any(others)))


def test_a_pass_sets_the_flag_itself_at_home_and_a_part_of_it_elsewhere() -> None:
    made = cleared()
    assert made.found_inf_on(CPU) is made.found_inf
    part = made.found_inf_on(META)
    assert part.is_meta
    assert made.found_inf_on(META) is part
    assert (made.devices(), made.elsewhere) == ([CPU, META], {META: part})
    made.clear()
    assert (made.devices(), made.elsewhere) == ([], {})


@pytest.mark.parametrize(("overflows", "want"), [(0.0, 0.0), (1.0, 1.0), (3.0, 1.0), (math.nan, 1.0)])
def test_share_sets_the_flag_to_that_of_several_optimizers(overflows: float, want: float) -> None:
    made = cleared()
    made.found_inf.fill_(1.0 - want)
    made.share(torch.tensor(overflows, dtype=torch.float64))
    assert (made.found_inf.item(), made.is_final) == (want, True)


def test_a_copy_of_an_optimizers_own_flag_is_not_that_of_several() -> None:
    made = cleared(on_gpu=True)
    made.start_copy()
    made.share(torch.ones((), dtype=torch.float64))
    assert made.on_host()


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
    (1.0, 1.0, {META: torch.tensor(1.0)}, False, True),  # that of a device where all gradients are, which is read there
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
    step.accept(made, {CPU: made.found_inf} if flags is ITS_OWN else flags, divided=True)
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
    made.is_saved = saved
    assert made.last() is saved


# Functions


@pytest.mark.parametrize("made", [torch.tensor([2.0]), torch.tensor(True), torch.tensor(math.nan, dtype=torch.float64)])
def test_a_flag_of_any_kind_becomes_fp32_without_dimensions(made: Tensor) -> None:
    for result in (flag.as_flag(made, CPU), flag.any_flag([torch.zeros(1), made], CPU)):
        assert (result.item(), result.dtype, result.shape) == (1.0, torch.float32, ())
    assert flag.any_flag([], CPU).item() == flag.any_flag([torch.zeros(())], CPU).item() == 0.0
