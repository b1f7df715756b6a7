"""What frameworks, hooks and public loops do to a scaler ends as with torch's class, to the bit.

Each row is a function that runs twice, with torch's class and with ours; what it takes down must be equal. Most begin
with `Run.started`: a scaler at scale 4 that has scaled a loss.
"""

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import PLACES, Place, Slotted, assert_same, params_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scaler_triton import GradScaler

BAD_STEPS = (False, True, False, False, True, False)


class Run:
    """One class of scaler at one place; takes down what a row notes."""

    def __init__(self, base: Any, place: Place) -> None:
        self.base, self.device = base, place.device
        self.options = {"backend": place.backend} if issubclass(base, GradScaler) else {}
        self.seen: list[Any] = []

    def scaler(self, cls: Any = None, init_scale: float = 8.0) -> Any:
        return (cls or self.base)(self.device, init_scale=init_scale, growth_interval=2, **self.options)

    def started(self, cls: Any = None) -> Any:
        scaler = self.scaler(cls, init_scale=4.0)
        scaler.scale(self.full(1.0, ()))
        return scaler

    def full(self, value: float, shape: Any = (2,), dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=self.device)

    def parameter(self, grad: float | None = None) -> Any:
        """Return a parameter of zeros whose gradient is `grad` everywhere."""
        made = nn.Parameter(self.full(0.0))
        made.grad = None if grad is None else self.full(grad)
        return made

    def parameters(self, count: int = 3, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
        made = [torch.linspace(-1, 1, 4 + i, dtype=dtype, device=self.device) for i in range(count)]
        return [nn.Parameter(values) for values in made]

    def sgd(self, grad: float | None = 8.0, **options: Any) -> Any:
        return torch.optim.SGD([self.parameter(grad)], lr=0.5, **options)

    def note(self, *things: Any) -> None:
        self.seen += [each.detach().clone() if isinstance(each, Tensor) else each for each in things]

    def error(self, call: Callable[[], Any]) -> None:
        with pytest.raises(Exception) as raised:  # noqa: PT011
            call()
        self.note(type(raised.value), str(raised.value).splitlines()[0])

    def look(self, scaler: Any, parameters: Sequence[Tensor]) -> None:
        self.note(*parameters, *(p.grad for p in parameters if p.grad is not None))
        self.note(scaler.get_scale(), scaler._get_growth_tracker())

    def finish(self, scaler: Any, optimizer: Any) -> None:
        """End a step, and look at what it left."""
        scaler.step(optimizer)
        scaler.update()
        self.look(scaler, params_of(optimizer))
        if hasattr(optimizer, "zero_grad"):
            optimizer.zero_grad()


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.125, momentum=0.5)


def loss(parameters: Sequence[Tensor], bad: bool = False) -> Tensor:
    total = torch.stack([p.float().square().sum() for p in parameters]).sum()
    return total * math.inf if bad else total


class Table:
    """Functions that `add` collects, one row for each, or for each variant of its last argument."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def __call__(self, *variants: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
        def add(function: Callable[..., None]) -> Callable[..., None]:
            for variant in variants:
                parts = variant if isinstance(variant, tuple) else (variant,)
                names = [function.__name__, *(getattr(part, "__name__", str(part)) for part in parts)]
                self.rows.append(pytest.param(partial(function, variant=variant), id="-".join(names)))
            if not variants:
                self.rows.append(pytest.param(function, id=function.__name__))
            return function

        return add


row = Table()


def assert_ends_as_with_torch(snippet: Callable[[Run], None], place: Place) -> None:
    theirs, ours = Run(torch.amp.GradScaler, place), Run(GradScaler, place)
    for run in (theirs, ours):
        torch.manual_seed(0)
        snippet(run)
    assert len(ours.seen) == len(theirs.seen) > 0
    for mine, other in zip(ours.seen, theirs.seen, strict=True):
        if isinstance(other, Tensor):
            assert_same(mine, other)
        else:
            assert mine == other or (mine != mine and other != other)


# Loops of public training code.


@row()
def a_subclass_with_an_update_of_its_own(run: Run) -> None:
    """Hysteresis, as where a model is split: torch's `update` copied, with a condition in its middle."""

    class Patient(run.base):  # type: ignore[misc, name-defined]
        spared = 1

        def update(self, new_scale: Any = None) -> None:
            scale, tracker = self._check_scale_growth_tracker("update")
            states = self._per_optimizer_states.values()
            found_inf = sum(flag for state in states for flag in state["found_inf_per_device"].values())
            if found_inf and self.spared:
                self.spared -= 1
            else:
                torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, 2)
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    parameters = run.parameters()
    optimizer, scaler = sgd(parameters), run.scaler(Patient)
    for bad in BAD_STEPS:
        scaler.scale(loss(parameters, bad)).backward()
        run.finish(scaler, optimizer)


