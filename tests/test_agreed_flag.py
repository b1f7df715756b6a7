"""A verdict knows whether the flags it served are still its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import started
from scaler_triton.flag_buffer import FlagBuffer
from scaler_triton.scale_comparison import write_scales
from scaler_triton.verdict import Verdict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from scaler_triton import GradScaler

CPU, OTHER = torch.device("cpu"), torch.device("meta")


def fresh(buffer: FlagBuffer | None = None) -> Verdict:
    verdict = (buffer or FlagBuffer(CPU)).verdict()
    verdict.reset()
    return verdict


def as_on_a_gpu(verdict: Verdict) -> Verdict:
    """Return a verdict on the CPU that does not read its status where they are, but a copy of them."""
    verdict._host_status = None
    return verdict


def test_flags_are_its_own_until_somebody_writes() -> None:
    verdict = fresh()
    flags = verdict.copy_to([CPU])
    assert verdict.owns(flags)
    assert not verdict.owns(dict(flags))
    flags[CPU].fill_(1.0)
    assert not verdict.owns(flags)


def test_a_flag_replaced_or_added_is_noticed() -> None:
    for key in (CPU, OTHER):
        verdict = fresh()
        flags = verdict.copy_to([CPU])
        flags[key] = other = torch.zeros(())
        while other._version < verdict.found_inf._version:
            other.zero_()
        assert not verdict.owns(flags)


@pytest.mark.parametrize(
    "take",
    [
        lambda flags: flags[CPU],
        lambda flags: flags.get(CPU),
        lambda flags: next(iter(flags.values())),
        lambda flags: next(iter(flags.items()))[1],
        lambda flags: dict(flags)[CPU],
        lambda flags: {**flags}[CPU],
        lambda flags: flags.copy()[CPU],
        lambda flags: ({} | flags)[CPU],
        lambda flags: flags.setdefault(CPU, torch.zeros(())),
    ],
)
def test_a_flag_written_by_a_collective_is_read_anew(
    take: Callable[[dict[torch.device, torch.Tensor]], torch.Tensor],
) -> None:
    verdict = as_on_a_gpu(fresh())
    flags = verdict.copy_to([CPU])
    verdict.start_mirror()
    take(flags).data.fill_(1.0)  # like dist.all_reduce, this moves no version on
    assert verdict.owns(flags)
    assert verdict.on_host()


def test_a_flag_that_somebody_summed_over_ranks_stays_one() -> None:
    """torch's fused kernels skip at 1.0 only."""
    verdict = fresh()
    flags = verdict.copy_to([CPU])
    assert verdict.flag() is verdict.found_inf
    flags[CPU].data.fill_(2.0)
    assert verdict.owns(flags)
    assert verdict.flag().item() == 1.0


def test_a_flag_is_not_copied_into_a_graph_and_can_be_read_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = as_on_a_gpu(fresh())
    monkeypatch.setattr("scaler_triton.verdict.is_captured", lambda tensor: True)
    verdict.start_mirror()
    monkeypatch.undo()
    assert verdict._mirror is None  # its event, recorded there, could never be waited for
    verdict.found_inf.fill_(1.0)
    assert verdict.on_host() is True


@pytest.mark.parametrize("others", [[0.0], [0.0, 1.0, 0.0], [math.nan]])
@pytest.mark.parametrize("own", [0.0, 1.0])
def test_a_flag_of_any_device_sets_it_and_none_clears_it(own: float, others: list[float]) -> None:
    verdict = fresh()
    verdict.found_inf.fill_(own)
    verdict.add([verdict.found_inf, *map(torch.tensor, others)])
    assert verdict.found_inf.item() == float(own or any(others))


@pytest.mark.parametrize("flags", [{CPU: torch.zeros(())}, {OTHER: torch.zeros(())}])
def test_it_is_served_where_parameters_are_that_have_no_gradient(flags: dict[torch.device, torch.Tensor]) -> None:
    """A fused optimizer's step asks for it there."""
    plan: Any = SimpleNamespace(devices=[CPU, OTHER])
    devices = started(GradScaler, "cpu")._flag_devices(flags, plan, None)
    assert set(fresh().copy_to(devices)) == {CPU, OTHER}


