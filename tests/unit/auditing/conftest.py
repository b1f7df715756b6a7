from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scaler_triton import cli


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs `audit` on the test's folder with these words, and gives its status and its only output."""

    def run(*words: str) -> tuple[int, str]:
        status = cli.main(["audit", str(tmp_path), *words])
        said = capsys.readouterr()
        assert not (said.out and said.err)
        assert "Traceback" not in said.out + said.err
        return status, said.out or said.err

    return run
