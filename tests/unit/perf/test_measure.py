"""The check that both scalers agree."""

from typing import Any

import pytest
import torch

from perf.measure import WrongResult
from perf.subjects import Gradients, require_equal
from scaler_triton import GradScaler


def test_one_wrong_bit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, right = Gradients([3, 5]), GradScaler.update

    def update(self: Any) -> None:
        gradients.parameters[1].grad.view(torch.int32)[0] ^= 1
        right(self)

    monkeypatch.setattr(GradScaler, "update", update)
    with pytest.raises(WrongResult, match="some list: another gradient 1 than torch's"):
        require_equal("some list", gradients.parameters, "cpu")


def test_an_overflow_that_is_not_seen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaler_triton.torch_ops.check", lambda *arguments: None)
    with pytest.raises(WrongResult, match="some list, an infinity: another state than torch's"):
        require_equal("some list", Gradients([3, 5]).parameters, "cpu", fused=True)