def test_it_is_served_where_the_scale_is_only_if_nowhere_else() -> None:
    """As torch's, whose flags people count."""
    scaler, elsewhere, nowhere = (
        started(GradScaler, "cpu"),
        SimpleNamespace(devices=[OTHER]),
        SimpleNamespace(devices=[]),
    )
    several: Any = object()  # an agreement
    assert set(scaler._flag_devices({OTHER: torch.zeros(())}, elsewhere, None)) == {OTHER}
    assert set(scaler._flag_devices({}, elsewhere, several)) == {OTHER}
    assert set(scaler._flag_devices({}, nowhere, several)) == {CPU}


def test_a_write_into_one_row_is_not_taken_for_one_into_another() -> None:
    buffer = FlagBuffer(CPU)
    first, second = fresh(buffer), fresh(buffer)
    flags = first.copy_to([CPU])
    second.found_inf.fill_(1.0)
    assert first.owns(flags)
    assert buffer.status[:2, 0].tolist() == [0.0, 1.0]
    assert buffer.rows([first, second]) == 0b11
    assert buffer.rows([second]) == 0b10
    assert buffer.rows([first, None]) is None
    assert buffer.rows([fresh()]) is None


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


def test_a_flag_buffer_is_zeroed_on_no_stream() -> None:
    """Its rows are for optimizers on any: it comes from the host by a copy that is waited for."""
    with Made() as made:
        FlagBuffer(OTHER)
    ((name, given),) = made.by
    assert name == "aten::_to_copy"
    assert not given.get("non_blocking")


def test_rows_come_back_cleared_and_one_too_many_lies_elsewhere() -> None:
    buffer = FlagBuffer(CPU)
    verdicts = [fresh(buffer) for _ in range(FlagBuffer.ROWS)]
    beyond = fresh(buffer)
    assert buffer.rows(verdicts) == 2**FlagBuffer.ROWS - 1
    assert buffer.rows([beyond]) is None
    verdicts[3].found_inf.fill_(1.0)
    del verdicts[3]
    again = fresh(buffer)
    assert buffer.rows([again]) == 1 << 3
    assert again.found_inf.item() == beyond.found_inf.item() == 0.0


@pytest.mark.parametrize("as_it_is", [lambda verdict: verdict, as_on_a_gpu], ids=["host", "copied"])
def test_a_new_step_begins_without_the_last_ones_flag(as_it_is: Callable[[Verdict], Verdict]) -> None:
    verdict = as_it_is(fresh())
    verdict.found_inf.fill_(1.0)
    verdict.start_mirror()
    verdict.reset()
    assert verdict.on_host() is False


def settled(scales: list[float], flags: list[float] | None = None) -> Verdict:
    """A verdict on what ranks with these scales and flags add up to."""
    rows = torch.zeros(len(scales), 4, dtype=torch.float64)
    for row, scale, flag in zip(rows, scales, flags or [0.0] * len(scales), strict=True):
        row[0] = flag
        write_scales(row[None, 2:], torch.tensor(scale))
    verdict = fresh()
    verdict.expect_sums(len(scales))
    verdict.set_from_sums(rows.sum(0))
    return verdict


