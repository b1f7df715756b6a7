"""The specification departs from torch only where docs/differences.md says so, and torch still does something else."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("hypothesis")

import helpers
import torch
from extras import CLIPPING, FullSpecification
from helpers import values
from specification import FAILURE, FP16_SUMS, SMALLEST, departures
from worlds import Wrapper

FOLDER = Path(__file__).parent
PAGE = (FOLDER.parents[1] / "docs" / "differences.md").read_text()
# What has no number, and where the page says it.
WORDS = {"FAILURE": "\n## When something fails\n", "CLIPPING": "`clip_grad_norm_`"}


def sgd(grad: float, **options: Any) -> torch.optim.SGD:
    return helpers.sgd([torch.full((2,), grad)], **options)


def started(cls: Any, **options: Any) -> Any:
    scaler = cls(device="cpu", **{"init_scale": 4.0, "growth_interval": 2, **options})
    scaler.scale(torch.ones(()))
    return scaler


def gradients_that_came_after_unscaling(cls: Any) -> Any:
    optimizer, scaler = sgd(8.0, fused=True), started(cls)
    (parameter,) = optimizer.param_groups[0]["params"]
    gradient, parameter.grad = parameter.grad, None
    scaler.unscale_(optimizer)
    parameter.grad = gradient
    scaler.step(optimizer)
    return values(optimizer)


def an_interval_below_the_tracker(cls: Any) -> Any:
    scaler = started(cls)
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 5})
    return helpers.update(scaler, bad=False)


def a_limit(cls: Any) -> Any:
    scaler = started(cls)
    scaler.set_limits(min_scale=4.0)
    return helpers.update(scaler, bad=True)


def momentum_of_a_skipped_step(cls: Any) -> Any:
    optimizer = sgd(math.inf, momentum=0.5, fused=True)
    started(cls).step(optimizer)
    return len(optimizer.state)


def a_wrapper(cls: Any) -> Any:
    optimizer, scaler = sgd(8.0), started(cls)
    scaler.unscale_(optimizer)
    scaler.step(Wrapper(optimizer))
    return values(optimizer)


def duplicates_in_fp16(cls: Any) -> Any:
    parameter, small = torch.nn.Parameter(torch.zeros(3).half()), torch.tensor([1.0, *[2.0**-11] * 3]).half()
    parameter.grad = torch.sparse_coo_tensor(torch.zeros(1, 4).long(), small, (3,), check_invariants=False)
    started(cls)._check_inf_per_device(torch.optim.SGD([parameter], lr=1.0))
    return parameter.grad._values().tolist()


def a_step_after_the_update(cls: Any) -> Any:
    late, scaler = sgd(8.0), started(cls)
    scaler.unscale_(late)
    helpers.update(scaler, bad=False)
    scaler.step(late)
    return values(late)


def stepped_again(cls: Any, optimizer: torch.optim.SGD, loss: bool) -> Any:
    scaler = started(cls)
    with mock.patch.object(optimizer, "step", side_effect=MemoryError), pytest.raises(MemoryError):
        scaler.step(optimizer)
    if loss:
        scaler.scale(torch.ones(()))
        optimizer.param_groups[0]["params"][0].grad.fill_(8.0)
    scaler.step(optimizer)
    return values(optimizer)


SHOWN: dict[int | str, Callable[[Any], Any]] = {
    1: gradients_that_came_after_unscaling,
    2: lambda cls: started(cls).set_growth_factor(math.nan),
    3: an_interval_below_the_tracker,
    4: lambda cls: helpers.update(started(cls, init_scale=SMALLEST), bad=True),
    5: lambda cls: started(cls).update(1024),
    6: lambda cls: started(cls, enabled=False).get_growth_factor(),
    13: a_limit,
    14: momentum_of_a_skipped_step,
    15: a_wrapper,
    FP16_SUMS: duplicates_in_fp16,
    18: a_step_after_the_update,
    23: lambda cls: stepped_again(cls, sgd(8.0), loss=True),
    FAILURE: lambda cls: stepped_again(cls, sgd(8.0, fused=True), loss=False),
    CLIPPING: lambda cls: started(cls).clip_grad_norm_([sgd(8.0)], 1.0).isfinite().item(),
}


def outcome(call: Callable[[Any], Any], cls: Any) -> Any:
    try:
        return call(cls)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("number", SHOWN)
def test_torch_does_something_else(number: int | str) -> None:
    departures.clear()
    ours, theirs = (outcome(SHOWN[number], cls) for cls in (FullSpecification, torch.amp.GradScaler))
    assert departures[number] > 0
    assert ours != theirs


def test_each_departure_is_on_the_page_and_is_shown() -> None:
    sources = [(FOLDER / name).read_text() for name in ("specification.py", "extras.py")]
    numbers = {int(number) for number in re.findall(r"^(\d+)\. ", PAGE, re.MULTILINE)}
    departed = {word for source in sources for word in re.findall(r"(?<!def )\bdeparts\((\w+)\)", source)} - {"number"}
    constants = {"FP16_SUMS": FP16_SUMS, "FAILURE": FAILURE, "CLIPPING": CLIPPING}
    met = {constants[word] if word in constants else int(word) for word in departed}
    assert met == {*SHOWN, 9}  # of which only a GPU knows
    assert {number for number in met if isinstance(number, int)} <= numbers
    assert all(text in PAGE for text in WORDS.values())
    for source in sources:
        assert {int(number) for number in re.findall(r"[Dd]ifferences?,? (\d+)", source)} <= numbers