@row()
def fp16_allowed_in_one_group(run: Run) -> None:
    """Each is unscaled by itself, as if it were an optimizer's, and the flags are stored for the whole."""
    parameters, halves = run.parameters(2), run.parameters(2, torch.float16)
    optimizer, scaler = sgd([{"params": parameters}, {"params": halves}]), run.scaler()
    for bad in BAD_STEPS:
        scaler.scale(loss(parameters) + loss(halves, bad)).backward()
        inverse, found_inf = scaler._scale.double().reciprocal().float(), torch.zeros_like(scaler._scale)
        flag = torch.zeros_like(scaler._scale)
        for part, allow_fp16 in ((parameters, False), (halves, True)):
            holder = SimpleNamespace(param_groups=[{"params": part}])
            flag += scaler._unscale_grads_(holder, inverse, found_inf, allow_fp16)[flag.device]
        state = scaler._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"], state["stage"] = {flag.device: flag}, OptState.UNSCALED
        run.finish(scaler, optimizer)


@row()
def an_optimizer_that_unscales_itself(run: Run) -> None:
    """Adaptive clipping within the step, which older optimizers are passed the scaler for."""

    class Adaptive(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:  # type: ignore[override]
            state = grad_scaler._per_optimizer_states[id(self)]
            assert state["stage"] is OptState.READY
            grad_scaler.unscale_(self)
            nn.utils.clip_grad_value_(parameters, 0.5)
            if not sum(flag.item() for flag in state["found_inf_per_device"].values()):
                super().step()

    parameters = run.parameters()
    optimizer, scaler = Adaptive(parameters, lr=0.125), run.scaler()
    for bad in BAD_STEPS:
        scaler.scale(loss(parameters, bad)).backward()
        with pytest.warns(FutureWarning, match="stop passing itself"):
            run.finish(scaler, optimizer)


@row()
def a_step_that_was_taken_elsewhere(run: Run) -> None:
    """Overlapped with backward, say: the scaler is given only its flag."""
    parameters = run.parameters()
    optimizer, scaler = sgd(parameters), run.scaler()
    for bad in BAD_STEPS:
        scaler.scale(loss(parameters, bad)).backward()
        flag = run.full(0.0, ())
        torch._amp_foreach_non_finite_check_and_unscale_(
            [p.grad for p in parameters if p.grad is not None], flag, 1 / scaler._get_scale_async()
        )
        if not flag:
            optimizer.step()
        state = scaler._per_optimizer_states[id(optimizer)]
        state["stage"], state["found_inf_per_device"] = OptState.STEPPED, {flag.device: flag}
        scaler.update()
        run.look(scaler, parameters)
        optimizer.zero_grad()


@row("by hand", "on the object", "fused, by hand")
def steps_whose_flags_are_of_ones_own(run: Run, variant: str) -> None:
    """Every second one, by torch's private methods; or all of them, by a method that an object got."""
    parameters = run.parameters()
    optimizer, scaler = torch.optim.SGD(parameters, lr=0.125, fused=variant == "fused, by hand"), run.scaler()
    if variant == "on the object":

        def decide(optimizer: Any, state: Any, *args: Any) -> Any:
            state["found_inf_per_device"] = {torch.device(run.device): run.full(float(number % 2), ())}
            return run.base._maybe_opt_step(scaler, optimizer, state, *args)

        scaler._maybe_opt_step = decide
    for number, bad in enumerate(BAD_STEPS):
        scaler.scale(loss(parameters, bad and variant != "on the object")).backward()
        if number % 2 and variant != "on the object":
            state, inverse = scaler._per_optimizer_states[id(optimizer)], scaler._scale.double().reciprocal().float()
            state["found_inf_per_device"] = scaler._unscale_grads_(optimizer, inverse, run.full(0.0, ()), False)
            scaler._maybe_opt_step(optimizer, state)
        else:
            scaler.step(optimizer)
        scaler.update()
        run.look(scaler, parameters)
        optimizer.zero_grad()


class Stage(Enum):
    """A copy of torch's, of which a library compares its own members."""

    READY = 0
    UNSCALED = 1
    STEPPED = 2


@row("its own methods", "torch's step")
def states_of_a_librarys_own(run: Run, variant: str) -> None:
    """Its mapping makes them, with a field of its own; `update` assigns the next mapping."""

    def new_state() -> dict[str, Any]:
        return {"stage": Stage.READY, "found_inf_per_device": {}, "calls": 0}

    class Own(run.base):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._per_optimizer_states = defaultdict(new_state)

        def unscale_(self, optimizer: Any) -> None:
            state = self._per_optimizer_states[id(optimizer)]
            if state["stage"] is not Stage.READY:
                raise RuntimeError(f"unscale_ at {state['stage']}")
            inverse, found_inf = self._scale.double().reciprocal().float(), torch.zeros_like(self._scale)
            state["found_inf_per_device"] = self._unscale_grads_(optimizer, inverse, found_inf, False)
            state["stage"], state["calls"] = Stage.UNSCALED, state["calls"] + 1

        def update(self, new_scale: Any = None) -> None:
            scale, tracker = self._check_scale_growth_tracker("update")
            states = self._per_optimizer_states.values()
            found_inf = sum(flag for state in states for flag in state["found_inf_per_device"].values())
            torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, 2)
            self._per_optimizer_states = defaultdict(new_state)

    def step(self: Any, optimizer: Any, *args: Any) -> Any:
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is Stage.READY:
            self.unscale_(optimizer)
        result = self._maybe_opt_step(optimizer, state, *args)
        state["stage"] = Stage.STEPPED
        return result

    if variant == "its own methods":
        Own.step = step
    parameters = run.parameters()
    optimizer, scaler = sgd(parameters), run.scaler(Own)
    for number, bad in enumerate(BAD_STEPS):
        scaler.scale(loss(parameters, bad)).backward()
        if number % 2 or variant == "torch's step":  # which does not know READY when it sees it
            scaler.unscale_(optimizer)
            run.error(lambda: scaler.unscale_(optimizer))
        run.note(scaler._per_optimizer_states[id(optimizer)]["calls"])
        run.finish(scaler, optimizer)
    run.error(lambda: run.base.step(scaler, optimizer))  # without a check


