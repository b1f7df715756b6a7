"""The Python blocks of README and docs: where they are, what they import, how they are run."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# performance.md and tuning.md include the last two.
PATHS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "perf/README.md", ROOT / "kernels/tuned/README.md"]
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in PATHS}


def blocks(page: str) -> list[str]:
    """Return a page's Python blocks, each below as many empty lines as there are lines above it on the page."""
    text = TEXTS[page]
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in BLOCK.finditer(text)]


def frameworks(page: str) -> set[str]:
    """Return the packages that a page's blocks need, other than torch: an integration needs that of its name."""
    nodes = [node for block in blocks(page) for node in ast.walk(ast.parse(block))]
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    packages = {name.removeprefix("scaler_triton.integrations.").partition(".")[0] for name in names}
    return packages - {"torch", "scaler_triton"} - sys.stdlib_module_names


def run(page: str, names: dict[str, Any]) -> None:
    """Run a page's blocks as they are read: one after another, each with the names that those before it have left."""
    for block in blocks(page):
        exec(compile(block, str(ROOT / page), "exec"), names)
