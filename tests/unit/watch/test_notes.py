"""What errors of torch's are given beside their text."""

from typing import Any

import pytest
import torch
from helpers import params_of, sgd, started
from torch import nn

from scaler_triton import GradScaler
from scaler_triton.watch.after_skips import Following


def notes_of(call: Any) -> list[str]:
    with pytest.raises((AssertionError, ValueError)) as caught:
        call()
    return getattr(caught.value, "__notes__", [])


def test_an_optimizer_without_gradients_is_told_how_many_have_one() -> None:
    scaler, optimizer = started(GradScaler, "cpu"), sgd([None, None])
    assert notes_of(lambda: scaler.step(optimizer)) == ["0 of its 2 parameters have a gradient."]


def test_gradients_that_came_after_the_check_are_counted_and_other_errors_are_told_nothing() -> None:
    scaler, optimizer = started(GradScaler, "cpu"), sgd([None, None])
    scaler.unscale_(optimizer)
    params_of(optimizer)[1].grad = torch.ones(3)
    assert notes_of(lambda: scaler.step(optimizer)) == ["1 of its 2 parameters have a gradient."]
    nowhere = nn.Parameter(torch.ones(2, device="meta"))
    nowhere.grad = torch.ones(2, device="meta")
    assert notes_of(lambda: scaler.unscale_(torch.optim.SGD([nowhere]))) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of torch.distributed.optim's own import
@pytest.mark.parametrize("how", ["hook", "torch"])
def test_an_optimizer_that_steps_in_backward_is_recognised(how: str) -> None:
    weight: Any = nn.Parameter(torch.ones(2))
    if how == "hook":
        own = torch.optim.SGD([weight], lr=0.1)

        def release(parameter: Any) -> None:
            own.step()
            own.zero_grad()

        weight.register_post_accumulate_grad_hook(release)
    else:
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.1})
    scaler, optimizer = started(GradScaler, "cpu"), torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum()).backward()
    count, cause = notes_of(lambda: scaler.step(optimizer))
    assert count == "0 of its 1 parameter have a gradient."
    assert cause.startswith("[ST07] Hooks run on its parameters in backward.")


def test_a_hook_of_the_scalers_own_is_no_such_hook() -> None:
    scaler, weight = started(GradScaler, "cpu"), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.full((2,), torch.inf)
    scaler.step(optimizer)
    scaler.update()
    hooks: Any = weight._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    assert [type(hook.__self__) for hook in hooks.values()] == [Following]
    optimizer.zero_grad()
    assert len(notes_of(lambda: scaler.step(optimizer))) == 1


def test_fp16_gradients_are_told_by_which_argument_they_are_taken() -> None:
    scaler, weight = started(GradScaler, "cpu"), nn.Parameter(torch.ones(2, dtype=torch.float16))
    weight.grad = torch.ones_like(weight)
    (note,) = notes_of(lambda: scaler.unscale_(torch.optim.SGD([weight], lr=0.1)))
    assert note.startswith("[ST08] The parameters are fp16.")
    assert "GradScaler(allow_fp16_grads=True)" in note
