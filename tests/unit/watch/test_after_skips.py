"""What skips leave behind: gradients that nobody clears, averages that stay NaN. Legitimate loops are told nothing."""

import warnings
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import PLACES, Place, params_of, sgd, started
from torch import nn

from scaler_triton import GradScaler, ScalerWarning, StepGuard
from scaler_triton.core.memory import HostCopy
from scaler_triton.watch import after_skips

CLASSES = pytest.mark.parametrize("cls", [GradScaler, StepGuard])


def model_of(place: Place) -> nn.Linear:
    model = nn.Linear(2, 1, bias=False, device=place.device)
    nn.init.ones_(model.weight)
    return model


def warned(run: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert all(each.category is ScalerWarning for each in caught)
    assert all(each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


CLEARS = {
    "none": ("optimizer.zero_grad()", ""),
    "zeros": ("optimizer.zero_grad(set_to_none=False)", ""),
    "after": ("", "optimizer.zero_grad(set_to_none=False)"),
    "scaled first": ("", ""),
    "never": ("", ""),
}


@PLACES
@CLASSES
@pytest.mark.parametrize("clears", CLEARS)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_that_nobody_clears_between_two_skips_are_warned_of(
    place: Place, cls: Any, clears: str, micro_batches: int
) -> None:
    scaler, model = started(cls, place.device, backend=place.backend), model_of(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, before, after = torch.ones(1, 2, device=place.device), *CLEARS[clears]

    def run() -> None:
        for batch in "..xx..xxx.":
            exec(before)
            for _ in range(micro_batches):
                loss = scaler.scale((model(x) * (torch.inf if batch == "x" else 1.0)).sum())
                if clears == "scaled first":
                    optimizer.zero_grad(set_to_none=False)
                loss.backward()
            scaler.step(optimizer)
            scaler.update()
            exec(after)

    texts = warned(run)
    assert len(texts) == (clears == "never")
    assert all(text.startswith("[ST05] Two steps of SGD in a row were skipped") for text in texts)
    assert scaler.was_skipped(optimizer) is (clears == "never")
    hooks: Any = model.weight._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    assert len(hooks or ()) == (clears == "never")


def test_gradients_of_another_loss_that_are_cleared_later_are_no_sign() -> None:
    """As in a GAN: the generator's loss also adds to the discriminator's gradients, which are cleared afterwards."""
    scaler, models = started(GradScaler, "cpu"), [model_of(Place("cpu", "torch")) for _ in range(2)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]

    def run() -> None:
        for batch in ".xx.xxx.":
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=False)
                factor = torch.inf if batch == "x" else 1.0
                scaler.scale(sum(each(torch.ones(1, 2)) for each in models).sum() * factor).backward()  # type: ignore[union-attr]
                scaler.step(optimizer)
            scaler.update()

    assert warned(run) == []


def test_a_followed_gradient_is_not_kept() -> None:
    place = Place("cpu", "torch")
    scaler, model = started(GradScaler, "cpu"), model_of(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(torch.ones(1, 2)) * torch.inf).sum().backward()
    scaler.step(optimizer)
    gradient = weakref.ref(model.weight.grad)  # type: ignore[arg-type]
    optimizer.zero_grad()
    assert gradient() is None


class Averages(torch.optim.SGD):
    """SGD by an average that a hook updates in backward, where no skip is known: so it keeps an overflow's Inf."""

    def __init__(self, parameters: Any, poisoned_by_hook: bool = True) -> None:
        super().__init__(parameters, lr=0.1)
        self.average: Any = 0.0
        for each in params_of(self) if poisoned_by_hook else ():
            each.register_hook(self.follow)

    def follow(self, grad: Any) -> None:
        self.average = self.average * 0.5 + grad.detach().sum() * 0.0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for each in params_of(self):
            each.data += self.average


@PLACES
@CLASSES
@pytest.mark.parametrize("poisoned", [False, True])
def test_parameters_that_break_in_a_step_after_a_skip_are_warned_of(place: Place, cls: Any, poisoned: bool) -> None:
    scaler, model = started(cls, place.device, backend=place.backend), model_of(place)
    frozen = nn.Parameter(torch.full((2,), -torch.inf, device=place.device))  # as masks are
    optimizer = Averages([frozen, model.weight], poisoned)
    x = torch.ones(1, 2, device=place.device)

    def run() -> None:
        for batch in "...xx....":
            optimizer.zero_grad()
            frozen.grad = torch.zeros_like(frozen)
            scaler.scale((model(x) * (torch.inf if batch == "x" else 1.0)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    texts = warned(run)
    assert len(texts) == poisoned
    for text in texts:
        start = "[ST06] A step of Averages by finite gradients has left 1 parameter with NaN or Inf"
        assert text.startswith(f"{start}, which had none before: the first is number 1, of shape 1 x 2.")
        assert "The step before was skipped" in text
    assert bool(model.weight.isfinite().all()) is not poisoned


def test_parameters_that_break_in_the_very_first_step_are_warned_of_and_other_parameters_end_the_trial() -> None:
    scaler, weight = started(GradScaler, "cpu"), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=torch.inf)

    def run() -> None:
        for _ in range(4):
            weight.grad = torch.ones(2)
            scaler.step(optimizer)
            scaler.update()

    (text,) = warned(run)
    assert "which had none before: the first is number 0, of shape 2. So" in text
    assert text.endswith("It was its first one: look at lr, at eps, and at state in fp16.")

    scaler, optimizer = started(GradScaler, "cpu"), torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=torch.inf)

    def replaced() -> None:
        for number in range(4):
            replace(1.0 if number % 2 == 0 else -torch.inf)
            scaler.step(optimizer)
            scaler.update()

    def replace(value: float, gradient: float = 1.0) -> None:
        optimizer.param_groups[0]["params"] = [nn.Parameter(torch.full((2,), value))]
        params_of(optimizer)[0].grad = torch.full((2,), gradient)

    assert warned(replaced) == []

    def skipped() -> None:
        replace(1.0, torch.inf)
        for _ in range(3):
            scaler.step(optimizer)
            scaler.update()
            params_of(optimizer)[0].grad = torch.ones(2)

    assert [text[:6] for text in warned(skipped)] == ["[ST06]"]


def test_a_fused_optimizers_first_step_is_looked_at_too() -> None:
    scaler, weight = started(GradScaler, "cpu"), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=float("inf"), fused=True)

    def run() -> None:
        for _ in range(3):
            weight.grad = torch.ones(2)
            scaler.step(optimizer)
            scaler.update()

    assert [text[:6] for text in warned(run)] == ["[ST06]"]


def test_a_trial_ends_when_its_copy_arrives_and_a_skip_meanwhile_begins_another() -> None:
    """As on a GPU, where nothing waits for it."""
    scaler, weight = started(GradScaler, "cpu"), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=torch.inf)

    def run() -> None:
        for _ in range(5):
            weight.grad = torch.ones(2)
            scaler.step(optimizer)
            scaler.update()

    with mock.patch.object(HostCopy, "has_arrived", side_effect=[False, False, True]) as asked:
        (text,) = warned(run)
    assert asked.call_count == 3
    assert "has left 1 parameter with NaN or Inf" in text
    assert "trial" not in scaler._ours.steps.open(optimizer).notes

    scaler, optimizer = started(GradScaler, "cpu"), torch.optim.SGD([weight], lr=0.1)
    with torch.no_grad():
        weight.fill_(1.0)

    def skipped() -> None:
        for batch in ".xx.":
            weight.grad = torch.full((2,), torch.inf if batch == "x" else 1.0)
            scaler.step(optimizer)
            scaler.update()
        with torch.no_grad():
            weight.fill_(torch.nan)  # by that step
        scaler.unscale_(optimizer)

    step = scaler._ours.steps.open(optimizer)
    with mock.patch.object(HostCopy, "has_arrived", side_effect=lambda: step.steps_taken > 2):
        assert [text[:6] for text in warned(skipped)] == ["[ST06]"]


