"""Copies and pickles of a scaler go on where it stood, and leave it as it was."""

from __future__ import annotations

import copy
import pickle
import threading
import types
from typing import Any

import pytest
import torch
from helpers import sgd, started

from scaler_triton import GradScaler, ShardedGradScaler


@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_continue_where_the_original_stood(cls: type, clone: Any) -> None:
    scaler = started(cls, "cpu", init_scale=64.0)
    scaler._growth_tracker.fill_(5)
    copied = clone(scaler)
    assert copied.state_dict() == scaler.state_dict()
    assert type(copied) is cls
    copied._lazy_init_scale_growth_tracker("cpu")
    copied._scale.fill_(1.0)
    assert scaler.get_scale() == 64.0


def test_a_scaler_that_holds_itself_is_copied_with_what_it_holds() -> None:
    """As where one of its methods was wrapped by hand."""
    scaler = GradScaler("cpu")
    scaler.update = types.MethodType(GradScaler.update, scaler)  # type: ignore[method-assign]
    copied: Any = copy.deepcopy(scaler)
    assert copied.update.__self__ is copied is not scaler


class Locked(GradScaler):
    """A user's, with something that cannot be copied and is left out by hand."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=64.0)
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the lock out."""
        return {name: value for name, value in super().__getstate__().items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make another lock."""
        super().__setstate__(state)
        self.lock = threading.Lock()


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy])
def test_a_copy_is_made_of_what_a_subclass_says_is_its_state(clone: Any) -> None:
    scaler = Locked()
    copied = clone(scaler)
    assert copied.get_scale() == 64.0
    assert copied.lock is not scaler.lock


def test_a_disabled_scaler_can_be_copied_whatever_it_was_asked() -> None:
    scaler = GradScaler("cpu", enabled=False)
    scaler._found_inf_per_device(sgd([torch.ones(2)]))
    for copied in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler), copy.copy(scaler)):
        assert not copied.is_enabled()


def test_pickled_between_unscale_and_update_raises_as_torch() -> None:
    optimizer = sgd([torch.ones(2)])
    scaler = started(GradScaler, "cpu")
    scaler.unscale_(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled at the beginning of an iteration"):
        pickle.dumps(scaler)
