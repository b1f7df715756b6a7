"""Derivatives of gradients, gradients of samples, and copies that are still on their way."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import PLACES, Place, params_of, started
from torch import Tensor, nn

from scaler_triton import GradScaler, StepGuard
from scaler_triton.core import passes, torch_ops
from scaler_triton.watch import derived


class Hessian(torch.optim.Optimizer):
    """A step by a gradient and by a derivative of it, as AdaHessian takes one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        parameters = params_of(self)
        given = [each.grad for each in parameters]
        second = torch.autograd.grad(given, parameters, [torch.ones_like(each) for each in given])
        with torch.no_grad():
            for parameter, grad, derivative in zip(parameters, given, second, strict=True):
                parameter -= 0.1 * grad + 0.01 * derivative


def trained(scaler: Any, device: str, how: str) -> list[float]:
    parameters = [nn.Parameter(torch.tensor([1.0, -2.0], device=device)), nn.Parameter(torch.ones(1, device=device))]
    optimizer = Hessian(parameters)
    for _ in range(4):
        optimizer.zero_grad()
        loss = (parameters[0] ** 4).sum() * parameters[1].sum() + parameters[1].pow(3).sum()
        scaler.scale(loss).backward(create_graph=True)
        if how == "unscale_":
            scaler.unscale_(optimizer)
        elif how == "clip" and scaler.is_enabled():
            scaler.clip_grad_norm_(optimizer, 1e9)
        scaler.step(optimizer)
        scaler.update()
    for each in parameters:
        each.grad = None  # it is part of a cycle
    return [number for each in parameters for number in each.tolist()]


@PLACES
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("how", ["step", "unscale_", "clip"])
@pytest.mark.parametrize("cls", [GradScaler, StepGuard])
def test_second_derivatives_are_as_without_a_scaler(place: Place, how: str, cls: Any) -> None:
    options = {"init_scale": 1024.0} if cls is GradScaler else {}
    scaler = started(cls, place.device, backend=place.backend, **options)
    expected = trained(torch.amp.GradScaler("cpu", enabled=False), place.device, "step")
    assert trained(scaler, place.device, how) == pytest.approx(expected, rel=1e-6)


class PerSample(torch.optim.Optimizer):
    """A step by the sum of clipped gradients of samples, as Opacus' optimizers take one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for each in params_of(self):
                samples = each.grad_sample
                for part in samples if isinstance(samples, list) else [samples]:
                    each -= part.clamp(-1, 1).sum(0)


@PLACES
@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_samples_are_divided_in_each_step_and_checked(
    place: Place, as_list: bool, dtype: torch.dtype
) -> None:
    scaler = started(GradScaler, place.device, backend=place.backend, init_scale=4.0)
    parameter: Any = nn.Parameter(torch.zeros(2, device=place.device, dtype=dtype))
    optimizer = PerSample([parameter])

    def give(*samples: list[float]) -> None:
        scaler.scale(torch.ones((), device=place.device))
        tensor = torch.tensor(samples, device=place.device, dtype=dtype) * scaler.get_scale()
        parameter.grad, parameter.grad_sample = tensor.sum(0).nan_to_num(), [tensor] if as_list else tensor

    for number in range(1, 4):
        give([0.5, 0.25], [0.5, 2.0])
        scaler.step(optimizer)
        scaler.update()
        assert parameter.tolist() == [-1.0 * number, -1.25 * number]
    give([0.5, 0.25], [torch.inf, 0.0])
    scaler.step(optimizer)
    assert scaler.was_skipped(optimizer)
    assert parameter.tolist() == [-3.0, -3.75]


def meeting(home: str, *gradients: str) -> Any:
    layouts = [SimpleNamespace(device=torch.device(each)) for each in gradients]
    return SimpleNamespace(
        scale=SimpleNamespace(device=torch.device(home)), plan=SimpleNamespace(layouts=layouts, is_new=False)
    )


@pytest.mark.parametrize(
    ("home", "gradients", "waits"),
    [("cuda", ["cpu"], True), ("cuda", ["cuda", "cpu"], True), ("cuda", ["cuda"], False), ("cpu", ["cpu"], False)],
)
def test_gradients_that_are_copied_from_the_scales_gpu_are_waited_for_in_each_check(
    home: str, gradients: list[str], waits: bool
) -> None:
    met = meeting(home, *gradients)
    with mock.patch.object(torch.cuda, "synchronize") as synchronize:
        derived.wait_for_copies(met)
    assert synchronize.call_count == met.plan.is_new == waits


def test_a_leaf_that_requires_grad_has_no_derivatives() -> None:
    leaf = torch.ones(2, requires_grad=True)
    derived._divide_derivatives(leaf, torch.tensor(0.5))
    (leaf * 2).sum().backward()
    assert isinstance(leaf.grad, Tensor)
    assert leaf.grad.tolist() == [2.0, 2.0]


def test_a_derivative_of_one_bf16_number_stays_one_and_subclasses_are_left_alone() -> None:
    leaf = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    grad = leaf * 1.0
    derived._divide_derivatives(grad, torch.tensor(0.5))
    (grad * 2).backward()
    assert leaf.grad == torch.tensor(1.0, dtype=torch.bfloat16)
    other = (torch.ones(2, requires_grad=True) * 1.0).as_subclass(Own)
    derived._divide_derivatives(other, torch.tensor(0.5))
    assert other._backward_hooks is None


class Own(Tensor):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("divided", ["nothing", "derivatives", "samples"])
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_what_was_divided_before_an_error_spends_the_step(divided: str) -> None:
    scaler, weight = started(GradScaler, "cpu", init_scale=4.0), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.pow(2).sum()).backward(create_graph=divided == "derivatives")
    if divided == "samples":
        weight.grad_sample = torch.ones(1, 2)  # type: ignore[attr-defined]
    with mock.patch.object(derived, "wait_for_copies", side_effect=MemoryError), pytest.raises(MemoryError):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert scaler.was_skipped(optimizer) is (divided != "nothing")
    weight.grad = None  # it is part of a cycle


@pytest.mark.parametrize("served", [False, True])
def test_gradients_of_samples_that_are_only_looked_at_are_not_divided_and_they_may_require_grad(
    served: bool, monkeypatch: Any
) -> None:
    if not served:  # as bf16 on a GPU
        monkeypatch.setattr(torch_ops, "serves", lambda *_: False)
        monkeypatch.setattr(torch_ops, "check", lambda *_: None)
    monkeypatch.setattr(passes, "kernels", None)  # must not be called
    scaler, weight = started(GradScaler, "cpu", init_scale=4.0, backend="torch"), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad, weight.grad_sample = torch.ones(2), torch.full((1, 2), 8.0, requires_grad=True)  # type: ignore[attr-defined]
    scaler._check_inf_per_device(optimizer)
    assert weight.grad_sample.tolist() == [[8.0, 8.0]]  # type: ignore[attr-defined]
    scaler.unscale_(optimizer)
    assert weight.grad_sample.tolist() == [[2.0, 2.0]]  # type: ignore[attr-defined]
