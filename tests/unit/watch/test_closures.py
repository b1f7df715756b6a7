"""Closures that optimizers call within their steps."""

import warnings
from typing import Any

import pytest
import torch
from helpers import params_of, sgd, started, values

from scaler_triton import GradScaler, ScalerWarning


class Sam(torch.optim.SGD):
    """As sharpness-aware optimizers step: by a second gradient, of the closure."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = closure()
        super().step()
        return loss


def run(scales: bool) -> tuple[list[str], list[float]]:
    scaler, optimizer = started(GradScaler, "cpu", init_scale=4.0), Sam(params_of(sgd([torch.ones(1)])), lr=0.5)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = params_of(optimizer)[0].sum()
        (scaler.scale(loss) if scales else loss).backward()
        return loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            params_of(optimizer)[0].grad = torch.full((1,), 4.0)
            scaler.step(optimizer, closure)
            scaler.update()
            scaler.scale(torch.ones(()))  # outside
    assert all(each.category is ScalerWarning and each.filename == __file__ for each in caught)
    return [str(each.message)[:44] for each in caught], values(optimizer)


def test_one_that_scales_its_loss_is_warned_of_once() -> None:
    assert run(True) == (["[ST02] A closure that was passed to step() h"], [-6.0])
    assert run(False) == ([], [-1.5])


def test_a_closure_that_raises_leaves_no_trace_and_one_by_its_name_is_refused() -> None:
    scaler, optimizer = started(GradScaler, "cpu"), Sam(params_of(sgd([torch.ones(1)])), lr=0.5)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer, lambda: 1 / 0)
    assert scaler._ours.steps.on_scale is None
    scaler.update()
    with pytest.raises(RuntimeError, match=r"^Closure use is not currently supported if GradScaler is enabled\.$"):
        scaler.step(optimizer, closure=lambda: 1.0)


def test_a_closure_may_ask_for_gradients_of_another_optimizer() -> None:
    """A loss that is scaled in a closure begins no new step: what was unscaled before stays so."""
    scaler, optimizer = started(GradScaler, "cpu", init_scale=4.0), Sam(params_of(sgd([torch.ones(1)])), lr=0.5)
    other = sgd([torch.full((1,), 8.0)])
    scaler.unscale_(other)
    with pytest.warns(ScalerWarning, match="ST02"):
        scaler.step(optimizer, lambda: scaler.scale(torch.ones(())))
    scaler.update()
    scaler.step(other)
    assert values(other) == [-1.0]


def test_arguments_go_to_the_optimizer_and_those_of_the_closure_to_it() -> None:
    class Takes(torch.optim.SGD):
        def step(self, *args: Any, **named: Any) -> Any:
            return args[0](1, more=2), *args[1:], named

    scaler, optimizer = started(GradScaler, "cpu"), Takes(params_of(sgd([torch.ones(1)])), lr=0.5)
    given = scaler.step(optimizer, lambda *args, **named: (args, named), 3, beside=4)
    assert given == (((1,), {"more": 2}), 3, {"beside": 4})
    assert not scaler._ours.steps.unfinished
    scaler.update()
    other = sgd([torch.full((1,), scaler.get_scale())])
    scaler.step(other, None)
    scaler.update()
    other.step = lambda *, beside: beside  # type: ignore[method-assign, assignment]
    assert scaler.step(other, beside=4) == 4
