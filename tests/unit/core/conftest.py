"""Every test of a check or an update runs in both ways.

Checks: prepared where one is an ordinary one, and always the general way. Updates: put off or not.
"""

from typing import Any

import pytest

from scaler_triton.core.check import Checks
from scaler_triton.core.put_off import PutOff

OF_CHECKS = ("check", "failures", "gradients", "look", "overrides", "registry", "step")


def pytest_generate_tests(metafunc: Any) -> None:
    name = metafunc.module.__name__.rpartition("test_")[2]
    if name in (*OF_CHECKS, "update"):
        metafunc.fixturenames.append("way")
        metafunc.parametrize(
            "way", ["put off", "launched"] if name == "update" else ["prepared", "general"], indirect=True
        )


@pytest.fixture
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "general":
        monkeypatch.setattr(Checks, "_prepare", lambda *_: None)
    if request.param == "launched":
        monkeypatch.setattr(PutOff, "takes", lambda *_: False)
