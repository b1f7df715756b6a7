"""Two optimizers with the same parameters, wrappers of every kind, fp16 state, torchft's replicas."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import Container, grads, params_of, sgd, started, take_step, values

from scaler_triton import GradScaler, ScalerWarning, StepGuard

SHARED = r"\[ST01\] The gradients of 1 parameter of this Container were unscaled through a SGD already, and would be "


class Outer:
    """A wrapper that keeps the optimizer in an attribute of any name."""

    def __init__(self, name: str, inner: Any) -> None:
        self.name = name
        setattr(self, name, inner)

    @property
    def param_groups(self) -> Any:
        return getattr(self, self.name).param_groups

    def step(self) -> Any:
        return getattr(self, self.name).step()


@pytest.mark.parametrize("order", ["inner first", "outer first"])
@pytest.mark.parametrize("name", ["base", "optim", "_optimizer", "original_optimizer", "anything"])
def test_what_is_unscaled_by_the_inner_optimizer_is_stepped_by_its_wrapper(name: str, order: str) -> None:
    scaler, inner = started(GradScaler, "cpu", init_scale=4.0), sgd([torch.full((1,), 8.0)])
    unscaled, stepped = (inner, Outer(name, inner)) if order == "inner first" else (Outer(name, inner), inner)
    for batch in range(3):
        scaler.scale(torch.ones(()))
        params_of(inner)[0].grad.fill_(8.0)
        scaler.unscale_(unscaled)
        assert grads(inner) == [2.0]
        scaler.step(stepped)
        scaler.update()
        assert values(inner) == [-1.0 - batch]
        assert not scaler.was_skipped(unscaled)
        assert not scaler.was_skipped(stepped)


@pytest.mark.parametrize("method", ["step", "unscale_", "clip_grad_norm_"])
def test_a_container_of_what_is_unscaled_raises_before_a_write_in_any_round(method: str) -> None:
    scaler, inner = started(GradScaler, "cpu", init_scale=4.0), sgd([torch.full((1,), 8.0)])
    container = Container([inner, sgd([torch.full((1,), 8.0)])])
    arguments = [1.0] if method == "clip_grad_norm_" else []
    for _ in range(3):
        take_step(scaler, container, "step")  # it is known, and so are its gradients
    for _ in range(2):
        scaler.scale(torch.ones(()))
        for each in params_of(container):
            each.grad.fill_(8.0)
        scaler.unscale_(inner)
        before = values(inner)
        for _ in range(2):  # a second try meets the same
            with pytest.raises(RuntimeError, match=SHARED):
                getattr(scaler, method)(container, *arguments)
        assert [each.grad.item() for each in params_of(container)] == [2.0, 8.0]
        assert values(inner) == before
        scaler.update()
        scaler.scale(torch.ones(()))
        take_step(scaler, container, "step")


def test_shared_parameters_with_a_loss_of_their_own_for_each_optimizer_are_no_error() -> None:
    scaler, first = started(GradScaler, "cpu", init_scale=4.0), sgd([torch.full((1,), 8.0)])
    second = torch.optim.Adam(params_of(first))
    for _ in range(3):
        for optimizer in (first, second):
            scaler.scale(torch.ones(()))
            params_of(first)[0].grad.fill_(8.0)
            scaler.unscale_(optimizer)
            assert grads(first) == [2.0]
            scaler.step(optimizer)
        scaler.update(4.0)


def test_what_was_unscaled_for_an_earlier_loss_does_not_count() -> None:
    scaler, first = started(GradScaler, "cpu", init_scale=4.0), sgd([torch.full((1,), 8.0)])
    second = torch.optim.SGD(params_of(first), lr=0.5)
    scaler.unscale_(first)
    scaler.scale(torch.ones(()))
    params_of(first)[0].grad.fill_(8.0)
    scaler.unscale_(second)
    assert grads(first) == [2.0]


def test_one_that_shares_parameters_may_be_unknown_or_freed_and_unscaled_gradients_may_be_looked_at() -> None:
    scaler, first = started(GradScaler, "cpu", init_scale=4.0), sgd([torch.full((1,), 8.0)])
    (parameter,), second = params_of(first), sgd([torch.full((1,), 8.0)])
    second.param_groups[0]["params"] = [parameter]
    scaler._ours.steps.open(second)  # has no plan yet
    scaler.unscale_(first)
    assert grads(first) == [2.0]
    assert [flag.item() for flag in scaler._check_inf_per_device(second).values()] == [0.0]
    scaler.step(first)
    del first
    scaler.update()
    scaler.scale(torch.ones(()))
    parameter.grad.fill_(8.0)
    scaler._check_inf_per_device(second)
    states = scaler._per_optimizer_states
    states[0] = states.pop(id(second))  # where nobody drops it
    del second
    scaler.unscale_(torch.optim.SGD([parameter]))
    assert parameter.grad.item() == 2.0


def test_a_guard_divides_nothing_and_refuses_nothing() -> None:
    guard, inner = started(StepGuard, "cpu"), sgd([torch.full((1,), 8.0)])
    guard.unscale_(inner)
    guard.step(Container([inner]))
    assert values(inner) == [-4.0]


class Forwards:
    """A wrapper that forwards what it lacks to an optimizer which nobody finds."""

    def __init__(self, inner: Any) -> None:
        self.param_groups, self._kept = inner.param_groups, [inner]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kept[0], name)

    def step(self) -> Any:
        return self._kept[0].step()


@pytest.mark.parametrize("cls", [GradScaler, StepGuard])
def test_a_claim_to_be_fused_that_is_forwarded_from_a_hidden_optimizer_is_not_believed(cls: Any) -> None:
    scaler, inner = started(cls, "cpu", **({"init_scale": 4.0} if cls is GradScaler else {})), None
    inner = sgd([torch.full((1,), 8.0)], fused=True)
    outer = Forwards(inner)
    assert outer._step_supports_amp_scaling
    scaler.step(outer)
    assert values(inner) == [-1.0 if cls is GradScaler else -4.0]
    scaler.update()
    scaler.scale(torch.ones(()))
    params_of(inner)[0].grad.fill_(torch.inf)
    scaler.step(outer)
    assert scaler.was_skipped(outer)
    assert values(inner) == [-1.0 if cls is GradScaler else -4.0]


def fp16(cls: Any, **options: Any) -> Any:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    parameter.grad = torch.ones_like(parameter)
    return cls([parameter], **options)


@pytest.mark.parametrize(
    ("optimizer", "what"),
    [
        (lambda: fp16(torch.optim.AdamW), "eps=1e-08 is 0"),
        (lambda: fp16(torch.optim.RMSprop), "eps=1e-08 is 0"),
        (lambda: fp16(torch.optim.Adam, eps=1e-4, fused=True), "the squares of gradients below 2.4e-4 are 0"),
        (lambda: fp16(torch.optim.AdamW, eps=2.0**-25), "eps=2.98023e-08 is 0"),
        (lambda: fp16(torch.optim.AdamW, eps=1e-4), None),
        (lambda: fp16(torch.optim.SGD), None),
        (lambda: fp16(torch.optim.Adafactor), None),
        (lambda: fp16(type("Adam", (torch.optim.Adam,), {"__module__": "elsewhere"})), None),
    ],
)
def test_state_in_fp16_is_warned_of_once(optimizer: Any, what: str | None) -> None:
    scaler, given = started(GradScaler, "cpu", allow_fp16_grads=True), optimizer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            params_of(given)[0].grad = torch.full((2,), 0.01, dtype=torch.float16)
            take_step(scaler, given, "step")
    texts = [str(each.message) for each in caught if each.category is ScalerWarning and "ST06" not in str(each.message)]
    assert len(texts) == (what is not None)
    for text in texts:
        assert text.startswith(
            f"[ST03] {type(given).__name__} keeps the averages of 1 fp16 parameter in fp16: there {what}."
        )


@pytest.mark.filterwarnings("error")
def test_averages_in_fp32_and_frozen_parameters_in_fp16_are_nothing_to_warn_of() -> None:
    frozen, weight = (torch.nn.Parameter(torch.ones(2, dtype=each)) for each in (torch.float16, torch.float32))
    scaler, optimizer = started(GradScaler, "cpu"), torch.optim.AdamW([frozen, weight])
    weight.grad = torch.ones(2)
    take_step(scaler, optimizer, "step")


class Manager:
    """What torchft's manager shows."""

    def __init__(self) -> None:
        self._user_state_dicts: dict[str, Any] = {}

    def should_commit(self) -> bool:
        return True


