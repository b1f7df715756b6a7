"""Ranks of the demo for these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers import STRICT


@pytest.fixture(scope="module")
def strict_ranks() -> Iterator[None]:
    """Have a warning be an error in processes that are started meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONWARNINGS", ",".join(STRICT[1::2]))
        yield
