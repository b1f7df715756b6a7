"""What the ranks run in test_overflow_ranks."""

from __future__ import annotations

from collections.abc import Sequence

import cases
import dtensor_cases
from cases import Fault, collectives_of


def reported(rank: int, kind: str, layout: str, faults: Sequence[Fault]) -> tuple[str, str, int]:
    """Skip one step; the report of this rank and that of all, and the collectives that the latter took."""
    scaler, params = cases.new_scaler(kind), dtensor_cases.LAYOUTS[layout]()
    optimizer = cases.new_optimizer("adamw", params)
    names = [("first", params[0]), ("second", params[1])]
    cases.give_grads(scaler, params, 0)
    cases.plant(faults, rank, 0, params)
    scaler.step(optimizer)
    scaler.update()
    reports: list[str] = []
    count = collectives_of(lambda: reports.append(str(scaler.overflow_report(names, gather=True))))
    return str(scaler.overflow_report(names)), reports[0], count
