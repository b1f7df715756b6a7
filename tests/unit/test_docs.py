"""README and docs: their Python blocks run as they are shown, and the API page has every public name."""

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import Container, sgd, started
from torch import Tensor, nn

import scaler_triton
from scaler_triton import GradScaler, StepGuard, unpatch_torch

ROOT = Path(__file__).parents[2]
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# page -> what holds when its blocks have run
AFTER = {
    "README.md": "scaler.stats().updates == len(batches) and scaler.stats().skipped == 0",
    "docs/compile.md": "finish([weight], 0.5, scale, tracker) is None and weight.tolist() == [-0.5] and tracker == 1",
    "docs/guard.md": "guard.stats().updates == len(batches) - 1 and not guard.was_skipped(optimizer)",
    "docs/headroom.md": "scaler.stats().updates == 1 and len(logged) == 12 and ' of headroom, ' in out",
    "docs/loops.md": "scaler.stats().updates == 3 and not any(map(scaler.was_skipped, (for_generator, for_judge)))",
    "docs/start.md": "torch.amp.GradScaler is scaler_triton.GradScaler",
    "docs/why-skipped.md": "'The last skip, at update 1: 1 bad' in out and '   0  32768        0      -' in out",
}
# By tests/unit/test_migration.py, tests/ranks/test_checkpoints.py and tests/frameworks.
ELSEWHERE = {f"docs/{name}.md" for name in ("checkpoints", "accelerate", "lightning", "trainer", "t4-v100")}


class Net(nn.Module):
    """A model whose output is its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch: Tensor) -> Tensor:
        return self.layer(batch).float().square().mean()


def taken_for_granted() -> dict[str, Any]:
    """Return the names that blocks use without making them. The scaler has skipped a step."""
    batch = torch.full((3, 4), 0.01)  # small enough for fp16 at the default scale, whatever the weights
    nets = {name: Net() for name in ("model", "generator", "judge")}
    optimizers = [torch.optim.AdamW(net.parameters()) for net in nets.values()]
    names: dict[str, Any] = dict(zip(("optimizer", "for_generator", "for_judge"), optimizers, strict=True))
    scaler, skipped, weight = started(GradScaler, "cpu"), sgd([torch.tensor([torch.inf])]), nn.Parameter(torch.zeros(1))
    scaler.step(skipped)
    scaler.update()
    weight.grad = torch.tensor([4.0])
    names |= {"scaler": scaler, "skipped": skipped}  # as long as it lives its skip can be reported
    names |= {"fooled": lambda batch: nets["judge"](batch) + nets["generator"](batch), "told_apart": nets["judge"]}
    names |= {"weight": weight, "scale": torch.tensor(4.0), "tracker": torch.zeros((), dtype=torch.int32)}
    names |= {"device": torch.device("cpu"), "batch": batch, "batches": [batch] * 2}
    return {**nets, **names, "scaler_triton": scaler_triton, "torch": torch}


@pytest.fixture
def unpatched() -> Iterator[None]:
    """What a page patches is torch's again, and what it compiles is forgotten."""
    with warnings.catch_warnings():  # classes that other tests have imported by then are named
        warnings.filterwarnings("ignore", message="torch's gradient scalers were imported", category=UserWarning)
        yield
        unpatch_torch()
    torch.compiler.reset()


@pytest.mark.usefixtures("unpatched")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("page", [page for page, text in TEXTS.items() if BLOCK.search(text) and page not in ELSEWHERE])
def test_a_pages_blocks_run(page: str, capsys: Any) -> None:
    names = taken_for_granted()
    for block in BLOCK.findall(TEXTS[page]):
        exec(compile(block.replace("fullgraph=True", "fullgraph=True, backend='aot_eager'"), page, "exec"), names)
    assert eval(AFTER[page], {**names, "out": capsys.readouterr().out})


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    named = re.findall(r"^\.\. auto\w+:: (\S+)$", (ROOT / "docs/api.rst").read_text(), re.MULTILINE)
    assert {*scaler_triton.__all__} - {"__version__", "ops"} <= {*named}


def test_the_lines_for_torchtitans_container_run_its_hooks_and_step_or_neither() -> None:
    page = re.search(r"^## torchtitan.*?^```diff\n(.*?)^```$", TEXTS["docs/loops.md"], re.MULTILINE | re.DOTALL)
    assert page is not None
    lines = "\n".join(re.findall(r"^\+(.*)$", page[1], re.MULTILINE))
    parts, calls = [sgd([torch.zeros(1)]) for _ in range(2)], []
    optimizers = Container(parts)
    optimizers.register_step_pre_hook(lambda *_: calls.append("balanced"))
    schedulers = SimpleNamespace(step=lambda: calls.append("next"))
    names = {"guard": StepGuard("cpu"), "optimizers": optimizers, "max_norm": 1.0, "lr_schedulers": schedulers}
    for gradients in ([3.0, 4.0], [torch.nan, 1.0], [0.0, torch.inf], [0.6, 0.0]):
        for part, number in zip(parts, gradients, strict=True):
            part.param_groups[0]["params"][0].grad = torch.tensor([number])
        exec(lines, names)
    assert calls == ["balanced", "next"] * 2
    assert [part.param_groups[0]["params"][0].item() for part in parts] == pytest.approx([-0.6, -0.4])
