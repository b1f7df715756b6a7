"""A random program on one process: each rule is one call, made in both worlds, which must stay equal."""

from __future__ import annotations

import gc
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from optimizer_contents import parameters_of
from setter_rules import limits_of, set_to, settings_of_ours
from single_calls import (
    asked,
    assign,
    extend,
    failing_step,
    fill,
    give,
    named_parameters,
    new_scale_tensor,
    numbers,
    rearrange,
    replace_scaler,
    scaled,
)
from single_strategies import (
    INF,
    SHAPE,
    all_dtypes,
    any_backoff_factors,
    any_growth_factors,
    any_scales,
    backwards,
    buckets,
    clips,
    defects,
    indices,
    optimizer_specs,
    parameter_specs,
    rarely,
    state_dicts,
)
from two_worlds import TwoWorlds
from worlds import (
    BucketSpec,
    ClipSpec,
    GradientSpec,
    OptimizerSpec,
    ParameterSpec,
    World,
)


class Programs(TwoWorlds):
    """Each rule is one call that a user can make, made in both worlds."""

    # Backward passes.

    @rule(index=indices, gradients=backwards)
    def backward(self, index: int, gradients: list[GradientSpec]) -> None:
        self.at(index, lambda _, optimizer: give(optimizer, gradients))

    @rule(index=indices, form=st.sampled_from(["uncoalesced", "piled"]), number=st.integers(0, 20))
    def backward_sparsely(self, index: int, form: str, number: int) -> None:
        self.backward(index, [GradientSpec(form, number)])

    @rule(index=indices, bucket=buckets)
    def backward_into_bucket(self, index: int, bucket: BucketSpec) -> None:
        self.at(index, lambda _, optimizer: bucket.give(parameters_of(optimizer)))

    @rule(index=indices, to_none=st.booleans())
    def zero_grad(self, index: int, to_none: bool) -> None:
        self.at(index, lambda _, optimizer: optimizer.zero_grad(set_to_none=to_none))

    # A step, call by call and as a whole.

    @rule(
        value=st.sampled_from([1.0, 2.5, INF]),
        dtype=all_dtypes,
        form=st.sampled_from(["tensor", "list", "tuple", "generator", "number"]),
    )
    def scale(self, value: float, dtype: torch.dtype, form: str) -> None:
        self.both(lambda world: scaled(world.scaler, torch.tensor(value, dtype=dtype), form))

    @rule(index=indices, wrapped=rarely)
    def unscale(self, index: int, wrapped: bool = False) -> None:
        self.at(index, lambda world, optimizer: world.scaler.unscale_(optimizer), wrapped)

    @rule(index=indices, arguments=rarely, closure=rarely, wrapped=rarely)
    def step(self, index: int, arguments: bool = False, closure: bool = False, wrapped: bool = False) -> None:
        positional, keywords = ((float,) if arguments else ()), ({"closure": None} if closure else {})
        self.at(index, lambda world, optimizer: world.scaler.step(optimizer, *positional, **keywords), wrapped)

    @rule(index=indices)
    def step_without_closure(self, index: int) -> None:
        self.at(index, lambda world, optimizer: world.scaler.step(optimizer, None))

    @rule()
    def update(self) -> None:
        self.both(lambda world: world.scaler.update())

    @rule(
        gradients=st.lists(backwards, min_size=1, max_size=3), explicit=st.lists(st.booleans(), min_size=1, max_size=3)
    )
    def train(self, gradients: list[list[GradientSpec]], explicit: list[bool]) -> None:
        self.both(lambda world: world.scaler.scale(torch.ones(())))
        for index in range(len(self.ours.optimizers)):
            self.backward(index, gradients[index % len(gradients)])
            if explicit[index % len(explicit)]:
                self.unscale(index)
            self.step(index)
        self.update()

    @rule(spec=clips)
    def clip(self, spec: ClipSpec) -> None:
        measured: list[torch.Tensor] = []

        def call(world: World) -> torch.Tensor:
            if world is self.theirs:
                return spec.clip(world, measured=measured)
            measured.append(spec.clip(world))
            return measured[0]

        self.both(call)

    @rule(gradients=st.lists(backwards, min_size=1, max_size=3), spec=clips)
    def train_clipped(self, gradients: list[list[GradientSpec]], spec: ClipSpec) -> None:
        self.both(lambda world: world.scaler.scale(torch.ones(())))
        for index in range(len(self.ours.optimizers)):
            self.backward(index, gradients[index % len(gradients)])
        self.clip(spec)
        for index in range(len(self.ours.optimizers)):
            self.step(index)
        self.ask_skipped(0)
        self.update()

    @rule(index=indices, gradients=backwards, spec=clips)
    def check_then_clip(self, index: int, gradients: list[GradientSpec], spec: ClipSpec) -> None:
        self.check(index, False)
        self.backward(index, gradients)
        self.clip(spec)

    @rule(index=indices, spec=clips, new=optimizer_specs())
    def clip_then_replace(self, index: int, spec: ClipSpec, new: OptimizerSpec) -> None:
        self.clip(spec)
        self.replace_optimizer(index, new)
        self.update()

    train_clipped_again = train_clipped_on = train_clipped

    # The more often drawn, the deeper a program gets.
    train_again = train_on = train_further = train
    backward_again, step_again, update_again = backward, step, update

    # Steps out of turn, and flags as frameworks touch them.

    @rule(index=indices, loss=st.booleans(), gradients=st.none() | backwards, zeroed=st.none() | st.booleans())
    def step_that_fails(
        self, index: int, loss: bool, gradients: list[GradientSpec] | None, zeroed: bool | None
    ) -> None:
        """And is tried again, or another batch follows without an update."""
        self.at(index, failing_step)
        if zeroed is not None:
            self.zero_grad(index, to_none=zeroed)
        if loss:
            self.scale(1.0, torch.float32, "tensor")
        if gradients is not None:
            self.backward(index, gradients)
        self.step(index)

    @rule(index=indices, gradients=backwards, anew=rarely)
    def step_after_update(self, index: int, gradients: list[GradientSpec], anew: bool) -> None:
        self.at(index, lambda world, optimizer: give(optimizer, gradients))
        self.unscale(index)
        self.update()
        if anew:
            self.backward(index, gradients)
        self.step(index)

    @rule(index=indices, wrapped=rarely)
    def check(self, index: int, wrapped: bool) -> None:
        self.at(index, lambda world, optimizer: numbers(world.scaler._check_inf_per_device(optimizer)), wrapped)

    @rule(index=indices, gradients=backwards)
    def check_before_and_after_backward(self, index: int, gradients: list[GradientSpec]) -> None:
        self.check(index, False)
        self.backward(index, gradients)
        self.check(index, False)

    @rule(index=indices, value=st.sampled_from([1.0, 0.0]))
    def write_flags(self, index: int, value: float) -> None:
        self.at(index, lambda world, optimizer: fill(world.scaler._found_inf_per_device(optimizer), value))

    # The scale and its rules.

    @rule(value=any_scales)
    def update_to_number(self, value: float) -> None:
        self.both(lambda world: world.scaler.update(value))

    @rule(value=st.integers(-1, 5))
    def update_to_int(self, value: int) -> None:
        self.both(lambda world: world.scaler.update(value))

    @rule(
        value=any_scales,
        size=st.sampled_from([0, 1, 2]),
        dtype=st.sampled_from([torch.float32, torch.float64]),
        requires_grad=st.booleans(),
    )
    def update_to_tensor(self, value: float, size: int, dtype: torch.dtype, requires_grad: bool) -> None:
        self.both(lambda world: world.scaler.update(new_scale_tensor(value, size, dtype, requires_grad)))

    @rule(value=any_scales, size=st.sampled_from(SHAPE))
    def assign_scale(self, value: float, size: int) -> None:
        self.both(lambda world: assign(world.scaler, value, size))

    @precondition(lambda self: self.ours.scaler._get_scale_async() is not None)
    @rule(value=any_scales)
    def fill_scale(self, value: float) -> None:
        self.both(lambda world: fill({"": world.scaler._scale}, value))

    @rule(value=any_growth_factors)
    def set_growth_factor(self, value: float) -> None:
        self.both(lambda world: world.scaler.set_growth_factor(value))

    @rule(value=any_backoff_factors)
    def set_backoff_factor(self, value: float) -> None:
        self.both(lambda world: world.scaler.set_backoff_factor(value))

    @rule(value=st.integers(-1, 5))
    def set_growth_interval(self, value: int) -> None:
        self.both(lambda world: world.scaler.set_growth_interval(value))

    @rule(settings=st.lists(settings_of_ours, min_size=1, max_size=4))
    def set_our_own(self, settings: list[tuple[str, Any]]) -> None:
        for name, value in settings:
            self.both(lambda world, name=name, value=value: set_to(world.scaler, name, value))
            self.ask_limits()

    @rule(overflows=st.lists(st.booleans(), min_size=1, max_size=8), settings=st.lists(settings_of_ours, max_size=4))
    def set_while_training(self, overflows: list[bool], settings: list[tuple[str, Any]]) -> None:
        half = len(overflows) // 2
        self.set_our_own(settings[::2])
        self.train_one(overflows[:half])
        self.set_our_own(settings[1::2])
        self.train_one(overflows[half:])

    def train_one(self, overflows: list[bool]) -> None:
        """Step the first optimizer, as often as it takes for a limit of skips, which lags behind."""
        for overflow in overflows:
            self.backward(0, [GradientSpec("dense", plant=INF if overflow else None)])
            self.step(0)
            self.update()

    set_while_training_again = set_while_training

    @rule()
    def ask_limits(self) -> None:
        self.both(lambda world: limits_of(world.scaler))

    @rule()
    def lazy_init(self) -> None:
        self.both(lambda world: world.scaler._lazy_init_scale_growth_tracker(torch.device(self.device)))

    @rule()
    def ask(self) -> None:
        self.both(lambda world: asked(world.scaler))

    @rule(index=indices, wrapped=rarely)
    def ask_skipped(self, index: int, wrapped: bool = False) -> None:
        self.at(index, lambda world, optimizer: world.scaler.was_skipped(optimizer), wrapped)

    @rule()
    def ask_stats(self) -> None:
        self.both(lambda world: vars(world.scaler.stats()))

    @invariant()
    def a_report_says_what_was_seen(self) -> None:
        report = self.ours.scaler.overflow_report(named_parameters(self.ours))
        self.theirs.scaler.check_report(report, named_parameters(self.theirs))

    # Checkpoints and copies.

    @rule(state=state_dicts)
    def load(self, state: dict[str, Any]) -> None:
        self.both(lambda world: world.scaler.load_state_dict(state))

    @rule(state=state_dicts, defect=defects)
    def load_defective(self, state: dict[str, Any], defect: tuple[str, Any]) -> None:
        name, value = defect
        rest = {key: item for key, item in state.items() if key != name}
        self.both(lambda world: world.scaler.load_state_dict(rest if value is None else {**state, name: value}))

    @rule()
    def load_empty(self) -> None:
        self.both(lambda world: world.scaler.load_state_dict({}))

    @rule(growth=any_growth_factors)
    def exchange_checkpoints(self, growth: float) -> None:
        states = [world.scaler.state_dict() for world in (self.theirs, self.ours)]
        self.both(lambda world: world.scaler.set_growth_factor(growth))
        self.both(lambda world: world.scaler.load_state_dict(states[world is self.theirs]))

    @rule(how=st.sampled_from(["pickle", "deepcopy", "copy"]))
    def become_a_copy(self, how: str) -> None:
        self.both(lambda world: replace_scaler(world, how))

    # Optimizers that change.

    @rule(index=indices, spec=parameter_specs)
    def add_param_group(self, index: int, spec: ParameterSpec) -> None:
        self.at(index, lambda _, optimizer: extend(optimizer, spec, self.half))

    @rule(index=indices, spec=optimizer_specs())
    def replace_optimizer(self, index: int, spec: OptimizerSpec) -> None:
        self.both(lambda world: world.replace(index % len(world.optimizers), lambda: spec.build(self.half)))
        if any("deferred" in state for state in self.ours.scaler._per_optimizer_states.values()):
            gc.collect()  # an error that was raised may hold the old one

    @rule(index=indices, whole=st.booleans())
    def rearrange_parameters(self, index: int, whole: bool) -> None:
        self.at(index, lambda _, optimizer: rearrange(optimizer, whole))

    @rule(index=indices, freeze=st.booleans())
    def freeze(self, index: int, freeze: bool) -> None:
        self.at(index, lambda _, optimizer: parameters_of(optimizer)[0].requires_grad_(not freeze))