def test_parameters_that_get_another_dtype_in_a_step_are_not_compared() -> None:
    scaler, weights = started(GradScaler, "cpu"), [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.SGD(weights, lr=0.1)

    def run() -> None:
        for _ in range(3):
            for each in weights:
                each.grad = torch.ones_like(each)
            scaler.step(optimizer)
            scaler.update()
            weights[0].data, weights[0].grad = weights[0].data.double(), None

    assert warned(run) == []


def test_a_streak_of_skips_looks_at_parameters_once_and_the_first_step_after_it_is_told_as_such() -> None:
    scaler, weight = started(GradScaler, "cpu"), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=torch.inf)

    def run(*batches: float) -> None:
        for batch in batches:
            weight.grad = torch.full((2,), batch)
            scaler.step(optimizer)
            scaler.update()

    with mock.patch.object(after_skips, "largest_by_kind", side_effect=after_skips.largest_by_kind) as looks:
        run(*[torch.inf] * 5)
    assert looks.call_count == 1
    (text,) = warned(lambda: run(1.0, 1.0))
    assert "The step before was skipped" in text


def test_a_gradient_of_another_form_after_the_first_step_is_no_reason_to_look() -> None:
    scaler, weight = started(GradScaler, "cpu"), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with mock.patch.object(after_skips, "largest_by_kind", side_effect=after_skips.largest_by_kind) as looks:
        for number in range(6):
            weight.grad = torch.ones(2) if number < 4 else torch.ones(4)[::2]
            scaler.step(optimizer)
            scaler.update()
    assert looks.call_count == 2


def test_a_gradient_that_accumulates_over_a_good_step_is_no_sign() -> None:
    """Of a parameter that is cleared now and then, before one that is cleared in each step."""
    scaler, weights = started(GradScaler, "cpu"), [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.0)

    def run() -> None:
        for batch in "x.x.x":
            weights[1].grad = None
            scaler.scale(weights[0].sum() + weights[1].sum() * (torch.inf if batch == "x" else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()

    assert warned(run) == []


def test_a_gradient_that_was_replaced_and_is_kept_is_no_sign() -> None:
    scaler, weight = started(GradScaler, "cpu"), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def run() -> None:
        kept: Any = torch.zeros(2)
        for _ in range(3):
            kept.add_(1.0)
            scaler.scale(weight.sum() * torch.inf).backward()
            scaler.step(optimizer)
            scaler.update()
            kept, weight.grad = weight.grad, None

    assert warned(run) == []


def test_a_frozen_parameter_is_not_followed() -> None:
    scaler, optimizer = started(GradScaler, "cpu"), sgd([torch.tensor([torch.inf])])
    params_of(optimizer)[0].requires_grad_(False)
    scaler.step(optimizer)
    assert scaler.was_skipped(optimizer)
    assert "following" not in scaler._ours.steps.open(optimizer).notes


@pytest.mark.parametrize("error", [RuntimeError, TypeError])
def test_a_gradient_that_cannot_be_followed_is_not(error: type[Exception]) -> None:
    scaler, optimizer = started(GradScaler, "cpu"), sgd([torch.tensor([torch.inf])])
    with mock.patch.object(after_skips, "Following", side_effect=error):
        scaler.step(optimizer)
    assert scaler.was_skipped(optimizer)
