"""The public functions on lists of tensors name a wrong argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scaler_triton import ops


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"scale": torch.ones(2)}, ValueError, "scale must be one torch.float32 element, got shape"),
        ({"growth_tracker": torch.zeros(())}, ValueError, "growth_tracker must be one torch.int32 element"),
        ({"found_inf": torch.zeros((), device="meta")}, ValueError, "found_inf must be on the scale's device"),
        ({"growth_factor": 0.0}, ValueError, "growth_factor must be"),
        ({"found_inf": 0.0}, TypeError, "found_inf must be a Tensor, got float"),
    ],
)
def test_update_scale_names_the_wrong_argument(kwargs: dict[str, Any], error: type[Exception], text: str) -> None:
    good: dict[str, Any] = {
        "scale": torch.ones(()),
        "growth_tracker": torch.zeros((), dtype=torch.int32),
        "found_inf": torch.zeros(()),
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 1,
    }
    with pytest.raises(error, match=text):
        ops.update_scale_(**{**good, **kwargs})
    ops.update_scale_(**good)
    assert good["scale"].item() == 2.0
