"""README and docs: their Python blocks run as they are shown, what they quote exists, and no line is cut off."""

import ast
import re
import tomllib
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import Container, sgd, started
from torch import Tensor, nn

import scaler_triton
from scaler_triton import GradScaler, StepGuard, unpatch_torch
from scaler_triton.report.overflow import BadGradient, BadParameter, OverflowReport, Spike

ROOT = Path(__file__).parents[2]
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
INCLUDED = [ROOT / "perf/README.md", ROOT / "kernels/tuned/README.md", *ROOT.glob("docs/recipes/*.py")]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COLUMNS = 88  # of code that the built pages show; the rest is cut off
# page -> what holds when its blocks have run
AFTER = {
    "README.md": "scaler.stats().updates == len(batches) and scaler.stats().skipped == 0",
    "docs/after-a-skip.md": "': 1 bad gradient on rank 0.' in out and scaler.limits.max_consecutive_skips == 50",
    "docs/compile.md": "finish([weight], 0.5, scale, tracker) is None and weight.tolist() == [-0.5] and tracker == 1 "
    "and round(norm.item()) == 640",
    "docs/guard.md": "guard.stats().updates == len(batches) and not guard.was_skipped(optimizer)",
    "docs/headroom.md": "scaler.stats().updates == 1 and ' of headroom, ' in out",
    "docs/loops.md": "scaler.stats().updates == 3 and not any(map(scaler.was_skipped, (for_generator, for_judge)))",
    "docs/start.md": "torch.amp.GradScaler is scaler_triton.GradScaler",
    "docs/why-skipped.md": "'The last skip, at update 1: 1 bad' in out and '   0  32768        0      -' in out",
}
# page -> the test that runs its blocks, as this one cannot
FRAMEWORKS = "tests/frameworks/test_recipes.py"
ELSEWHERE = {
    "docs/accelerate.md": FRAMEWORKS,
    "docs/checkpoints.md": "tests/unit/test_migration.py",  # they take checkpoints of other libraries
    "docs/kernel.md": "tests/unit/kernels/test_first_kernel.py",
    "docs/lightning.md": FRAMEWORKS,
    "docs/log.md": FRAMEWORKS,
    "docs/schedulers.md": FRAMEWORKS,
    "docs/t4-v100.md": FRAMEWORKS,
    "docs/trainer.md": FRAMEWORKS,
    "docs/troubleshooting.md": FRAMEWORKS,
}


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
        warnings.filterwarnings("ignore", message=r"\[ST14\]", category=UserWarning)
        yield
        unpatch_torch()
    torch.compiler.reset()


@pytest.mark.usefixtures("unpatched")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("page", AFTER)
def test_a_pages_blocks_run(page: str, capsys: Any) -> None:
    names = taken_for_granted()
    for block in BLOCK.findall(TEXTS[page]):
        exec(compile(block.replace("fullgraph=True", "fullgraph=True, backend='aot_eager'"), page, "exec"), names)
    assert eval(AFTER[page], {**names, "out": capsys.readouterr().out})


def test_every_block_of_every_page_runs_here_or_elsewhere() -> None:
    assert {page for page, text in TEXTS.items() if "```python" in text} == {*AFTER, *ELSEWHERE}
    for page, text in TEXTS.items():
        assert text.count("```python") == len(BLOCK.findall(text)), f"{page}: a block that is not found"
        assert not re.search(r"^\s*(```|:::)+\{code", text, re.MULTILINE), f"{page}: a block of another kind"
    for page, test in ELSEWHERE.items():
        assert f'{Path(page).name}"' in (ROOT / test).read_text()


def test_the_lines_of_the_readmes_tables_can_be_imported() -> None:
    rows = re.findall(r"^\|.*\|$", TEXTS["README.md"], re.MULTILINE)
    lines = [code for row in rows for code in re.findall(r"`((?:from|import) [^`]*)`", row)]
    assert len(lines) >= 8
    for line in lines:
        exec(line, {})


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


