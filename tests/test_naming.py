"""Where the names of parameters come from."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from scaler_triton.naming import named_parameters
from torch import nn

from scaler_triton import GradScaler


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (3, "got int"),
        ("net", "got str for a name and a tensor"),
        ([torch.ones(2)], "got Tensor for a name and a tensor"),
        ({"weight": torch.ones(2)}, "got str for a name and a tensor"),
        (enumerate([torch.ones(2)]), "got int for a name"),
    ],
)
def test_parameters_have_names(model: Any, text: str) -> None:
    text = rf"^model must be a module or what its named_parameters\(\) gives, {text}$"
    with pytest.raises(TypeError, match=text):
        GradScaler("cpu").overflow_report(model)


def test_without_torchs_private_names_a_modules_own_names_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    importlib.import_module("torch.distributed.fsdp")
    monkeypatch.delattr("torch.distributed._composable_state._get_module_state")
    assert [(name, id(p)) for name, p in named_parameters(model)] == [(n, id(p)) for n, p in model.named_parameters()]
