"""Fused optimizers: what they are given for their step, and what of it is left afterwards."""

import functools
import gc
import inspect
import math
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import Wrapper, parameters, sgd, started, values
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.grad_scaler import OptState

from scaler_triton import GradScaler, ShardedGradScaler
from scaler_triton.core import fused, ranks

CPU = torch.device("cpu")
SCALE = 4.0
OLDER = pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")


def a_scaler(cls: Any = GradScaler, device: str = "cpu", **options: Any) -> Any:
    return started(cls, device, init_scale=SCALE, **options)


class Notes(torch.optim.SGD):
    """Notes what it is given, and does nothing."""

    _step_supports_amp_scaling = True
    grad_scale: Any  # as torch's

    def __init__(self, gradient: float = 8.0, **options: Any) -> None:
        super().__init__(parameters([torch.tensor([gradient])], "cpu"), lr=0.5, **options)

    def step(self, closure: Any = None) -> Any:
        self.given = self.grad_scale, self.found_inf
        self.numbers = [None if each is None else each.item() for each in self.given]
        return "result"


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("own", [None, 2.0])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("gradient", [8.0, math.nan])
def test_it_gets_the_scale_unless_it_was_used_and_the_flag(
    gradient: float, unscales: bool, own: float | None, shape: tuple[int, ...]
) -> None:
    scaler, optimizer = a_scaler(), Notes(gradient)
    scaler._scale = torch.full(shape, SCALE)
    if unscales:
        scaler.unscale_(optimizer)
    if own:
        optimizer.grad_scale = torch.tensor(own)
    assert scaler.step(optimizer) == "result"
    assert optimizer.numbers == [own if unscales else SCALE * (own or 1.0), float(gradient != 8.0)]
    assert all(each is None or (each.shape == () and each.dtype is torch.float32) for each in optimizer.given)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("hooked", [False, True])
def test_only_an_optimizer_that_does_not_write_them_gets_the_scalers_own_tensors(hooked: bool) -> None:
    scaler, optimizer = a_scaler(), sgd([torch.ones(1)], fused=True)
    if hooked:
        optimizer.register_step_pre_hook(lambda *_: None)
    assert fused._only_reads(optimizer) is not hooked
    made = Notes()  # no class of torch's
    scaler.step(made)
    for given in made.given:
        given.fill_(5.0)
    scaler.update()
    assert scaler.get_scale() == SCALE


@pytest.mark.parametrize("own", [None, 2.0])
def test_an_optimizer_that_takes_the_scale_but_not_the_flag_keeps_neither(own: float | None) -> None:
    """The scale would be taken for a factor of the user's by the next step, which would divide twice."""

    class Refuses(Notes):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "found_inf":
                raise TypeError("found_inf must be a bool")
            super().__setattr__(name, value)

    scaler, optimizer = a_scaler(), Refuses()
    if own:
        optimizer.grad_scale = torch.tensor(own)
    with pytest.raises(TypeError, match="found_inf must be a bool"):
        scaler.step(optimizer)
    assert getattr(optimizer, "grad_scale", None) == own
    scaler.step(optimizer)  # skips
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("own", [False, True])
def test_21_with_parameters_on_the_cpu_it_gets_copies_that_were_waited_for(own: bool) -> None:
    """torch's would copy both to the CPU itself, without waiting, and read at once."""
    optimizer: Any = sgd([torch.ones(2)], fused=True)
    with FakeTensorMode(allow_non_fake_inputs=True):  # a GPU's tensors without a GPU
        scale, found_inf = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
        for factor, on_host, want in ((scale, True, "cpu"), (scale, False, "cuda"), (None, True, "cpu")):
            seen = []
            if own:
                optimizer.grad_scale = torch.ones((), device="cuda")
            optimizer.step = lambda seen=seen: seen.extend([optimizer.grad_scale, optimizer.found_inf])
            fused._step_with_scale(optimizer, optimizer, factor, found_inf, on_host, (), {})
            assert [each.device.type for each in seen if each is not None] == [want] * (1 + (own or factor is not None))


# SGD's first step with momentum


def test_14_it_is_looked_at_only_until_momentum_is_there() -> None:
    optimizer = sgd([torch.ones(1)], fused=True, momentum=0.5)
    assert fused._skip_would_corrupt(optimizer)
    optimizer.step()
    assert not fused._skip_would_corrupt(optimizer)
    optimizer.add_param_group({"params": parameters([None], "cpu")})
    assert not fused._skip_would_corrupt(optimizer)


def test_14_a_first_step_that_is_skipped_makes_no_momentum() -> None:
    scaler, optimizer = a_scaler(), sgd([torch.full((1,), math.inf)], fused=True, momentum=0.5)
    scaler.step(optimizer)
    found = scaler._ours.steps.open(optimizer).outcome  # the flag, which tells of another rank's failure, too
    assert (optimizer.state, scaler.was_skipped(optimizer), found is True) == ({}, True, False)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}])
