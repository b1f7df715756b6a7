"""Every test of a check runs in both ways: prepared where a check is an ordinary one, and always the general way."""

from typing import Any

import pytest

from scaler_triton.core.check import Checks

OF_CHECKS = ("check", "failures", "gradients", "look", "overrides", "registry", "step")


def pytest_generate_tests(metafunc: Any) -> None:
    if metafunc.module.__name__.rpartition("test_")[2] in OF_CHECKS:
        metafunc.fixturenames.append("way")
        metafunc.parametrize("way", ["prepared", "general"], indirect=True)


@pytest.fixture
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "general":
        monkeypatch.setattr(Checks, "_prepare", lambda *_: None)