@pytest.mark.parametrize("scale", [2.0**-126, 1e-38, 0.1, 3.0, 65536.0 / 3, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("ranks", [1, 2, 7, 16384])
def test_equal_scales_are_equal_by_their_sums(scale: float, ranks: int) -> None:
    assert settled([scale] * ranks).on_host() is False


@pytest.mark.parametrize("factor", [0.5, 0.999, 1.00001, 1.1, 2.0])
@pytest.mark.parametrize("ranks", [2, 7, 256])
def test_one_scale_apart_is_found_by_the_sums(factor: float, ranks: int) -> None:
    with pytest.raises(RuntimeError, match="The ranks hold different scales, some below .*, some above "):
        settled([3.0 * factor] + [3.0] * (ranks - 1)).on_host()


def test_what_is_kept_for_real_tensors_is_not_made_of_fake_ones() -> None:
    for _ in range(2):
        with FakeTensorMode():
            settled([3.0, 3.0])
        assert settled([3.0, 3.0]).on_host() is False


def test_one_among_very_many_is_found_if_it_was_halved() -> None:
    with pytest.raises(RuntimeError, match="The ranks hold different scales"):
        settled([32768.0] + [65536.0] * 16383).on_host()


def test_scales_added_up_in_turn_are_equal_still() -> None:
    """A ring adds up one after the other, which errs most."""
    for scale in torch.logspace(-37, 38, 50):
        row = torch.zeros(2, dtype=torch.float64)
        write_scales(row, scale)
        sums = row.expand(100_000, 2).cumsum(0)
        for ranks in (2, 3, 1000, 65537, 100_000):
            verdict = fresh()
            verdict.expect_sums(ranks)
            verdict.set_from_sums(torch.cat([torch.zeros(2, dtype=torch.float64), sums[ranks - 1]]))
            assert verdict.on_host() is False


def test_one_among_very_many_is_found_if_it_is_a_hundredth_apart() -> None:
    row = torch.tensor([0.0, 0.0, 99_999 * 65536.0 + 66192.0, 99_999 / 65536.0 + 1 / 66192.0], dtype=torch.float64)
    verdict = fresh()
    verdict.expect_sums(100_000)
    verdict.set_from_sums(row)
    with pytest.raises(RuntimeError, match="The ranks hold different scales"):
        verdict.on_host()


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        ([8.0, 64.0], "some below 14.2222, some above 36"),
        ([8.0, 8.008], "some below 8.003998, some above 8.004"),
        ([8.0, 8.00008], "some below 8.0000400541, some above 8.0000400543"),
        ([8.0, 8.000001], "some below 7.99999999999997, some above 8"),  # the sum is rounded to fp32
        ([2.0**-126, 2.0**127], "some below 0.25, some above 8.50706e+37"),
        ([3.0, math.nan], "some below nan, some above nan"),
    ],
)
def test_both_means_are_told_with_digits_enough_to_differ(scales: list[float], said: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        settled(scales).on_host()
    assert f"The ranks hold different scales, {said}: they" in str(caught.value)


@pytest.mark.parametrize("scale", [0.0, math.inf])
def test_scales_that_cannot_be_are_equal_where_all_hold_them(scale: float) -> None:
    assert settled([scale] * 2).on_host() is False


def test_what_a_kernel_settles_is_settled_once() -> None:
    verdict = fresh()
    assert verdict.leave_to_kernel()[1] == 0  # nothing to settle
    verdict.expect_sums(2)
    status, ranks = verdict.leave_to_kernel()
    assert ranks == 2
    status.copy_(torch.tensor([1.0, 0.0, 16.0, 0.0]))
    verdict.set_from_sums(torch.zeros(4, dtype=torch.float64))
    assert verdict.leave_to_kernel()[1] == 0
    assert verdict.on_host() is True


def test_a_new_step_expects_no_sums_of_the_last_one() -> None:
    verdict = fresh()
    verdict.expect_sums(2)
    verdict.reset()
    assert verdict.leave_to_kernel()[1] == 0


def test_a_sum_of_flags_is_one_flag() -> None:
    verdict = settled([3.0, 3.0, 3.0], [1.0, 0.0, 1.0])
    assert verdict.found_inf.item() == 1.0
    assert verdict.on_host() is True


def test_scales_that_differed_are_no_matter_of_a_step_that_compares_none() -> None:
    verdict = settled([3.0, 6.0])
    verdict.cleared = True  # flag and failure, by the update; what the ranks compared is left
    verdict.reset()
    assert verdict.on_host() is False