def outer_of(manager: Any) -> Any:
    inner = sgd([torch.ones(1)])
    return SimpleNamespace(manager=manager, optim=inner, param_groups=inner.param_groups, step=inner.step)


def test_a_replica_whose_manager_does_not_know_the_scaler_is_warned_of_once() -> None:
    scaler, optimizer = started(GradScaler, "cpu"), outer_of(Manager())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            take_step(scaler, optimizer, "step")
    (text,) = (str(each.message) for each in caught if each.category is ScalerWarning)
    assert text.startswith("[ST04] torchft's manager does not know this scaler")
    assert 'manager.register_state_dict_fn("scaler", scaler.load_state_dict, scaler.state_dict)' in text
    assert caught[0].filename.endswith("helpers.py")  # the line that steps


def test_another_scaler_that_is_saved_is_not_this_one_and_another_kind_of_manager_needs_none() -> None:
    scaler, manager = started(GradScaler, "cpu"), Manager()
    manager._user_state_dicts = {"default": GradScaler("cpu").state_dict}
    with pytest.warns(ScalerWarning, match="ST04"):
        take_step(scaler, outer_of(manager), "step")
    take_step(started(GradScaler, "cpu"), outer_of(SimpleNamespace()), "step")


SCALER_OF_A_SCRIPT: Any = None


def test_a_manager_that_saves_the_scaler_in_whatever_way_is_not_warned_of() -> None:
    global SCALER_OF_A_SCRIPT
    scaler = SCALER_OF_A_SCRIPT = started(GradScaler, "cpu")

    class Trainer:
        def __init__(self) -> None:
            self.scaler = scaler

        def save(self) -> Any:
            return {"scaler": self.scaler.state_dict()}

    def by_global() -> Any:
        return SCALER_OF_A_SCRIPT.state_dict()

    for save in (scaler.state_dict, lambda: {"scaler": scaler.state_dict()}, Trainer().save, by_global):
        manager = Manager()
        manager._user_state_dicts = {"other": dict, "default": save}
        take_step(scaler, outer_of(manager), "step")
        scaler.scale(torch.ones(()))
    SCALER_OF_A_SCRIPT = None
