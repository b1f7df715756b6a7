"""A package that is missing leaves its tests out, but not where it was to be installed."""

from __future__ import annotations

import json

import pytest
from side_by_side import imported


def test_where_nobody_installed_it_the_test_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEAVY", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs nothing_of_that_name: runs with make test-frameworks"):
        imported("nothing_of_that_name")
    assert imported("json") is json


def test_in_test_frameworks_the_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEAVY", "1")
    with pytest.raises((ModuleNotFoundError, pytest.skip.Exception)) as caught:  # else this test would be skipped, too
        imported("nothing_of_that_name")
    assert caught.type is ModuleNotFoundError
    assert imported("json") is json
