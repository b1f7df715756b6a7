"""The registry of torch's defects, what it says in the README, and that each is so."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("tabulate")

from scaler_triton.demo import prove as proving
from scaler_triton.demo.case_steps import RANKS, Outcome
from scaler_triton.demo.cases import CASES, Case, Right, cases_table, list_cases
from scaler_triton.demo.prove import new_pool, prove, prove_one, run_on_ranks, wrong
from scaler_triton.demo.rank_process import RankResult
from scaler_triton.demo.ranks import RankPool, RankTimeout

README = Path(__file__).parents[2] / "README.md"
WRITE_TABLE = 'python -c "from scaler_triton.demo.cases import cases_table; print(cases_table())"'

TORCH_IS_WRONG = {
    "fsdp1-fused": "the ranks split",
    "fused-clip": "NaN or Inf in the weights of ranks 0-1",
    "fused-adam-unscale": "rank 0 raises RuntimeError; rank 1 raises RuntimeError",
    "tp-first-replicated": "the ranks split",
    "dtensor-beside-plain": "rank 0 raises RuntimeError; rank 1 raises RuntimeError",
    "rank-without-grads": "the ranks split",
    "rank-without-grads-dtensor": "rank 0 raises AssertionError; rank 1 hangs in a collective",
    "scale-to-inf": "the scale is inf instead of 2^127",
    "tracker-past-interval": "the scale is 8 instead of 32",
    "failed-step": "NaN or Inf in the weights of ranks 0-1",
    "fused-then-plain": "rank 0 raises RuntimeError; rank 1 raises RuntimeError",
}

SKIP = Right(stepped=False, scale=4.0)
SKIPPED = Outcome(4.0, "same", "same")
STEPPED = Outcome(8.0, "old", "new")


@pytest.fixture(scope="module")
def pool(strict_ranks: None) -> Iterator[RankPool]:
    with new_pool() as opened:
        yield opened


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_torch_is_wrong_as_stated_and_we_are_right(name: str, pool: RankPool) -> None:
    case = CASES[name]
    assert wrong(case, run_on_ranks(case, "ours", pool)) == ""
    assert wrong(case, run_on_ranks(case, "torch", pool)) == TORCH_IS_WRONG[name]


@pytest.mark.distributed
def test_a_proof_prints_both_and_what_each_rank_holds(pool: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove_one(CASES["fsdp1-fused"], pool) == []
    said = capsys.readouterr().out
    assert said.index("torch ") < said.index("WRONG: the ranks split") < said.index("scaler_triton ")
    assert said.rstrip().endswith("RIGHT")
    assert "stepped" in said
    assert "unchanged" in said
    assert _masked(said).strip() in _masked(README.read_text())


def _masked(text: str) -> str:
    """Leave out what differs between machines: torch's version and the parameters' hashes."""
    return re.sub(r"\b[0-9a-f]{8}\b|(?<=\ntorch )\S+", "*", text)


def test_a_proof_fits_into_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    error = "RuntimeError: aten._amp_foreach_non_finite_check_and_unscale_.default: got mixed torch.Tensor and DTensor"
    script(monkeypatch, torch=error, ours=SKIPPED)
    for columns in (80, None):
        if columns:
            monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: bool(columns))  # noqa: B023
        assert prove_one(CASES["rank-without-grads-dtensor"], new_pool()) == []
        lines = capsys.readouterr().out.splitlines()
        assert (max(map(len, lines)) <= 80) is bool(columns)


def test_the_registry_is_consistent() -> None:
    assert all(name == case.name for name, case in CASES.items())
    assert len({case.run for case in CASES.values()}) == len(CASES)
    for case in CASES.values():
        texts = (case.summary, case.torch, case.ours)
        assert all(text and "\n" not in text and "|" not in text for text in texts)
        assert not case.issue or case.issue.startswith("https://github.com/pytorch/pytorch/issues/")


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


def script(monkeypatch: pytest.MonkeyPatch, **outcomes: Outcome | str) -> None:
    """Have every rank end with the same outcome, or error, of each scaler."""

    def scripted(case: Case, scaler: str, pool: object) -> list[RankResult]:
        said = outcomes[scaler]
        key = "error" if isinstance(said, str) else "value"
        return [RankResult(rank, **{key: said}) for rank in range(RANKS)]

    monkeypatch.setattr(proving, "run_on_ranks", scripted)


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
    script(monkeypatch, torch=torch, ours=ours)
    assert prove([CASES["fsdp1-fused"]]) == status
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "UNEXPECTED" in line] == [
        f"UNEXPECTED: fsdp1-fused: {what}" for what in unexpected
    ]


def test_an_error_is_shown_without_where_torch_raised_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raised = f"RuntimeError: [/src/ProcessGroup.cpp:12] timed {'out ' * 40}\nmore"
    script(monkeypatch, torch=raised, ours=SKIPPED)
    assert prove_one(CASES["fsdp1-fused"], new_pool()) == []
    row = next(line for line in capsys.readouterr().out.splitlines() if "RuntimeError" in line)
    assert row.split()[:5] == ["0", "-", "error", "RuntimeError:", "timed"]
    assert row.endswith("out ...")
    assert len(row) < 120


def test_a_hang_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    late = [RankResult(0, value=SKIPPED), RankResult(1, error="RankTimeout: no answer within 60 s")]

    limits: list[float] = []

    def hang(*_: object, timeout: float) -> None:
        limits.append(timeout)
        raise RankTimeout("a case ran past its limit", late)

    monkeypatch.setattr(proving.RankPool, "run", hang)
    results = run_on_ranks(CASES["fsdp1-fused"], "torch", new_pool())
    assert wrong(CASES["fsdp1-fused"], results) == "rank 1 hangs in a collective"
    assert 0 < max(limits) <= 60  # seconds: who proves something waits for it
