"""DDP's communication hooks whose state keeps an overflow."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from scaler_triton.report.hooks import poisoned_hooks
from scaler_triton.report.overflow import OverflowReport


def powerSGD_hook() -> None:
    """Stand for torch's."""


def model_with(*states: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0]._comm_hooks = [(powerSGD_hook, state) for state in states]  # type: ignore[assignment]
    return model


def test_a_hook_is_told_of_if_what_it_keeps_is_not_finite() -> None:
    good = SimpleNamespace(error_dict={0: torch.ones(2)}, p_memory_dict={}, process_group=None, names={0: "a"})
    assert poisoned_hooks(model_with(good, None, 3)) == []
    bad = SimpleNamespace(error_dict={0: torch.ones(2), 1: torch.tensor(torch.nan)}, p_memory_dict={0: torch.ones(1)})
    bad.q_memory_dict = {0: torch.tensor([torch.inf])}
    (line,) = poisoned_hooks(model_with(good, bad))
    assert line == (
        "[ST10] The communication hook powerSGD_hook keeps NaN or Inf of an earlier step in error_dict and "
        "q_memory_dict, and adds it to every later one: after each skip clear them on all ranks, "
        "state.error_dict.clear(), state.q_memory_dict.clear()"
    )
    assert OverflowReport(3, (), True, causes=(line,)).conclusion == f"{line}."


def test_what_is_no_module_has_no_hooks() -> None:
    assert poisoned_hooks(None) == poisoned_hooks([("weight", torch.ones(1))]) == []


def test_what_is_kept_in_slots_is_looked_at_too() -> None:
    """As of torch's own state."""

    class Base:
        __slots__ = ("error_dict", "missing")

    class State(Base):
        __slots__ = ("__dict__", "p_memory_dict")

    state: Any = State()
    state.error_dict = state.p_memory_dict = state.of_its_own = {0: torch.tensor(torch.nan)}
    (line,) = poisoned_hooks(model_with(state))
    assert all(f"state.{name}.clear()" in line for name in ("error_dict", "p_memory_dict", "of_its_own"))
