"""Looks: what Divide and Read make of a plan's gradients, and of what stands for Partial ones."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from batches import batch_of, number
from helpers import PLACES, Place, parameters
from torch import Tensor

from scaler_triton.core.check import Checks
from scaler_triton.core.flag import Flag, make_flag
from scaler_triton.core.look import Divide, Read
from scaler_triton.core.step import OptimizerStep
from scaler_triton.core.update import Counters
from scaler_triton.kernels.abi import STATUS


def look(grads: Sequence[Tensor | None], place: Place, divide: bool = True, scale: Any = 4.0) -> Any:
    """Return parameters and the flag of a look."""
    params = parameters(grads, place.device)
    checks, step = Checks(Counters(), sharded=False), OptimizerStep()
    checks.requested = place.backend
    given = number(scale, place) if isinstance(scale, float) else scale.to(place.device)
    optimizer = torch.optim.SGD(params, lr=1.0)
    plan, held = checks.plan(step, optimizer, given.device)
    looks, flag = checks.looks_for(step, given, divide), make_flag(torch.zeros(STATUS, device=place.device))
    assert [type(each) for each in looks] == [Divide if divide else Read]
    checks.take_looks(looks, plan, held, step, given, flag, None, divide=divide)
    return params, flag


def found(flag: Flag) -> list[float]:
    """Return the flags of the devices."""
    return [flag.found_inf.item() for _ in flag.devices()]


@PLACES
@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("bad", [None, 0, 1, 2])
def test_one_flag_is_for_all_batches_of_a_device(place: Place, divide: bool, bad: int | None) -> None:
    grads: list[Tensor] = [torch.full((3,), 8.0), torch.full((2,), 8.0).double(), torch.full((8,), 8.0)[::2]]
    if bad is not None:
        grads[bad][0] = math.nan
    params, flag = look(grads, place, divide)
    assert found(flag) == [float(bad is not None)]
    assert flag.written is divide
    assert [p.grad[-1].item() for p in params] == [2.0 if divide else 8.0] * 3


@PLACES
@pytest.mark.parametrize("scale", [torch.tensor([4.0]), torch.tensor(4.0).double(), torch.tensor(0.0)])
def test_a_scale_is_taken_as_it_is_assigned(place: Place, scale: Tensor) -> None:
    (parameter,), flag = look([torch.tensor([8.0, 1.0])], place, scale=scale)
    assert parameter.grad.tolist() == ([2.0, 0.25] if scale.item() else [math.inf] * 2)
    assert found(flag) == [0.0]


def test_the_inverse_of_an_fp64_scale_is_rounded_once() -> None:
    scale = torch.tensor(3.0 + 1e-7, dtype=torch.float64)
    (parameter,), _ = look([torch.ones(1)], Place("cpu", "torch"), scale=scale)
    assert parameter.grad.item() == (1.0 / scale).float().item() != (1.0 / scale.float()).item()


@PLACES
def test_what_stands_for_a_partial_gradient_is_only_checked(place: Place) -> None:
    batch = batch_of([torch.tensor([8.0, math.inf])], place)._replace(is_partial=True)
    flag = Flag(torch.zeros(STATUS, device=place.device))
    Divide().run(batch, number(4.0, place), flag)
    assert (batch.present[0].tolist(), flag.found_inf.item(), flag.written) == ([8.0, math.inf], 1.0, False)
