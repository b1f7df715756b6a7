"""A pickle of ours imports nothing else. That nothing we read can make us run code is the linter's: pyproject.toml."""

import io
import pickle
from typing import Any

import pytest
from helpers import started

from scaler_triton import GradScaler, ShardedGradScaler


class Recorder(pickle.Unpickler):
    """Notes what a pickle asks to be imported."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.asked: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.asked.add((module, name))
        return super().find_class(module, name)


@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
def test_a_pickled_scaler_asks_for_its_own_class_only(cls: Any) -> None:
    """Whatever else it asked for could never move."""
    recorder = Recorder(pickle.dumps(started(cls, "cpu")))
    assert type(recorder.load()) is cls
    assert recorder.asked - {("copyreg", "_reconstructor"), ("builtins", "object")} == {(cls.__module__, cls.__name__)}