@row("in unscale_", "before unscale_", "by hand", "by hand, fused", "by hand, then a look")
def a_stage_that_torch_does_not_have(run: Run, variant: str) -> None:
    """What it stands for only its writer knows: torch's `step` does not unscale."""

    class Halved(run.base):  # type: ignore[misc, name-defined]
        def unscale_(self, optimizer: Any) -> None:
            super().unscale_(optimizer)
            self._per_optimizer_states[id(optimizer)]["stage"] = "halved"

    parameters = run.parameters()
    optimizer, scaler = torch.optim.SGD(parameters, lr=0.125, fused="fused" in variant), run.scaler(Halved)
    for bad in BAD_STEPS:
        scaler.scale(loss(parameters, bad)).backward()
        if "unscale_" in variant:
            if variant == "before unscale_":
                scaler._per_optimizer_states[id(optimizer)]["stage"] = "halved"
            scaler.unscale_(optimizer)
        else:
            state = scaler._per_optimizer_states[id(optimizer)]
            for parameter in parameters:
                parameter.grad /= scaler.get_scale()
            if "look" in variant:
                state["stage"] = "halved"
                scaler._check_inf_per_device(optimizer)
            else:
                flag = torch.stack([p.grad.isfinite().all() for p in parameters]).all().logical_not().float()
                state.update(stage="halved", found_inf_per_device={flag.device: flag})
        run.finish(scaler, optimizer)
        run.note(*scaler._per_optimizer_states[id(optimizer)].keys())


@row(0.0, 1.0)
def a_step_tried_again_with_a_flag_of_ones_own(run: Run, variant: float) -> None:
    optimizer, scaler = run.sgd(None), run.started()
    run.error(lambda: scaler.step(optimizer))  # without gradients there is no flag
    flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    flags[torch.device(run.device)] = run.full(variant, (1,))
    run.finish(scaler, optimizer)
    run.note(*scaler._found_inf_per_device(optimizer).values())  # none: the step is over


# Flags and states that others read and write.


@row()
def a_flag_that_is_passed_is_not_written(run: Run) -> None:
    """One for several optimizers, say, each with its own result; and no step begins."""
    scaler = run.started()
    inverse, flag = run.full(0.25, ()), run.full(0.0, ())
    for value in (math.inf, 4.0):
        optimizer = run.sgd(value)
        found = scaler._unscale_grads_(optimizer, inverse, flag, False)
        run.note(*found.values(), *(p.grad for p in params_of(optimizer)))
    run.note(flag, len(scaler._per_optimizer_states))
    copy.deepcopy(scaler)  # torch refuses within a step


