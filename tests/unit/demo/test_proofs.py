"""The cases of torch's defects: what counts as right, what is printed, and the page's table."""

from pathlib import Path
from typing import Any

import pytest

from scaler_triton.demo import proofs
from scaler_triton.demo.launch import Answer
from scaler_triton.demo.proofs import CASES, Outcome, prove

PAGE = Path(__file__).parents[3] / "docs/agreement.md"
SKIP, STEP = CASES["fsdp1-fused"], CASES["fused-then-plain"]  # every rank must skip, or step
SKIPPED = Outcome(4.0, "skipped", "same unchanged")
STEPPED = Outcome(8.0, "stepped", "old -> new")


def answers(*outcomes: Outcome | str) -> list[Answer]:
    """Return what ranks answered: outcomes, or errors."""
    kinds = ["error" if isinstance(each, str) else "value" for each in outcomes]
    return [Answer(rank, **{kind: each}) for rank, (kind, each) in enumerate(zip(kinds, outcomes, strict=True))]


def test_the_page_holds_the_table_of_the_cases() -> None:
    rows = ["| case | with torch | with scaler_triton |", "| --- | --- | --- |"]
    for case in CASES.values():
        known = f" ([known](https://github.com/pytorch/pytorch/issues/{case.issue}))" if case.issue else ""
        rows.append(f"| `{case.name}`: {case.summary} | {case.torch}{known} | {case.ours} |")
    assert "\n".join(["<!-- cases -->", *rows, "<!-- /cases -->\n"]) in PAGE.read_text()


@pytest.mark.parametrize(
    ("case", "outcomes", "said"),
    [
        (SKIP, [SKIPPED, SKIPPED], ""),
        (SKIP, [SKIPPED, SKIPPED._replace(did="no grads")], ""),
        (SKIP, [SKIPPED, SKIPPED._replace(scale=8.0)], "the ranks split"),
        (SKIP, [SKIPPED, SKIPPED._replace(did="stepped")], "the ranks split"),
        (SKIP, [SKIPPED, SKIPPED._replace(finite=False)], "NaN or Inf in the weights of rank 1"),
        (SKIP, [STEPPED, STEPPED], "the scale is 8 instead of 4"),
        (SKIP, [STEPPED._replace(scale=4.0)] * 2, "the step was taken"),
        (SKIP, [SKIPPED, "ValueError: no"], "rank 1 raises ValueError"),
        (SKIP, ["ValueError: no", "ValueError: not here"], "ranks 0-1 raise ValueError"),
        (SKIP, ["RankTimeout: no"] * 2, "ranks 0-1 hang in a collective"),
        (SKIP, ["RankTimeout: no", "RankDied: -9"], "rank 0 hangs in a collective; rank 1 raises RankDied"),
        (STEP, [SKIPPED._replace(scale=8.0)] * 2, "the step was skipped"),
        (STEP, [STEPPED, STEPPED], ""),
    ],
)
def test_what_is_right(case: Any, outcomes: list[Outcome | str], said: str) -> None:
    assert case.wrong(answers(*outcomes)) == said


def script(monkeypatch: pytest.MonkeyPatch, **said: Outcome) -> None:
    """Have every rank end with the same outcome of each library."""
    monkeypatch.setattr(proofs, "run_ranks", lambda run, name, library: answers(said[library], said[library]))


@pytest.mark.parametrize(
    ("torch", "ours", "status", "last"),
    [
        (STEPPED, SKIPPED, 0, "As expected: torch wrong, ours right."),
        (SKIPPED, SKIPPED, 1, "UNEXPECTED: fsdp1-fused: torch is no longer wrong"),
        (STEPPED, STEPPED, 1, "UNEXPECTED: fsdp1-fused: scaler_triton is wrong: the scale is 8 instead of 4"),
    ],
)
def test_the_exit_status_says_whether_all_is_as_expected(
    torch: Outcome, ours: Outcome, status: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    script(monkeypatch, torch=torch, ours=ours)
    assert prove([SKIP]) == status
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_several_cases_end_with_a_table_of_them(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    right = {"fsdp1-fused": SKIPPED, "fused-then-plain": STEPPED}
    wrong = {"torch": ["RuntimeError: no", "RuntimeError: no"]}
    monkeypatch.setattr(proofs, "run_ranks", lambda _, name, library: answers(*wrong.get(library, [right[name]] * 2)))
    assert prove([SKIP, STEP]) == 0
    assert capsys.readouterr().out.splitlines()[-6:] == [
        "case              torch                                ours",
        "----------------  -----------------------------------  -----",
        "fsdp1-fused       WRONG: ranks 0-1 raise RuntimeError  RIGHT",
        "fused-then-plain  WRONG: ranks 0-1 raise RuntimeError  RIGHT",
        "",
        "As expected in all 2 cases: torch wrong, ours right.",
    ]


@pytest.mark.parametrize(
    ("version", "status", "last"),
    [
        ("2.15.1+cu132", 1, "UNEXPECTED: bf16-grads: torch is no longer wrong"),
        ("2.16.0", 0, "MENDED: bf16-grads: this torch is right, too"),
        ("3.0.0a0+git1234567", 0, "MENDED: bf16-grads: this torch is right, too"),
    ],
)
def test_a_torch_newer_than_those_known_to_be_wrong_may_be_right(
    version: str, status: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(proofs.torch, "__version__", version)
    monkeypatch.setattr(proofs.torch.cuda, "is_available", lambda: True)
    script(monkeypatch, torch=STEPPED, ours=STEPPED)
    assert prove([CASES["bf16-grads"]]) == status
    assert capsys.readouterr().out.splitlines()[-1] == last
    script(monkeypatch, torch=STEPPED, ours=STEPPED._replace(scale=1.0))
    assert prove([CASES["bf16-grads"]]) == 1
    assert "\nUNEXPECTED: bf16-grads: scaler_triton is wrong: the scale is 1 instead of 8\n" in capsys.readouterr().out


def test_what_needs_a_gpu_is_counted_as_not_run_without_one(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    script(monkeypatch, torch=STEPPED, ours=SKIPPED)
    monkeypatch.setattr(proofs.torch.cuda, "is_available", lambda: False)
    assert prove([CASES["bf16-grads"]]) == proofs.NOT_RUN == 3
    assert capsys.readouterr().out == "NOT RUN: bf16-grads: needs a GPU, and torch finds none\n"
