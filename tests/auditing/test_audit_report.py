"""The report: what is compared, how it is written."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import dedent
from typing import Any

import pytest

from scaler_triton.auditing.report import judge
from scaler_triton.auditing.report import UNKNOWN, Copy, RankState, Reading, number, scaler_readings, steps_reading


def state(rank: int, scale: float = 4.0, **more: Any) -> RankState:
    return RankState(rank, scaler_readings(scale, 0), **more)


def test_a_state_travels_as_json() -> None:
    whole = state(3, copies=[Copy("w", "0-1", "ab")], left_out={"shard": 2}, error="no", subject="it")
    assert RankState.from_bytes(whole.to_bytes()) == whole


@pytest.mark.parametrize(
    ("value", "text"),
    [(65536.0, "65536"), (0.5, "0.5"), (2.0**127, "1.7014118346046923e+38"), (float("inf"), "inf"), (3, "3")],
)
def test_numbers_keep_their_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_scale_is_compared_to_the_bit_and_a_nan_is_itself() -> None:
    assert judge([state(0, 4.0), state(1, 4.000000476837158)]).split
    assert not judge([state(0, float("nan")), state(1, float("nan"))]).split
    assert judge([state(0, 0.0), state(1, float("inf"))]).differences == ("scale: 0 on rank 0; inf on rank 1",)


def test_the_most_steps_are_compared_not_the_fewest() -> None:
    assert steps_reading([1.0, 5.0]) == Reading("1..5", "5")
    readings = [{"steps": steps_reading(steps)} for steps in ([1.0, 5.0], [5.0], [])]
    report = judge([RankState(rank, each) for rank, each in enumerate(readings)])
    assert (report.verdict, report.compared) == ("agree", ("steps (on ranks 0-1)",))


def test_many_ranks_share_rows() -> None:
    report = judge([state(rank, 8.0 if rank == 7 else 4.0) for rank in range(512)])
    rows = str(report).splitlines()
    assert rows[4].split() == ["0-6,", "8-511", "4", "0"]
    assert rows[5].split() == ["7", "8", "0"]
    assert report.differences == ("scale: 4 on ranks 0-6, 8-511; 8 on rank 7",)
    few = str(judge([state(rank) for rank in range(16)])).splitlines()
    assert [row.split()[0] for row in few[4:20]] == [str(rank) for rank in range(16)]


def test_what_is_too_wide_for_a_table_is_a_list() -> None:
    columns = [f"checkpoint-{step}/rank*.pt scale" for step in range(8)]
    held = {name: Reading("4", "4") for name in columns} | {"steps": Reading("-", None)}
    report = judge([RankState(rank, held) for rank in range(3)])
    assert str(report).splitlines()[2:11] == [*(f"{name}: 4 on ranks 0-2" for name in columns), "steps: -"]


def test_values_that_look_alike_still_differ() -> None:
    states = [RankState(rank, {"scale": Reading("4", f"{rank}")}) for rank in range(2)]
    assert judge(states).differences == ("scale: 4 on rank 0; 4 on rank 1",)


def test_an_error_of_many_ranks_is_one_line() -> None:
    report = judge([state(0), *(RankState(rank, error="OSError: gone") for rank in range(1, 100))])
    assert report.verdict == "unknown"
    assert str(report).count("OSError") == 1
    assert "\nranks 1-99: OSError: gone\n" in str(report)


def test_a_split_is_one_also_when_a_rank_could_not_be_read() -> None:
    assert judge([state(0, 2.0), state(1, 4.0), RankState(2, error="no")]).verdict == "split"


def test_only_some_of_the_parameters_that_differ_are_named() -> None:
    copies = [[Copy(f"w{i}", "0-1", f"{rank}") for i in range(20)] for rank in range(2)]
    report = judge([state(rank, copies=copies[rank]) for rank in range(2)])
    assert report.differences[0] == "replicated parameters: 20 of 20 differ: w0, w1, w2, w3, w4, w5 and 14 more"
    assert len(report.differences) == 7


def test_a_replica_without_its_other_is_not_compared() -> None:
    report = judge([state(0, copies=[Copy("w", "0-1", "a")]), state(1)])
    assert report.verdict == "agree"
    assert "replicated" not in str(report)


def test_a_rank_without_replicas_has_none_that_are_equal() -> None:
    shared = [Copy("w", "0-1", "a")]
    rows = str(judge([state(0, copies=shared), state(1, copies=shared), state(2)])).splitlines()
    assert [row.split()[-1] for row in rows[4:7]] == ["equal", "equal", "-"]


def copies(among: str, *digests: str) -> list[Copy]:
    return [Copy(name, among, digest) for name, digest in zip("wb", digests, strict=False)]


def agreeing(*notes: str) -> str:
    """The report of two ranks with equal scales, and these lines below it."""
    table = ["rank  scale  tracker", "----  -----  -------", "   0      4        0", "   1      4        0"]
    return "\n".join(["audit; 2 ranks", "", *table, "", "AGREE: every rank holds the same scale, tracker.", *notes])


PERHAPS = "Nothing says that they are replicas; if they are, pass the DDP model, or replicated=True."
REPORTS: dict[str, tuple[Sequence[RankState], str]] = {
    "nobody": ([], "audit; 0 ranks\n\nNOTHING TO COMPARE: no rank was found."),
    "alone": (
        [state(0)],
        """
        audit; 1 rank

        rank  scale  tracker
        ----  -----  -------
           0      4        0

        NOTHING TO COMPARE: this is the only rank.
        """,
    ),
    "alone and unreadable": (
        [RankState(0, error="OSError: gone")],
        """
        audit; 1 rank

        rank  state
        ----  -----
           0  error

        rank 0: OSError: gone
        UNKNOWN: not every rank could be read. Nothing differs among those that could.
        """,
    ),
    "nothing in common": (
        [state(0), RankState(1, {"steps": Reading("3", "3")})],
        """
        audit; 2 ranks

        rank  scale  tracker  steps
        ----  -----  -------  -----
           0      4        0      -
           1      -        -      3

        NOTHING TO COMPARE: no two ranks hold a value of the same kind.
        """,
    ),
    "empty": (
        [RankState(0), RankState(1)],
        """
        audit; 2 ranks

        rank  state
        ----  -----
           0      -
           1      -

        NOTHING TO COMPARE: no two ranks hold a value of the same kind.
        """,
    ),
    "equal replicas": (
        [state(rank, copies=copies("0-1", "a", "c"), subject="GradScaler of torch; SGD") for rank in range(2)],
        """
        GradScaler of torch; SGD; 2 ranks

        rank  scale  tracker  replicated parameters
        ----  -----  -------  ---------------------
           0      4        0                2 equal
           1      4        0                2 equal

        AGREE: every rank holds the same scale, tracker, 2 replicated parameters.
        """,
    ),
    "one replica apart": (
        [state(rank, copies=copies("0-1", f"{rank}", "c")) for rank in range(2)],
        """
        audit; 2 ranks

        rank  scale  tracker  replicated parameters
        ----  -----  -------  ---------------------
           0      4        0          1 of 2 differ
           1      4        0          1 of 2 differ

        SPLIT: the ranks no longer train one model. This does not heal; go back to a state in which they agree.
          replicated parameters: 1 of 2 differ: w
            w: rank 0 | rank 1
        """,
    ),
    "plain parameters, equal": (
        [state(rank, copies=copies(UNKNOWN, "a", "c")) for rank in range(2)],
        agreeing("Plain parameters: 2 of 2 are equal, though nothing says they must."),
    ),
    "plain parameters, one apart": (
        [state(rank, copies=copies(UNKNOWN, f"{rank}", "c")) for rank in range(2)],
        agreeing(f"Plain parameters: 1 of 2 differ: w. {PERHAPS}"),
    ),
    "replicas beside plain ones, in pairs": (
        [
            state(rank, copies=[*copies("0-1" if rank < 2 else "2-3", f"{rank // 2}"), Copy("p", UNKNOWN, f"{rank}")])
            for rank in range(4)
        ],
        f"""
        audit; 4 ranks

        rank  scale  tracker  replicated parameters
        ----  -----  -------  ---------------------
           0      4        0                1 equal
           1      4        0                1 equal
           2      4        0                1 equal
           3      4        0                1 equal

        AGREE: every rank holds the same scale, tracker, 1 replicated parameter.
        Plain parameters: 1 of 1 differ: p. {PERHAPS}
        """,
    ),
    "errors": (
        [state(0), RankState(1, error="OSError: gone"), state(2, error="OSError: half")],
        """
        audit; 3 ranks

        rank  scale  tracker
        ----  -----  -------
           0      4        0
           1  error        -
           2      4        0

        rank 1: OSError: gone
        rank 2: OSError: half
        UNKNOWN: not every rank could be read. Nothing differs among those that could.
        """,
    ),
    "left out": (
        [state(0, left_out={"shard": 2}), state(1, left_out={"shard": 3, "meta tensor": 1})],
        agreeing("Not compared: 3 shards.", "Not compared: 1 meta tensor."),
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_whole_report(name: str) -> None:
    states, text = REPORTS[name]
    assert str(judge(states)) == dedent(text).strip()