@row(False, True)
def a_subclass_is_asked_as_often_and_in_the_same_order(run: Run, variant: bool) -> None:
    def overriding(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            run.note(name)
            return getattr(run.base, name)(self, *args, **kwargs)

        return method

    names = [name for name, value in vars(torch.amp.GradScaler).items() if callable(value) and name[:2] != "__"]
    names.remove("_check_scale_growth_tracker")  # difference 22
    scaler = run.scaler(type("Overriding", (run.base,), {name: overriding(name) for name in names}))
    parameters = run.parameters(1)
    optimizer = torch.optim.AdamW(parameters, fused=variant)
    for _ in range(2):
        scaler.scale(loss(parameters)).backward()
        scaler.step(optimizer)
        scaler.update()


# What is set on an optimizer that takes scale and flag.


def averaging(optimizer: Any, *args: Any) -> None:
    optimizer.grad_scale *= 4


def dropping(optimizer: Any, *args: Any) -> None:
    optimizer.found_inf.fill_(1.0)


@row(*itertools.product((averaging, dropping), ("pre", "post", "global")))
def a_hook_writes_into_scale_or_flag(run: Run, variant: Any) -> None:
    hook, way = variant
    optimizer = run.sgd(fused=True)
    register = getattr(optimizer, f"register_step_{way}_hook", register_optimizer_step_pre_hook)
    handle, scaler = register(hook), run.scaler()
    try:
        for _ in range(3):
            scaler.scale(params_of(optimizer)[0].sum()).backward()
            run.finish(scaler, optimizer)
    finally:
        handle.remove()


# What is left as in torch: an error, a run on fake tensors.


@row("growth_factor", "backoff_factor")
def a_factor_of_1(run: Run, variant: str) -> None:
    """Difference 2 is about other values."""
    run.error(lambda: run.base("cpu", **{variant: 1.0}))


@row(False, True)
def a_fused_run_on_fake_tensors(run: Run, variant: bool) -> None:
    """As tools do that measure a run's memory without running it: nothing may be read."""
    with FakeTensorMode():
        optimizer, scaler = run.sgd(fused=True), run.started()
        for _ in range(2):
            if variant:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    run.note("ran")


# Wrappers and containers.


def by_its_flags(scaler: Any, wrapper: Slotted) -> None:
    scaler.unscale_(wrapper)
    state = scaler._per_optimizer_states[id(wrapper)]
    scaler._maybe_opt_step(wrapper, state)
    state["stage"] = OptState.STEPPED


def by_torchs_step(scaler: Any, wrapper: Slotted) -> None:
    """As a subclass does that has copied it, or a profiler that wraps what it found."""
    torch.amp.GradScaler.step(scaler, wrapper)


@row(*itertools.product((by_its_flags, by_torchs_step), (1.0, math.inf)))
def a_wrappers_state_under_its_own_id(run: Run, variant: Any) -> None:
    step, bad = variant
    (parameter,) = run.parameters(1)
    wrapper, scaler = Slotted(torch.optim.SGD([parameter], lr=0.5)), run.scaler()
    for factor in (bad, 1.0):
        parameter.grad = None
        scaler.scale(parameter.sum() * factor).backward()
        step(scaler, wrapper)
        run.note(scaler._per_optimizer_states[id(wrapper)]["stage"])
        scaler.update()
        run.look(scaler, [parameter])


class Container:
    """Several optimizers stepped as one, without weak references to itself; its groups can only be iterated over."""

    __slots__ = ("optimizers",)

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> Any:
        return itertools.chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


@row(8.0, math.inf)
def a_container_of_optimizers_steps_as_one(run: Run, variant: float) -> None:
    run.finish(run.started(), Container([run.sgd(), run.sgd(variant)]))


@row(8.0, math.inf)
def a_fused_optimizer_in_a_wrapper_with_slots(run: Run, variant: float) -> None:
    optimizer, scaler = run.sgd(variant, fused=True), run.started()
    run.finish(scaler, Slotted(optimizer))
    run.note(hasattr(optimizer, "grad_scale"), hasattr(optimizer, "found_inf"))


@row()
def a_subclass_that_puts_its_state_back_by_itself(run: Run) -> None:
    class Restoring(run.base):  # type: ignore[misc, name-defined]
        def __setstate__(self, state: dict[str, Any]) -> None:
            vars(self).update(state)

    scaler = copy.deepcopy(run.started(Restoring))
    scaler.scale(run.full(1.0, ()))
    for value in (1.0, math.inf):
        run.finish(scaler, run.sgd(value))


@PLACES
@pytest.mark.parametrize("snippet", row.rows)
def test_ends_as_with_torch(snippet: Callable[[Run], None], place: Place) -> None:
    assert_ends_as_with_torch(snippet, place)
