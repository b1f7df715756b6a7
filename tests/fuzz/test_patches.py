"""Random programs of patching and unpatching torch, and of scalers built, copied and used in between."""

from __future__ import annotations

import copy
import operator
import pickle
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
from fuzz_profile import Chunk, chunks, settings_for
from hypothesis import seed
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torch_scalers import NAMES, OURS, TorchPlain, built

from scaler_triton import patch_torch, unpatch_torch
from scaler_triton.patching import stand_in

INDEX = st.integers(0, 1 << 10)
# Not `copy.copy`: those of torch's scalers share what a step leaves.
COPIES: tuple[Callable[[Any], Any], ...] = (copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler)))


class Hold(NamedTuple):
    """A call of `patch_torch`."""

    manager: AbstractContextManager[None]
    strict: bool


def meant_by(name: str) -> type:
    """Return what a name of torch means now."""
    module, _, attribute = name.removeprefix("torch.").rpartition(".")
    found: type = getattr(operator.attrgetter(module)(torch) if module else torch, attribute)
    return found


class Patches(RuleBasedStateMachine):
    """Torch is patched exactly while a call of `patch_torch` is in force; no scaler ever changes what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.holds: list[Hold] = []
        self.ended: list[Hold] = []
        self.scalers: list[tuple[Any, type, type]] = []  # each with its type, and torch's class of that name
        self.pickles: list[tuple[bytes, type | None, type]] = []

    def teardown(self) -> None:
        unpatch_torch()

    @rule(strict=st.booleans())
    def patch(self, strict: bool) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch's gradient scalers were taken", category=UserWarning)
            self.holds.append(Hold(patch_torch(strict=strict), strict))

    @precondition(lambda self: self.holds)
    @rule(index=INDEX)
    def end(self, index: int) -> None:
        hold = self.holds.pop(index % len(self.holds))
        hold.manager.__exit__(None, None, None)
        self.ended.append(hold)

    @precondition(lambda self: self.ended)
    @rule(index=INDEX)
    def enter_again(self, index: int) -> None:
        hold = self.ended.pop(index % len(self.ended))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch's gradient scalers were taken", category=UserWarning)
            hold.manager.__enter__()
        self.holds.append(hold)

    @rule()
    def unpatch(self) -> None:
        unpatch_torch()
        self.ended += self.holds
        self.holds = []

    @rule(name=st.sampled_from(sorted(NAMES)))
    def build(self, name: str) -> None:
        theirs, ours = NAMES[name]
        scaler = built(meant_by(name))
        assert type(scaler) is (ours if self.holds else theirs)
        self.scalers.append((scaler, type(scaler), theirs))

    @precondition(lambda self: self.scalers)
    @rule(index=INDEX, copied=st.sampled_from(COPIES))
    def copy_one(self, index: int, copied: Callable[[Any], Any]) -> None:
        scaler, kind, theirs = self.scalers[index % len(self.scalers)]
        self.scalers.append((copied(scaler), kind, theirs))

    @precondition(lambda self: self.scalers)
    @rule(index=INDEX)
    def put_away(self, index: int) -> None:
        scaler, kind, theirs = self.scalers[index % len(self.scalers)]
        by_name = kind is theirs and not self.holds
        self.pickles.append((pickle.dumps(scaler), None if by_name else kind, theirs))

    @precondition(lambda self: self.pickles)
    @rule(index=INDEX)
    def take_out(self, index: int) -> None:
        pickled, kind, theirs = self.pickles[index % len(self.pickles)]
        if kind is None:  # a name, which means now what it means now
            kind = OURS[theirs] if self.holds else theirs
        self.scalers.append((pickle.loads(pickled), kind, theirs))

    @precondition(lambda self: self.scalers)
    @rule(index=INDEX)
    def train(self, index: int) -> None:
        scaler, _, theirs = self.scalers[index % len(self.scalers)]
        if scaler._device == "cuda" or "Sharded" in theirs.__name__:  # a GPU, or a group, is not here
            return
        parameter = torch.nn.Parameter(torch.tensor([1.0]))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        scaler.scale(3.0 * parameter).sum().backward()
        scaler.step(optimizer)
        scaler.update()
        assert (parameter.item(), scaler.get_scale()) == (-0.5, 8.0)

    @invariant()
    def names_mean_what_is_in_force(self) -> None:
        for name, (theirs, ours) in NAMES.items():
            assert meant_by(name) is (ours if self.holds else theirs), name
        assert stand_in.strict == any(hold.strict for hold in self.holds)

    @invariant()
    def scalers_are_what_they_were(self) -> None:
        for scaler, kind, theirs in self.scalers:
            assert type(scaler) is kind
            assert isinstance(scaler, TorchPlain)
            assert isinstance(scaler, OURS[theirs]) == (kind is not theirs)


@pytest.mark.parametrize("chunk", chunks(in_ci=25, share=0.05), ids=str)
def test_programs_of_patches(chunk: Chunk) -> None:
    run_state_machine_as_test(seed(chunk.seed)(Patches), settings=settings_for(chunk.programs, steps=20))
