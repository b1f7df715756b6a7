"""RankState: what an audit reads on one rank, and compares."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

NOTHING = "-"
UNKNOWN = "?"  # it is not known which ranks' copies of a parameter should be equal


class Reading(NamedTuple):
    """A value of one rank, as shown and as compared; None: not compared."""

    shown: str
    compared: str | None


class Copy(NamedTuple):
    """One rank's copy of a parameter; `among` names the ranks whose copies should be equal."""

    name: str
    among: str
    digest: str


@dataclass(frozen=True)
class RankState:
    """The values of one rank.

    Args:
        rank: its global number.
        readings: by column; each column is compared on its own.
        copies: parameters, hashed.
        left_out: how many parameters were not compared, by the reason.
        error: why the rank could not be read, on one line; empty if it could.
        subject: what was audited.
    """

    rank: int
    readings: Mapping[str, Reading] = field(default_factory=dict)
    copies: Sequence[Copy] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    error: str = ""
    subject: str = ""

    def to_bytes(self) -> bytes:
        """Return the state as JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> RankState:
        """Return the state that `to_bytes` wrote."""
        fields = json.loads(data)
        fields["readings"] = {name: Reading(*pair) for name, pair in fields["readings"].items()}
        fields["copies"] = [Copy(*entry) for entry in fields["copies"]]
        return RankState(**fields)


def number(value: float) -> str:
    """Return a number with all its digits, without a trailing ".0"."""
    return repr(float(value)).removesuffix(".0")


def scaler_readings(scale: float, tracker: int, *, used: bool = True) -> dict[str, Reading]:
    """Return the columns of a scaler.

    Args:
        scale: the loss scale; compared to the bit, a NaN equals a NaN.
        tracker: good steps since it last changed.
        used: False if it has never scaled a loss.
    """
    shown = number(scale) + ("" if used else " (unused)")
    return {"scale": Reading(shown, float(scale).hex()), "tracker": Reading(str(tracker), str(tracker))}


def steps_reading(steps: Sequence[float]) -> Reading:
    """Return the column of an optimizer: the fewest to the most steps of a parameter, of which the most are compared.

    A parameter without a gradient takes no step, on one rank and not on another; the optimizer as a whole does.

    Args:
        steps: of every parameter that has a state.
    """
    if not steps:
        return Reading(NOTHING, None)
    least, most = number(min(steps)), number(max(steps))
    return Reading(most if least == most else f"{least}..{most}", most)
