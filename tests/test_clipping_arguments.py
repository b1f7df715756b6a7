"""What `clip_grad_norm_` takes for a number, an optimizer or parameters, and what it refuses."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from clipping_setup import PLACES, grads, scaler_on
from helpers import Place, sgd, started
from scaler_triton.batch import group
from scaler_triton.clipping import at_once
from torch import nn

from scaler_triton import GradScaler


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((-1.0,), {}, "^max_norm must be a number >= 0, got -1.0"),
        ((math.nan,), {}, "^max_norm must be a number >= 0, got nan"),
        ((1.0, 0.0), {}, "^norm_type must be > 0, got 0.0"),
        ((1.0,), {"defer": True}, r"^defer=True needs optimizers that take grad_scale \(fused=True\), got SGD"),
        ((1.0, 1.0), {"defer": True}, "^defer=True clips all gradients by norm_type 2.0, got norm_type 1.0$"),
        ((1.0,), {"defer": True, "parameters": []}, "^defer=True clips all gradients by .* 2.0, got parameters=$"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_changes(arguments: Any, options: Any, text: str) -> None:
    optimizer = sgd([torch.full((3,), 24.0)])
    scaler = scaler_on(Place("cpu", "torch"))
    with pytest.raises(ValueError, match=text):
        scaler.clip_grad_norm_(optimizer, *arguments, **options)
    assert grads(optimizer)[0].tolist() == [24.0] * 3
    scaler.step(optimizer)
    assert optimizer.param_groups[0]["params"][0].tolist() == [-1.5] * 3


class AnyNumber:
    """Compares as a number and is none, as an array of one does with newer NumPy."""

    def __ge__(self, other: object) -> bool:
        return True

    def __repr__(self) -> str:
        return "<any number>"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_norm": "1"}, "^max_norm must be a number, got '1'$"),
        ({"max_norm": None}, "^max_norm must be a number, got None$"),
        ({"max_norm": AnyNumber()}, "^max_norm must be a number, got <any number>$"),
        ({"max_norm": torch.ones(2)}, r"^max_norm must be a number, got tensor\(\[1., 1.\]\)$"),
        ({"norm_type": None}, "^norm_type must be a number, got None$"),
        ({"norm_type": nn.Sequential(nn.ReLU())}, r"^norm_type must be a number, got Sequential\( \(0\): ReLU\(\) \)$"),
        ({"model": "net"}, "^model must be a module, got str$"),
        ({"parameters": [("weight", torch.ones(3))]}, "^parameters must be tensors, got tuple$"),
        ({"parameters": 2.0}, "^parameters must be tensors, got float$"),
        (
            {"optimizers": [torch.ones(3)]},
            "^optimizers must be an optimizer or several of them, got Tensor;",
        ),
    ],
)
def test_what_is_of_no_use_is_refused_before_anything_changes(options: dict[str, Any], text: str) -> None:
    optimizer = sgd([torch.full((3,), 24.0)])
    scaler = scaler_on(Place("cpu", "torch"))
    with pytest.raises(TypeError, match=text):
        scaler.clip_grad_norm_(**{"optimizers": optimizer, "max_norm": 1.0, **options})
    assert grads(optimizer)[0].tolist() == [24.0] * 3
    assert not scaler._per_optimizer_states


@pytest.mark.parametrize("options", [{}, {"norm_type": 1.0}], ids=["at once", "after unscaling"])
def test_a_bound_that_no_float_holds_is_refused_before_anything_changes(options: dict[str, float]) -> None:
    optimizer = sgd([torch.full((3,), 24.0)])
    scaler = scaler_on(Place("cpu", "torch"))
    with pytest.raises(OverflowError, match="int too large to convert to float"):
        scaler.clip_grad_norm_(optimizer, 10**400, **options)
    assert grads(optimizer)[0].tolist() == [24.0] * 3
    assert not scaler._per_optimizer_states


@PLACES
@pytest.mark.parametrize("number", [torch.tensor(1.0), torch.ones(1, requires_grad=True), Fraction(1), 1, True])
def test_a_bound_may_be_any_number(place: Place, number: Any) -> None:
    optimizer = sgd([torch.full((4,), 16.0)], place.device)
    assert scaler_on(place).clip_grad_norm_(optimizer, number).item() == 4.0
    assert grads(optimizer)[0].tolist() == pytest.approx([0.5] * 4, rel=1e-5)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("options", [{}, {"parameters": []}, {"norm_type": 1.0}])
def test_an_optimizer_is_clipped_once(options: dict[str, Any], enabled: bool) -> None:
    optimizer = sgd([torch.full((3,), 24.0)])
    scaler = scaler_on(Place("cpu", "torch"), enabled=enabled)
    for several, text in (([], "got 0"), ([optimizer, optimizer], "got 2")):
        with pytest.raises(ValueError, match=f"^optimizers must be one or more, none of them twice, {text}$"):
            scaler.clip_grad_norm_(several, 1.0, **options)
    assert grads(optimizer)[0].tolist() == [24.0] * 3


@pytest.mark.parametrize("norm_type", [3, "inf"])
def test_orders_are_written_as_torchs(norm_type: Any) -> None:
    optimizer = sgd([torch.tensor([math.inf])])
    scaler = scaler_on(Place("cpu", "torch"))
    with pytest.raises(RuntimeError) as ours:
        scaler.clip_grad_norm_(optimizer, 1.0, norm_type, error_if_nonfinite=True)
    with pytest.raises(RuntimeError) as torchs:
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0, norm_type, error_if_nonfinite=True)
    assert str(ours.value) == str(torchs.value)
    with pytest.raises(TypeError, match="^norm_type must be a number, got 'two'"):
        scaler.clip_grad_norm_(optimizer, 1.0, "two")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((torch.nn.Linear(1, 1),), "optimizers must be an optimizer or several of them, got Linear$"),
        (
            (list(torch.nn.Linear(1, 1).parameters()),),
            "optimizers must be .*, got Parameter; to clip some .* pass parameters=$",
        ),
        ((None,), "optimizers must be an optimizer or several of them, got NoneType"),
    ],
)
def test_what_is_no_optimizer_is_named(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        started(GradScaler, "cpu").clip_grad_norm_(*arguments, 1.0)


def test_a_module_is_no_parameters() -> None:
    with pytest.raises(TypeError, match=r"parameters must be tensors, such as those of Linear.parameters\(\)"):
        started(GradScaler, "cpu").clip_grad_norm_(sgd([torch.ones(1)]), 1.0, parameters=torch.nn.Linear(1, 1))


def test_parameters_that_no_optimizer_holds_are_told_of() -> None:
    parameters = [torch.ones(1, requires_grad=True)]
    scaler, optimizer = started(GradScaler, "cpu"), sgd([torch.ones(1)])
    with pytest.warns(UserWarning, match="No optimizer holds any of `parameters`, no gradient clipping") as warned:
        assert scaler.clip_grad_norm_(optimizer, 1.0, parameters=parameters).item() == 0.0
    assert warned[0].filename == __file__


@pytest.mark.parametrize("parameters", [[], [torch.ones(1)]], ids=["none", "frozen"])
def test_what_nobody_trains_is_not_told_of(parameters: list[torch.Tensor]) -> None:
    norm = started(GradScaler, "cpu").clip_grad_norm_(sgd([torch.ones(1)]), 1.0, parameters=parameters)
    assert norm.item() == 0.0  # and no warning, which would fail the test


def test_a_generator_that_was_used_up_is_told_of_as_by_torch() -> None:
    optimizer = sgd([torch.ones(1)])
    used_up = (parameter for parameter in ())
    with pytest.warns(UserWarning, match="is an empty generator, no gradient clipping will occur") as warned:
        norm = started(GradScaler, "cpu").clip_grad_norm_(optimizer, 1.0, parameters=used_up)
    assert (norm.item(), warned[0].filename) == (0.0, __file__)


def test_weights_are_those_of_the_copies_that_are_passed() -> None:
    (batch,) = group([torch.ones(3)])
    assert [at_once._weights(batch, copies) for copies in ([2], [4], [1])] == [[0.5], [0.25], None]