# What is quoted


def test_the_page_on_skips_quotes_a_report_as_it_is_and_every_conclusion() -> None:
    text = TEXTS["docs/after-a-skip.md"]

    def said(*names: str, kinds: str = "Inf", checked: int = 29, **known: Any) -> str:
        bad = tuple(BadGradient(name, kinds, 2048, 1) for name in names)
        return str(OverflowReport(39, bad, True, checked=checked, **known))

    one = said("positions", ranks=2)
    assert f"\n{one}\n```" in text
    weight = said(bad_parameters=(BadParameter("positions", "NaN", 1),))
    reports = [said("a", "b", kinds="NaN", checked=2), said("a", "b", checked=2), one, one, weight]
    reports.append(said("a", causes=("[ST10] The communication hook powerSGD_hook keeps NaN or Inf",)))
    reports.append(said(spikes=(Spike(41.2, 7.9),)))
    quoted = re.findall(r'^\| "(.+?)" \|', text, re.MULTILINE)
    for pattern, report in zip(quoted, reports, strict=True):
        assert re.search(".*".join(map(re.escape, pattern.split("…"))), report), pattern


def strings_of(path: Path) -> list[str]:
    """Return a module's strings, with "{}" for what an f-string inserts; what stands side by side is one."""
    tree, found = ast.parse(path.read_text()), []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (each.value if isinstance(each, ast.Constant) else "{}" for each in node.values)
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


PROBLEMS = re.findall(r"^### (.+)\n\n\*(.+)\*$", TEXTS["docs/troubleshooting.md"], re.MULTILINE)
QUOTED = [(heading, path) for heading, origin in PROBLEMS for path in re.findall(r"`(\w+/[\w/]+\.py)`", origin)]
PRINTED_BY_C = {  # heading -> what prints it, where this machine can have it printed
    "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'": None,  # a GPU, torch < 2.16
    "output with shape [] doesn't match the broadcast shape [1]": lambda: torch.zeros(()).add_(torch.zeros(1)),
}


def test_every_text_on_the_page_of_troubles_has_a_source() -> None:
    headings = re.findall(r"^### (.+)$", TEXTS["docs/troubleshooting.md"].split("\n## Nothing is printed")[0], re.M)
    assert len(headings) == len(PROBLEMS) >= 30
    assert {*headings} == {*dict(QUOTED), *PRINTED_BY_C}


def test_every_code_is_explained_once_and_comes_from_the_file_that_the_page_names() -> None:
    explained = [(code, path) for _, origin in PROBLEMS for code, path in re.findall(r"`\[(ST\d+)\]`, `(.*?)`", origin)]
    by_file = {path: path.read_text() for path in (ROOT / "scaler_triton").rglob("*.py")}
    used = {
        (code, str(path.relative_to(ROOT)))
        for path, text in by_file.items()
        for code in re.findall(r'"\[?(ST\d\d)(?:\]|"(?! in ))', text)
    }
    named_elsewhere = {("ST05", "scaler_triton/report/streak.py"), ("ST06", "scaler_triton/report/streak.py")}  # causes
    assert sorted(explained) == sorted(used - named_elsewhere)
    assert sorted(code for code, _ in explained) == [f"ST{number:02}" for number in range(1, len(explained) + 1)]


@pytest.mark.parametrize(("heading", "path"), QUOTED)
def test_a_text_on_the_page_of_troubles_is_one_that_is_printed(heading: str, path: str) -> None:
    package = path.partition("/")[0]
    if package == "scaler_triton":
        source = ROOT / path
    else:
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
        named = re.search(rf"\b{package} (\d[\d.]*\d)", TEXTS["docs/troubleshooting.md"], re.IGNORECASE)
        assert named is not None
        if version(package).partition("+")[0] != named[1]:
            pytest.skip(f"the page has the texts of {package} {named[1]}")
        source = Path(find_spec(package).submodule_search_locations[0], path.partition("/")[2])  # type: ignore[union-attr,index]
    strings = [" ".join(text.replace("\\", "").split()) for text in strings_of(source)]
    for part in filter(None, (" ".join(part.split()).strip(" ,'`:(") for part in re.split("…|  ", heading))):
        assert any(part in text for text in strings), part