def test_14_an_sgd_of_ones_own_is_called(options: dict[str, float]) -> None:
    """Its kernel initialises its buffers."""
    optimizer = Notes(math.inf, **options)
    a_scaler().step(optimizer)
    assert optimizer.numbers == [SCALE, 1.0]


def test_a_wrapper_around_a_known_optimizer_has_its_claim() -> None:
    scaler, inner = a_scaler(), sgd([torch.ones(1)], fused=True)
    wrapper = Wrapper(inner)
    assert fused.way_of(scaler._ours.steps.open(wrapper), wrapper) == "attributes"


# The older kind


class Older(torch.optim.SGD):
    """Asks the scaler it is passed for the flag, or does not, or fails."""

    _step_supports_amp_scaling = True
    does = "asks"

    def __init__(self, gradient: float = 8.0) -> None:
        super().__init__(parameters([torch.tensor([gradient])], "cpu"), lr=0.5)

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        self.passed = grad_scaler
        if self.does == "fails":
            raise MemoryError
        return grad_scaler._check_inf_per_device(self) if self.does == "asks" else None


def test_it_is_passed_the_scaler_with_torchs_warning() -> None:
    scaler, optimizer = a_scaler(), Older()
    with pytest.warns(FutureWarning, match="^GradScaler is going to stop passing itself") as warned:
        assert [*scaler.step(optimizer)] == [CPU]
    assert warned[0].filename == __file__
    assert optimizer.passed is scaler


@OLDER
def test_whether_a_step_takes_the_scaler_is_asked_once_of_each_function() -> None:
    class Slots:
        """A callable that nothing can refer to weakly."""

        __slots__ = ()

        def __call__(self, *, grad_scaler: Any = None) -> Any:
            return grad_scaler

    scaler, optimizer = a_scaler(), Notes()
    with mock.patch("inspect.signature", wraps=inspect.signature) as asked:
        for _ in range(3):
            scaler.step(optimizer)
            scaler.update()
    assert asked.call_count == 1
    for function in (Slots(), functools.partial(Slots(), grad_scaler=None)):
        optimizer.step = function  # type: ignore[method-assign]
        assert scaler.step(optimizer) is scaler
        scaler.update(SCALE)


@OLDER
def test_a_container_without_parameters_steps_those_within_through_the_scaler() -> None:
    """Fault 3."""
    scaler, inner = a_scaler(), sgd([torch.full((1,), 8.0)])
    container: Any = SimpleNamespace(_step_supports_amp_scaling=True)
    container.step = lambda *, grad_scaler: grad_scaler.step(inner)
    scaler.step(container)
    scaler.update()
    assert values(inner) == [-1.0]


@OLDER
@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("does", ["asks", "nothing"])
@pytest.mark.parametrize("checked", [False, True])
def test_12_ranks_check_once_whether_it_asks_or_not(checked: bool, does: str) -> None:
    scaler, optimizer = a_scaler(ShardedGradScaler), Older()
    optimizer.does = does
    with mock.patch.object(ranks.Ranks, "reduce_") as reduced:
        if checked:
            scaler._check_inf_per_device(optimizer)
        scaler.step(optimizer)
    assert reduced.call_count == 1 + checked


@OLDER
@pytest.mark.parametrize("cls", [torch.amp.GradScaler, GradScaler])
def test_what_was_found_before_outlives_a_step_that_cannot_ask(cls: Any) -> None:
    scaler, optimizer = a_scaler(cls), Older(math.inf)
    scaler._check_inf_per_device(optimizer)
    optimizer.does = "fails"
    with pytest.raises(MemoryError):
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2


def slotted(step: Any) -> Any:  # without weak references to it
    return type("Slotted", (), {"__slots__": (), "__call__": lambda self: step()})()


@pytest.mark.parametrize("hold", [lambda step: lambda: step(), slotted])
def test_a_step_that_holds_its_optimizer_does_not_keep_it(hold: Any) -> None:
    scaler, optimizer = a_scaler(), sgd([torch.tensor([8.0])], fused=True)
    optimizer.step = hold(optimizer.step)
    scaler.step(optimizer)
    assert values(optimizer) == [-1.0]
    freed = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert freed() is None


def test_gradients_are_checked_anew_after_a_step_that_followed_an_update() -> None:
    scaler, optimizer = a_scaler(), sgd([torch.tensor([8.0])])
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.step(optimizer)
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY  # as some optimizers do
    for gradient, found in ((8.0, 0.0), (math.inf, 1.0)):
        optimizer.param_groups[0]["params"][0].grad = torch.tensor([gradient])
        assert [flag.item() for flag in scaler._check_inf_per_device(optimizer).values()] == [found]
