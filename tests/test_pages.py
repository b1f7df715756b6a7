"""The Python blocks of README and docs run as they are shown; here those that need no framework."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import sgd, started
from page_blocks import ROOT, TEXTS, blocks, frameworks, run
from torch import Tensor, nn

import scaler_triton
from scaler_triton import GradScaler, unpatch_torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Pages whose blocks another test runs, with its own values.
ELSEWHERE = {
    "docs/checkpoints.md": "tests/test_migration.py",
    "docs/compile.md": "tests/unit/test_ops_compiled.py",
}
# page -> what holds when its blocks have run
AFTER = {
    "README.md": "scaler.stats().updates == len(batches) and scaler.stats().skipped == 0",
    "docs/loops.md": "scaler.stats().updates == 2 and not any(map(scaler.was_skipped, (for_generator, for_judge)))",
    "docs/start.md": "torch.amp.GradScaler is scaler_triton.GradScaler",
    "docs/why-skipped.md": "'The last skip, at update 1: 1 bad' in out and '   0  32768        0      -' in out",
}


class Net(nn.Module):
    """A model whose output is its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch: Tensor) -> Tensor:
        return self.layer(batch).float().square().mean()


def left_out() -> dict[str, Any]:
    """Return what blocks take for granted: all that is there before them. The scaler has skipped a step."""
    batch = torch.full((3, 4), 0.01, device=DEVICE)  # small enough for fp16 at the default scale, whatever the weights
    nets = {name: Net().to(DEVICE) for name in ("model", "generator", "judge")}
    optimizers = [torch.optim.AdamW(net.parameters()) for net in nets.values()]
    scaler, skipped = started(GradScaler, DEVICE.type), sgd([torch.tensor([torch.inf])], DEVICE.type)
    scaler.step(skipped)
    scaler.update()
    return {
        **nets,
        **dict(zip(("optimizer", "for_generator", "for_judge"), optimizers, strict=True)),
        "fooled": lambda batch: nets["judge"](batch) + nets["generator"](batch),
        "told_apart": nets["judge"],
        "device": DEVICE,
        "batch": batch,
        "batches": [batch, batch],
        "scaler": scaler,
        "skipped": skipped,  # as long as it lives its skip can be reported
        "scaler_triton": scaler_triton,
        "torch": torch,
    }


@pytest.fixture
def unpatched() -> Iterator[None]:
    """What a page patches is torch's again."""
    with warnings.catch_warnings():  # classes that other tests have imported by then are named
        warnings.filterwarnings("ignore", message="torch's gradient scalers were taken", category=UserWarning)
        yield
        unpatch_torch()


@pytest.mark.native
@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize(
    "page", [page for page in TEXTS if blocks(page) and not frameworks(page) and page not in ELSEWHERE]
)
def test_a_pages_blocks_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = left_out()
    run(page, names)
    assert eval(AFTER[page], {**names, "out": capsys.readouterr().out})


@pytest.mark.parametrize("page", ELSEWHERE)
def test_the_other_test_runs_a_pages_blocks(page: str) -> None:
    assert f'blocks("{page}")' in (ROOT / ELSEWHERE[page]).read_text()


@pytest.mark.parametrize("page", TEXTS)
def test_no_block_escapes(page: str) -> None:
    """Such as an indented one, or one that calls its language by another name."""
    fences = re.findall(r"^ *(?:`{3,}|~{3,})[ {]*(?:py|code|sourcecode)", TEXTS[page], re.MULTILINE | re.IGNORECASE)
    assert len(fences) == len(blocks(page))


def test_the_front_page_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 250
