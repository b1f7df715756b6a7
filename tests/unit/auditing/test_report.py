"""The report: what is compared, how it is written."""

from collections.abc import Sequence
from textwrap import dedent
from typing import Any

import pytest

from scaler_triton.auditing.report import PERHAPS, UNKNOWN, Copy, RankState, judge, scaler_readings


def state(rank: int, scale: float = 4.0, **more: Any) -> RankState:
    return RankState(rank, scaler_readings(scale, 0), **more)


def copies(among: str, *digests: str) -> list[Copy]:
    return [Copy(name, among, digest) for name, digest in zip("wb", digests, strict=False)]


def test_a_scale_is_compared_to_the_bit_and_a_nan_equals_a_nan() -> None:
    assert judge([state(0, 4.0), state(1, 4.000000476837158)]).split
    assert not judge([state(0, float("nan")), state(1, float("nan"))]).split
    assert judge([state(0, 0.0), state(1, float("inf"))]).differences == ("scale: 0 on rank 0; inf on rank 1",)


def test_more_than_16_ranks_share_rows() -> None:
    report = judge([state(rank, 8.0 if rank == 7 else 4.0) for rank in range(512)])
    rows = [row.split() for row in str(report).splitlines()[4:6]]
    assert rows == [["0-6,", "8-511", "4", "0"], ["7", "8", "0"]]
    assert report.differences == ("scale: 4 on ranks 0-6, 8-511; 8 on rank 7",)
    assert len(str(judge([state(rank) for rank in range(16)])).splitlines()) == 22


def test_an_error_of_many_ranks_is_one_line_and_hides_no_split() -> None:
    failed = [RankState(rank, error="OSError: gone") for rank in range(2, 100)]
    report = judge([state(0), state(1), *failed])
    assert report.verdict == "unknown"
    assert str(report).count("\nranks 2-99: OSError: gone\n") == str(report).count("OSError") == 1
    assert str(report).splitlines()[5].split() == ["2-99", "error", "-"]
    assert judge([state(0, 2.0), state(1, 4.0), *failed]).verdict == "split"


REPORTS: dict[str, tuple[Sequence[RankState], str]] = {
    "nobody": ([], "audit; 0 ranks\n\nNOTHING TO COMPARE: no rank was found."),
    "equal, plain ones apart, some left out": (
        [
            state(rank, copies=[*copies("0-1", "a", "c"), Copy("p", UNKNOWN, f"{rank}")], left_out={"shard": 2 + rank})
            for rank in range(2)
        ],
        f"""
        audit; 2 ranks

        rank  scale  tracker  replicated parameters
        ----  -----  -------  ---------------------
           0      4        0                2 equal
           1      4        0                2 equal

        AGREE: every rank holds the same scale, tracker, 2 replicated parameters.
        Not compared: 3 shards.
        Plain parameters: 1 of 1 differ: p. {PERHAPS}
        """,
    ),
    "one replica apart in one of two pairs, and none on the last rank": (
        [
            *(state(rank, copies=copies("0-1" if rank < 2 else "2-3", f"{rank % 3}", "c")) for rank in range(4)),
            state(4, subject="GradScaler of torch; SGD"),
        ],
        """
        GradScaler of torch; SGD; 5 ranks

        rank  scale  tracker  replicated parameters
        ----  -----  -------  ---------------------
           0      4        0          1 of 2 differ
           1      4        0          1 of 2 differ
           2      4        0          1 of 2 differ
           3      4        0          1 of 2 differ
           4      4        0                      -

        SPLIT: the ranks no longer train one model. This does not heal; go back to a state in which they agree.
          replicated parameters: 1 of 2 differ: w
            w: rank 0 | rank 1; rank 2 | rank 3
        """,
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_whole_report(name: str) -> None:
    states, text = REPORTS[name]
    assert str(judge(states)) == dedent(text).strip()
