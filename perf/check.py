"""No time is believed before the result is: every subject must leave the same bits as torch."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from perf.measure import Subject

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WrongResult(AssertionError):
    """A subject's result differs from torch's: its time would be no answer."""


def require(holds: object, text: str) -> None:
    """Raise WrongResult with `text` unless `holds`."""
    if not holds:
        raise WrongResult(text)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Tell whether two tensors hold the same bits, whatever their shape; a NaN equals itself."""
    return left.dtype is right.dtype and torch.equal(bits(left), bits(right))


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's memory as flat integers."""
    return tensor.detach().reshape(-1).view(INTEGERS[tensor.element_size()])


def require_same(case: str, subjects: Mapping[str, Subject], result: Callable[[str], Sequence[Tensor]]) -> None:
    """Run every subject once; raise WrongResult unless all leave what the first one leaves.

    Args:
        case: for the message.
        subjects: the first one is believed.
        result: gives what a subject that has just run left behind; read at once.
    """
    expected: list[Tensor] | None = None
    for name, subject in subjects.items():
        subject.before()
        subject.run()
        found = [tensor.detach().clone() for tensor in result(name)]
        subject.after()
        expected = found if expected is None else expected
        _compare(case, name, expected, found)


def _compare(case: str, name: str, expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    require(len(expected) == len(found), f"{case}: {name} left {len(found)} tensors, not {len(expected)}")
    for index, (right, mine) in enumerate(zip(expected, found, strict=True)):
        require(same_bits(right, mine), f"{case}: {name}'s tensor {index} differs: {_brief(mine)}, not {_brief(right)}")


def _brief(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tensor.reshape(-1)[:4].tolist()}"
