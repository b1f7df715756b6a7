"""What the ranks run in test_split_ranks: their scales have come apart before the step."""

from __future__ import annotations

import cases
import torch


def stepped_with_different_scales(rank: int, kind: str, layout: str, unscale: bool) -> list[str]:
    """Rank 1's scale is written over; what each call says, then one step with a scale that all have."""
    scaler, params = cases.new_scaler(kind), cases.LAYOUTS[layout]()
    optimizer = cases.new_optimizer("sgd", params)
    said = []
    for step in range(3):
        cases.give_grads(scaler, params, step)
        if rank == 1 and step == 1:
            scaler._scale.fill_(64.0)
        try:
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
        scaler.update(cases.INIT_SCALE if step == 1 else None)
    return said


def clipped_after_a_step(rank: int) -> bool:
    """A clip carries no scales: those of the step before it must not be taken for them."""
    scaler, params = cases.new_scaler("sharded"), [cases.plain_param(3)]
    optimizer = cases.new_optimizer("sgd", params)
    for step in range(2):
        cases.give_grads(scaler, params, step)
        if step == 1:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update(4.0)
    return bool(torch.isfinite(params[0]).all())
