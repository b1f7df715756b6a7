"""The names that the package exports."""

from __future__ import annotations

import pytest

import scaler_triton


def test_exports() -> None:
    assert scaler_triton.__all__ == sorted(scaler_triton.__all__, key=str)
    for name in scaler_triton.__all__:
        assert getattr(scaler_triton, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        scaler_triton.nothing  # noqa: B018
