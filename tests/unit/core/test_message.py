"""What ranks tell each other: the largest status or sums, failures, and scales that differ."""

import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from scaler_triton.core import flag, message
from scaler_triton.core.flag import Flag, FlagRows
from scaler_triton.core.look import Look, Read
from scaler_triton.kernels.abi import FAILURE, MAX_SCALE

CPU = torch.device("cpu")


def cleared(found_inf: float = 0.0) -> Flag:
    """Return a flag as the looks leave it."""
    made = FlagRows(CPU).flag()
    made.clear()
    made.found_inf.fill_(found_inf)
    return made


def agreed(mine: float, *others: list[float]) -> Flag:
    """Return the flag of this rank once it has agreed with others, of which each has a status."""

    def reduce_(values: Tensor, op: str) -> None:
        assert op == "MAX"
        values.copy_(torch.cat([values[None], torch.tensor(others)]).amax(0))

    made = cleared(mine)
    row = message.write([made], [Read()], torch.tensor(4.0))
    message.agree([made], [Read()], row, SimpleNamespace(reduce_=reduce_))  # type: ignore[arg-type]
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
        monkeypatch.setattr(flag, "HostFlag", flag.Flag)
    with pytest.raises(RuntimeError, match=error):
        read(agreed(0.0, other))


# Ranks that compare by sums


def of_totals(totals: Sequence[Any], ranks: int) -> Flag:
    made = cleared()
    made.summed_over = ranks
    message.read_sums(made, torch.tensor(totals, dtype=torch.float64))
    return made


def reads(made: Flag) -> bool:
    return made.on_host()


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 256, 1000, 65537, 100_000])
def test_equal_scales_are_equal_by_their_sums(ranks: int) -> None:
    """A ring adds one after the other, which errs most."""
    ends = torch.tensor([0.0, 2.0**-126, 1e-38, 0.1, 3.0, 65536.0 / 3, MAX_SCALE, math.inf])
    for scale in torch.cat([ends, torch.logspace(-37, 38, 50)]):
        row = torch.zeros(2, dtype=torch.float64)
        message.write_scales(row, scale)
        sums = row.expand(ranks, 2).cumsum(0)[-1]
        assert not reads(of_totals([0.0, 0.0, 0.0, *sums], ranks))


@pytest.mark.parametrize(
    ("ranks", "factor"),
    [*((ranks, factor) for ranks in (2, 7, 256) for factor in (0.5, 1.00001, 1.1)), (16384, 0.5), (100_000, 1.01)],
)
def test_one_scale_apart_is_found_by_the_sums(ranks: int, factor: float) -> None:
    usual, one = 65536.0, 65536.0 * factor
    sums = (ranks - 1) * usual + one, (ranks - 1) / usual + 1 / one
    with pytest.raises(RuntimeError, match="^The ranks hold different scales, some below .*, some above ") as raised:
        reads(of_totals([0.0, 0.0, 0.0, *sums], ranks))
    below, above = map(float, re.findall(r"(?:below|above) ([0-9.e+]+\d)", str(raised.value)))
    assert min(usual, one) * (1 - 1e-9) <= below < above <= max(usual, one)  # sums of fp64 are rounded


@pytest.mark.parametrize(("failures", "error"), [(0.0, None), (2.0, "^Another rank failed")])
def test_sums_of_flags_and_failures_are_one_flag_and_one_failure(failures: float, error: str | None) -> None:
    made = of_totals([0.0, 2.0, failures, 6.0, 2 / 3], 2)
    assert (made.found_inf.item(), made.status[FAILURE].item()) == (1.0, min(failures, 1.0))
    with pytest.raises(RuntimeError, match=error) if error else nullcontext():
        assert reads(made)


class Adds(Look):
    """Adds numbers of its own, perhaps with totals, and notes their sums."""

    def __init__(self, numbers: list[float], totals: list[float] | None = None) -> None:
        self.n_sums, self._numbers, self.seen = len(numbers), numbers, None
        self.totals = None if totals is None else torch.tensor(totals, dtype=torch.float64)

    def numbers(self, flags: Any) -> Tensor:
        return torch.tensor(self._numbers, dtype=torch.float64)

    def agreed(self, flags: Any, numbers: Tensor) -> None:
        self.seen = numbers.tolist()


class Doubling:
    """Two ranks that send the same."""

    ranks = (0, 1)

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def reduce_(self, values: Tensor, op: str) -> None:
        self.sent.append((op, values.tolist()))
        if op == "SUM":
            values *= 2.0


def test_looks_add_their_numbers_to_one_sum_and_each_gets_its_own_back() -> None:
    made, peers, looks = cleared(1.0), Doubling(), [Adds([1.0, 2.0]), Read(), Adds([]), Adds([5.0])]
    message.agree([made], looks, message.write([made], looks, torch.tensor(4.0)), peers)  # type: ignore[arg-type]
    assert peers.sent == [("SUM", [0.0, 1.0, 0.0, 4.0, 0.25, 1.0, 2.0, 5.0])]
    assert [getattr(look, "seen", None) for look in looks] == [[2.0, 4.0], None, None, [10.0]]
    assert (made.status.tolist(), made.summed_over, made.is_final) == ([1.0, 0.0, 8.0, 0.0], 2, True)
    assert made.on_host()


@pytest.mark.parametrize("numbers", [[], [7.0]])
def test_a_looks_own_totals_are_summed_and_left_for_it_to_read(numbers: list[float]) -> None:
    flags, peers, look = [cleared(), cleared()], Doubling(), Adds(numbers, [9.0, 1.0, 0.0, 4.0, 0.25])
    before = flags[0].status.tolist()
    message.agree(flags, [look], message.write(flags, [look], torch.tensor(4.0)), peers)  # type: ignore[arg-type]
    assert peers.sent == [("SUM", [9.0, 1.0, 0.0, 4.0, 0.25, *numbers])]
    assert look.totals is not None
    assert look.totals.tolist() == [18.0, 2.0, 0.0, 8.0, 0.5]
    assert look.seen == ([14.0] if numbers else None)
    assert [(each.summed_over, each.is_final) for each in flags] == [(2, True)] * 2
    assert flags[0].status.tolist() == before


@pytest.mark.parametrize("n_sums", [None, 0, 3])
def test_a_failure_is_of_the_form_that_the_others_wait_for(n_sums: int | None) -> None:
    peers = Doubling()
    message.tell_failure(peers, CPU, n_sums)  # type: ignore[arg-type]
    largest, sums = [1.0, 1.0, -math.inf, -math.inf], [math.nan, 1.0, 1.0, 0.0, 0.0, *[0.0] * (n_sums or 0)]
    assert str(peers.sent) == str([("MAX", largest)] if n_sums is None else [("SUM", sums)])  # as NaN is no NaN
