"""The registry of torch's defects, what it says in the README, and that each is so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("tabulate")

from scaler_triton.demo import prove as proving
from scaler_triton.demo.case_steps import Outcome
from scaler_triton.demo.cases import CASES, Case, Right, cases_table, list_cases
from scaler_triton.demo.prove import Pools, open_pools, prove, prove_one, wrong
from scaler_triton.demo.ranks import RankResult, RankTimeout

README = Path(__file__).parents[2] / "README.md"
WRITE_TABLE = 'python -c "from scaler_triton.demo.cases import cases_table; print(cases_table())"'

TORCH_IS_WRONG = {
    "fsdp1-fused": "the ranks split",
    "fused-clip": "NaN or Inf in the weights of rank 0, 1",
    "fused-adam-unscale": "rank 0 raises RuntimeError; rank 1 raises RuntimeError",
    "tp-first-replicated": "the ranks split",
    "dtensor-beside-plain": "rank 0 raises RuntimeError; rank 1 raises RuntimeError",
    "rank-without-grads": "the ranks split",
    "rank-without-grads-dtensor": "rank 0 raises AssertionError; rank 1 hangs in a collective",
    "scale-to-inf": "the scale is inf instead of 1.70141e+38",
    "tracker-past-interval": "the scale is 8 instead of 32",
    "fused-then-plain": "rank 0 raises RuntimeError; rank 1 raises RuntimeError",
}

SKIP = Right(stepped=False, scale=4.0)
SKIPPED = Outcome(4.0, "same", "same")
STEPPED = Outcome(8.0, "old", "new")


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with open_pools() as opened:
        yield opened


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_torch_is_wrong_as_stated_and_we_are_right(name: str, pools: Pools) -> None:
    case = CASES[name]
    assert wrong(case, pools.run(case, "ours")) == ""
    assert wrong(case, pools.run(case, "torch")) == TORCH_IS_WRONG[name]


@pytest.mark.distributed
def test_a_proof_prints_both_and_what_each_rank_holds(pools: Pools, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove_one(CASES["fsdp1-fused"], pools) == []
    said = capsys.readouterr().out
    assert said.index("torch ") < said.index("WRONG: the ranks split") < said.index("scaler_triton ")
    assert said.rstrip().endswith("RIGHT")
    assert "stepped" in said
    assert "unchanged" in said


def test_the_registry_is_consistent() -> None:
    assert all(name == case.name for name, case in CASES.items())
    assert len({case.run for case in CASES.values()}) == len(CASES)
    for case in CASES.values():
        texts = (case.summary, case.torch, case.ours)
        assert all(text and "\n" not in text and "|" not in text for text in texts)
        assert not case.thread or case.thread.startswith("https://github.com/pytorch/pytorch/issues/")


def test_the_list_and_the_table_have_a_line_for_every_case() -> None:
    assert len(list_cases().splitlines()) == len(CASES)
    assert len(cases_table().splitlines()) == len(CASES) + 2
    assert all(f"| `{name}`:" in cases_table() for name in CASES)


def test_the_readme_holds_the_table() -> None:
    _, opened, rest = README.read_text().partition("<!-- cases -->\n")
    table, closed, _ = rest.partition("\n<!-- /cases -->")
    assert opened, "README.md needs a line <!-- cases --> and a line <!-- /cases --> with the table between them"
    assert closed, "README.md has <!-- cases --> but no line <!-- /cases --> after it"
    assert table.strip() == cases_table(), f"the README's table is not the registry's; print it with: {WRITE_TABLE}"


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ([SKIPPED, SKIPPED], ""),
        ([SKIPPED, STEPPED], "the ranks split"),
        ([SKIPPED, Outcome(8.0, "same", "same")], "the ranks split"),
        ([SKIPPED, Outcome(4.0, "old", "new")], "the ranks split"),
        ([SKIPPED, Outcome(4.0, "same", "same", finite=False)], "NaN or Inf in the weights of rank 1"),
        ([STEPPED, STEPPED], "the scale is 8 instead of 4"),
        ([Outcome(4.0, "old", "new")] * 2, "the step was taken"),
    ],
)
def test_what_is_right(outcomes: list[Outcome], said: str) -> None:
    assert SKIP.wrong(outcomes) == said


def test_a_step_that_had_to_be_taken_is_missed() -> None:
    assert Right(stepped=True, scale=4.0).wrong([SKIPPED, SKIPPED]) == "the step was skipped"


class Scripted:
    """Pools that answer what they are told to."""

    def __init__(self, **outcomes: Outcome | str) -> None:
        self.outcomes = outcomes

    def run(self, case: Case, scaler: str) -> list[RankResult]:
        """The same outcome, or error, on every rank."""
        said = self.outcomes[scaler]
        return [
            RankResult(rank, error=said) if isinstance(said, str) else RankResult(rank, value=said)
            for rank in range(case.ranks)
        ]


@pytest.mark.parametrize(
    ("torch", "ours", "status", "unexpected"),
    [
        (STEPPED, SKIPPED, 0, []),
        (SKIPPED, SKIPPED, 1, ["torch is no longer wrong"]),
        (STEPPED, STEPPED, 1, ["scaler_triton is wrong: the scale is 8 instead of 4"]),
    ],
)
def test_the_exit_status_says_who_surprised(
    torch: Outcome,
    ours: Outcome,
    status: int,
    unexpected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(proving, "Pools", lambda stack: Scripted(torch=torch, ours=ours))
    assert prove([CASES["fsdp1-fused"]]) == status
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "UNEXPECTED" in line] == [
        f"UNEXPECTED: fsdp1-fused: {what}" for what in unexpected
    ]


def test_an_error_is_shown_without_where_torch_raised_it(capsys: pytest.CaptureFixture[str]) -> None:
    raised = f"RuntimeError: [/src/ProcessGroup.cpp:12] timed {'out ' * 40}\nmore"
    scripted = Scripted(torch=raised, ours=SKIPPED)
    assert prove_one(CASES["fsdp1-fused"], scripted) == []  # type: ignore[arg-type]
    row = next(line for line in capsys.readouterr().out.splitlines() if "RuntimeError" in line)
    assert row.split()[:5] == ["0", "-", "error", "RuntimeError:", "timed"]
    assert row.endswith("out ...")
    assert len(row) < 120


def test_a_hang_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    late = [RankResult(0, value=SKIPPED), RankResult(1, error="RankTimeout: no answer within 60 s")]

    def hang(*_: object, **__: object) -> None:
        raise RankTimeout("a case ran past its limit", late)

    monkeypatch.setattr(proving.RankPool, "run", hang)
    with open_pools() as pools:
        results = pools.run(CASES["fsdp1-fused"], "torch")
    assert wrong(CASES["fsdp1-fused"], results) == "rank 1 hangs in a collective"