def test_versions_on_the_page_of_troubles_are_those_that_are_run() -> None:
    pins = (ROOT / "constraints.txt").read_text() + (ROOT / "tests/frameworks/peers/packages.txt").read_text()
    intro = TEXTS["docs/troubleshooting.md"].split("\n## ")[0]
    named = re.findall(r"(\w+) (\d+\.\d+\.\d+)", intro)
    assert [package for package, _ in named] == ["torch", "accelerate", "transformers", "lightning", "DeepSpeed"]
    assert [f"{package.lower()}=={number}" in pins.splitlines() for package, number in named] == [True] * 5


@pytest.mark.parametrize(("heading", "printing"), [each for each in PRINTED_BY_C.items() if each[1]])
def test_a_text_of_torchs_ops_is_one_that_they_print(heading: str, printing: Any) -> None:
    with pytest.raises(RuntimeError) as caught:
        printing()
    assert str(caught.value) == heading


def test_the_versions_that_are_called_tested_are() -> None:
    from scaler_triton.integrations.versions import TESTED

    table = dict(
        re.findall(r"^\| ([\w, -]+) \| ([\w., ]+) \|", TEXTS["docs/start.md"].split("## Tested versions")[1], re.M)
    )
    pins = [(ROOT / name).read_text() for name in ("constraints-oldest.txt", "constraints.txt")]
    for name in ("Accelerate", "transformers", "PEFT", "Lightning"):
        oldest, newest = (re.search(rf"^{name.lower()}==(\S+)$", text, re.M)[1] for text in pins)  # type: ignore[index]
        assert table[name] == f"{oldest} to {newest}"
        assert name == "PEFT" or TESTED[name.lower()] == (oldest, newest)
    peers = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "tests/frameworks/peers/packages.txt").read_text(), re.M))
    patched = [peers[name] for name in ("mosaicml", "timm", "monai", "mmengine")]
    assert table["Composer, timm, MONAI, mmengine"] == ", ".join(patched)
    assert table["Megatron-Core, DeepSpeed"] == f"{peers['megatron-core']}, {peers['deepspeed']}"
    assert table["open_clip"] == peers["open-clip-torch"]


def test_the_url_to_install_from_is_the_projects() -> None:
    url = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    found = [each for text in TEXTS.values() for each in re.findall(r'scaler_triton @ git\+([^"]+)"', text)]
    assert found == [url] * len(found)
    assert len(found) >= 5


# What the built pages can show


def code_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page's code: of its fences, and of what is indented after a paragraph at the margin."""
    fence, before, indented = "", "", False
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r"\s*(```+)", line)
        if mark:
            fence = "" if fence else "directive" if re.match(r"\s*```\{", line) else "code"
            continue
        if fence == "code":
            yield number, line
            continue
        starts = line.startswith("    ") and not before and not fence
        indented = line.startswith("    ") and (indented or starts)
        if indented:
            yield number, line
        before = line.strip()


def test_no_code_is_wider_than_the_built_pages() -> None:
    pages = {**TEXTS, **{str(path.relative_to(ROOT)): path.read_text() for path in INCLUDED}}
    wide = []
    for page, text in pages.items():
        lines = enumerate(text.splitlines(), 1) if page.endswith(".py") else code_lines(text)
        wide += [f"{page}:{number}: {len(line)}" for number, line in lines if len(line) > COLUMNS]
    assert wide == []


def test_lines_of_code_are_found() -> None:
    page = "a\n\n    b\n    c\n\n- d\n    e\n\n```sh\nf\n```\n```{figure} g\nh\n```\n"
    assert [line.strip() for _, line in code_lines(page)] == ["b", "c", "f"]
