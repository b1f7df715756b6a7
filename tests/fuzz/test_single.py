"""Random programs on our GradScaler and on the specification: after every call both worlds are equal to the bit.

Each rule is one call that a user can make; results, errors and all that is left behind must be equal.
"""

import pickle
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import strategies as draw
import torch
import torch.distributed as dist
from fuzz_profile import Chunk, cases, settings_for
from helpers import params_of, sgd, started
from hypothesis import seed
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test
from specification import ShardedSpecification, Specification
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from worlds import COPIES, GradientSpec, TwoWorlds, World, half_of

from scaler_triton import GradScaler, ShardedGradScaler

pytestmark = pytest.mark.slow
WAYS = [  # backend, device, which class; how many programs by default, and which part of those asked for
    ("torch", "cpu", "grad", 250, 1.0),
    ("torch", "cpu", "sharded", 150, 0.5),
    ("triton", "cpu", "grad", 15, 0.02),
    ("triton", "cpu", "sharded", 8, 0.01),
    ("triton", "cuda", "grad", 30, 0.05),  # no falling back, which nothing would show
    ("triton", "cuda", "sharded", 20, 0.05),
]
GETTERS = ["is_enabled", "get_scale", "_get_growth_tracker"]
GETTERS += ["get_growth_factor", "get_backoff_factor", "get_growth_interval"]


def overriding(base: type, *names: str) -> type:
    """Return a subclass as frameworks have them, which overrides these methods and calls what it overrides."""

    def calling(name: str) -> Any:
        return lambda self, *args, **kwargs: getattr(super(made, self), name)(*args, **kwargs)

    made = type("_".join([base.__name__, *names]), (base,), {name: calling(name) for name in names})
    globals()[made.__name__] = made  # where pickle finds it
    return made


OVERRIDDEN = [("unscale_",), ("_check_inf_per_device",), ("unscale_", "_check_inf_per_device")]
SUBCLASSES = {base: [overriding(base, *each) for each in OVERRIDDEN] for base in (GradScaler, ShardedGradScaler)}


class Programs(TwoWorlds):
    ours_class: type = GradScaler
    theirs_class: type = Specification
    backend = "torch"
    device = "cpu"  # tensors are made on the default device, which must be this one
    half = torch.bfloat16

    @initialize(
        specs=st.lists(draw.optimizer_specs(), min_size=1, max_size=3),
        options=draw.constructions,
        started=draw.rarely.map(lambda not_yet: not not_yet),
        limits=st.none() | st.none() | draw.limits,
        overrides=st.just(0) | st.integers(0, 3),
    )
    def start(
        self, specs: list[Any], options: dict[str, Any], started: bool, limits: dict[str, Any] | None, overrides: int
    ) -> None:
        ours_class = [self.ours_class, *SUBCLASSES[self.ours_class]][overrides]
        ours = ours_class(device=self.device, **options, backend=self.backend, **(limits or {}))
        theirs = self.theirs_class(device=self.device, **options, limits=limits)
        self.ours = World(ours, [spec.build(self.half) for spec in specs])
        self.theirs = World(theirs, [spec.build(self.half) for spec in specs], buried=[])
        theirs.tells_sparse = self.backend == "torch"
        theirs.overrides_unscale = overrides > 0 and "unscale_" in OVERRIDDEN[overrides - 1]
        if started:
            self.loss()

    def loss(self) -> None:
        self.both(lambda world: world.scaler.scale(torch.ones(())))

    # Backward passes.

    @rule(index=draw.indices, gradients=draw.backwards)
    def backward(self, index: int, gradients: list[GradientSpec]) -> None:
        self.give(index, gradients)

    @rule(index=draw.indices, form=st.sampled_from(["uncoalesced", "piled"]), number=st.integers(0, 20))
    def backward_sparsely(self, index: int, form: str, number: int) -> None:
        self.backward(index, [GradientSpec(form, number)])

    @rule(index=draw.indices, to_none=st.booleans())
    def zero_grad(self, index: int, to_none: bool) -> None:
        self.at(index, lambda _, optimizer: optimizer.zero_grad(set_to_none=to_none))

    # A step, call by call and as a whole.

    @rule(
        value=st.sampled_from([1.0, 2.5, draw.INF]),
        dtype=draw.all_dtypes,
        form=st.sampled_from(["tensor", "list", "tuple", "generator", "number"]),
    )
    def scale(self, value: float, dtype: torch.dtype, form: str) -> None:
        def scaled(world: World) -> Any:
            loss = torch.tensor(value, dtype=dtype)
            losses = {"tensor": loss, "list": [loss, loss.reshape(1)], "tuple": (loss, [loss]), "number": 3}
            if form == "generator":
                return list(world.scaler.scale(iter([loss])))
            return world.scaler.scale(losses[form])

        self.both(scaled)

    @rule(index=draw.indices, wrapped=draw.rarely)
    def unscale(self, index: int, wrapped: bool = False) -> None:
        self.at(index, lambda world, optimizer: world.scaler.unscale_(optimizer), wrapped)

    @rule(index=draw.indices, closure=draw.rarely, wrapped=draw.rarely)
    def step(self, index: int, closure: bool = False, wrapped: bool = False) -> None:
        keywords = {"closure": None} if closure else {}
        self.at(index, lambda world, optimizer: world.scaler.step(optimizer, **keywords), wrapped)

    @rule(index=draw.indices, closure=st.sampled_from([None, float]))
    def step_by_position(self, index: int, closure: Any) -> None:
        self.at(index, lambda world, optimizer: world.scaler.step(optimizer, closure))

    @rule()
    def update(self) -> None:
        self.both(lambda world: world.scaler.update())

    @rule(gradients=draw.several_backwards, explicit=st.lists(st.booleans(), min_size=1, max_size=3))
    def train(self, gradients: list[list[GradientSpec]], explicit: list[bool]) -> None:
        self.loss()
        for index in range(len(self.ours.optimizers)):
            self.backward(index, gradients[index % len(gradients)])
            if explicit[index % len(explicit)]:
                self.unscale(index)
            self.step(index)
        self.update()

    @rule(spec=draw.clips)
    def clip(self, spec: Any) -> None:
        self.clip_by(spec)

    @rule(gradients=draw.several_backwards, spec=draw.clips)
    def train_clipped(self, gradients: list[list[GradientSpec]], spec: Any) -> None:
        self.loss()
        for index in range(len(self.ours.optimizers)):
            self.backward(index, gradients[index % len(gradients)])
        self.clip(spec)
        for index in range(len(self.ours.optimizers)):
            self.step(index)
        self.ask_skipped(0)
        self.update()

    @rule(index=draw.indices, gradients=draw.backwards, spec=draw.clips)
    def check_then_clip(self, index: int, gradients: list[GradientSpec], spec: Any) -> None:
        self.check(index)
        self.backward(index, gradients)
        self.clip(spec)

    train_clipped_again = train_clipped_on = train_clipped

    # The more often drawn, the deeper a program gets.
    train_again = train_on = train_further = train
    backward_again, step_again, update_again = backward, step, update

    # Steps out of turn, and flags as frameworks touch them.

    @rule(index=draw.indices, loss=st.booleans(), gradients=st.none() | draw.backwards, zero=st.none() | st.booleans())
    def step_that_fails(self, index: int, loss: bool, gradients: list[GradientSpec] | None, zero: bool | None) -> None:
        """The optimizer's own step raises at once; it is tried again, or another batch follows without an update."""

        def failing_step(world: World, optimizer: Any) -> None:
            with mock.patch.object(optimizer, "step", side_effect=OSError("out of order")):
                world.scaler.step(optimizer)

        self.at(index, failing_step)
        if zero is not None:
            self.zero_grad(index, to_none=zero)
        if loss:
            self.loss()
        if gradients is not None:
            self.backward(index, gradients)
        self.step(index)

    @rule(index=draw.indices, gradients=draw.backwards, spec=st.none() | draw.clips, then=draw.turns)
    def step_after_update(self, index: int, gradients: list[GradientSpec], spec: Any, then: tuple[bool, ...]) -> None:
        """Unscale or clip, but do not step before the update; perhaps another batch comes, before it or after it."""
        early, loss, anew, looks = then
        self.backward(index, gradients)
        self.unscale(index) if spec is None else self.clip(spec)
        if early:
            self.loss()
        self.update()
        if loss:
            self.loss()
        if anew:
            self.backward(index, gradients[::-1])
        if looks:
            self.check(index)
        self.step(index)

    @rule(indices=st.lists(draw.indices, min_size=2, max_size=3), gradients=draw.backwards, spec=st.none() | draw.clips)
    def update_after_each_step(self, indices: list[int], gradients: list[GradientSpec], spec: Any | None) -> None:
        """As Accelerate does with several optimizers."""
        self.loss()
        for index in indices:
            self.backward(index, gradients)
        if spec is None:
            for index in indices:
                self.unscale(index)
        else:
            self.clip(spec)
        for index in indices:
            self.step(index)
            self.update()

    @rule(index=draw.indices, wrapped=draw.rarely)
    def check(self, index: int, wrapped: bool = False) -> None:
        def flags(world: World, optimizer: Any) -> list[float]:
            return [flag.item() for flag in world.scaler._check_inf_per_device(optimizer).values()]

        self.at(index, flags, wrapped)

    @rule(index=draw.indices, gradients=draw.backwards)
    def check_before_and_after_backward(self, index: int, gradients: list[GradientSpec]) -> None:
        self.check(index)
        self.backward(index, gradients)
        self.check(index)

    @rule(index=draw.indices, value=st.sampled_from([1.0, 0.0]))
    def write_flags(self, index: int, value: float) -> None:
        def write(world: World, optimizer: Any) -> None:
            flags = world.scaler._found_inf_per_device(optimizer)
            stepped = world.scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED
            # After a fused step `was_skipped` reads them, if they are the very ones that it has read.
            if not (stepped and getattr(optimizer, "_step_supports_amp_scaling", False)):
                for flag in flags.values():
                    flag.fill_(value)

        self.at(index, write)

    @rule(index=draw.indices, value=st.sampled_from([1.0, 0.0]))
    def replace_flags(self, index: int, value: float) -> None:
        """Put tensors of one's own in the place of the flags of a step to be taken, if there are any."""

        def replace(world: World, optimizer: Any) -> None:
            state = world.scaler._per_optimizer_states[id(optimizer)]
            if state["stage"] is not OptState.STEPPED:
                flags = state["found_inf_per_device"]
                flags.update({device: torch.full((), value) for device in flags})

        self.at(index, replace)

    @rule(index=draw.indices, stage=st.sampled_from([OptState.READY, OptState.READY, OptState.STEPPED]))
    def write_stage(self, index: int, stage: OptState) -> None:
        """As SAM does, and optimizers that step within backward."""

        def write(world: World, optimizer: Any) -> None:
            state = world.scaler._per_optimizer_states[id(optimizer)]
            if state["found_inf_per_device"]:
                state["stage"] = stage

        self.at(index, write)

    @rule()
    def forget_steps(self) -> None:
        """Assign fresh states, which torch's class has from its first step on, as Composer does out of memory."""

        def forget(world: World) -> None:
            world.scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
            getattr(world.scaler, "_carried", {}).clear()

        self.both(forget)

    # The scale and its rules.

    @rule(value=draw.any_scales | st.integers(-1, 5))
    def update_to_number(self, value: float) -> None:
        self.both(lambda world: world.scaler.update(value))

    @rule(value=draw.any_scales, shape=st.sampled_from([(), (1,), (2,)]), options=draw.tensor_options)
    def update_to_tensor(self, value: float, shape: Any, options: dict[str, Any]) -> None:
        self.both(lambda world: world.scaler.update(torch.full(shape, value, **options)))

    @rule(value=draw.any_scales, shape=st.sampled_from([(), (1,)]))
    def assign_scale(self, value: float, shape: Any) -> None:
        self.both(lambda world: setattr(world.scaler, "_scale", torch.full(shape, value)))

    @precondition(lambda self: self.ours.scaler._get_scale_async() is not None)
    @rule(value=draw.any_scales)
    def fill_scale(self, value: float) -> None:
        self.both(lambda world: world.scaler._scale.fill_(value))

    @rule(pair=draw.settings)
    def set_one(self, pair: tuple[str, Any]) -> None:
        name, value = pair
        self.both(lambda world: getattr(world.scaler, f"set_{name}")(value))

    @rule(changes=draw.changes_of_limits)
    def set_limits(self, changes: dict[str, Any]) -> None:
        self.both(lambda world: world.scaler.set_limits(**changes))
        self.both(lambda world: tuple(world.scaler.limits))

    @rule(events=st.lists(st.booleans() | st.booleans() | draw.changes_of_limits, min_size=1, max_size=12))
    def set_while_training(self, events: list[Any]) -> None:
        """Step the first optimizer, as often as it takes for a limit of skips, which lags behind."""
        for event in events:
            if isinstance(event, dict):
                self.set_limits(event)
                continue
            self.backward(0, [GradientSpec("dense", plant=draw.INF if event else None)])
            self.step(0)
            self.update()

    set_while_training_again = set_while_training

    @rule()
    def lazy_init(self) -> None:
        self.both(lambda world: world.scaler._lazy_init_scale_growth_tracker(torch.device(self.device)))

    @rule()
    def ask(self) -> None:
        self.both(lambda world: [getattr(world.scaler, getter)() for getter in GETTERS])

    @rule(index=draw.indices, wrapped=draw.rarely)
    def ask_skipped(self, index: int, wrapped: bool = False) -> None:
        self.at(index, lambda world, optimizer: world.scaler.was_skipped(optimizer), wrapped)

    @rule()
    def ask_stats(self) -> None:
        self.both(lambda world: vars(world.scaler.stats()))

    @invariant()
    def a_report_says_what_was_seen(self) -> None:
        report = self.ours.scaler.overflow_report(self.ours.named_parameters())
        self.theirs.scaler.check_report(report, self.theirs.named_parameters())

    # Checkpoints and copies.

    @rule(state=draw.checkpoints())
    def load(self, state: dict[str, Any]) -> None:
        self.both(lambda world: world.scaler.load_state_dict(dict(state)))

    @rule(growth=draw.any_growth_factors)
    def exchange_checkpoints(self, growth: float) -> None:
        states = [world.scaler.state_dict() for world in (self.theirs, self.ours)]
        self.set_one(("growth_factor", growth))
        self.both(lambda world: world.scaler.load_state_dict(states[world is self.theirs]))

    @rule(how=st.sampled_from(list(COPIES)))
    def become_a_copy(self, how: str) -> None:
        def become(world: World) -> None:
            world.scaler = COPIES[how](world.scaler)

        states = self.theirs.scaler._per_optimizer_states.values()
        if not any(each["stage"] is OptState.READY and not each["found_inf_per_device"] for each in states):
            self.both(become)  # torch refuses where somebody only asked

    # Optimizers that change.

    @rule(index=draw.indices, spec=draw.parameter_specs)
    def add_param_group(self, index: int, spec: Any) -> None:
        def add(_: World, optimizer: Any) -> None:
            group = optimizer.param_groups[0]
            fused_momentum = bool(group["fused"] and group.get("momentum"))
            optimizer.add_param_group({"params": [spec.build(half_of(fused_momentum, self.half))]})

        self.at(index, add)

    @rule(index=draw.indices, spec=draw.optimizer_specs())
    def replace_optimizer(self, index: int, spec: Any) -> None:
        self.both(lambda world: world.replace(index % len(world.optimizers), lambda: spec.build(self.half)))

    @rule(index=draw.indices, whole=st.booleans())
    def rearrange_parameters(self, index: int, whole: bool) -> None:
        """Reverse the order of an optimizer's parameters; where they are not to stay whole the first one leaves."""

        def rearrange(_: World, optimizer: Any) -> None:
            first = optimizer.param_groups[0]["params"]
            if not whole and len(first) > 1:
                del first[0]
            first.reverse()
            optimizer.param_groups.reverse()

        self.at(index, rearrange)

    @rule(index=draw.indices, freeze=st.booleans())
    def freeze(self, index: int, freeze: bool) -> None:
        self.at(index, lambda _, optimizer: params_of(optimizer)[0].requires_grad_(not freeze))


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A default group that this process has for itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("backend", "device", "kind", "chunk"), cases(WAYS))
def test_programs(backend: str, device: str, kind: str, chunk: Chunk, request: pytest.FixtureRequest) -> None:
    options: dict[str, Any] = {"backend": backend, "device": device}
    if kind == "sharded":
        request.getfixturevalue("group_of_one")
        options |= {"ours_class": ShardedGradScaler, "theirs_class": ShardedSpecification, "half": torch.float16}
    machine = seed(chunk.seed)(type("Programs", (Programs,), options))
    with torch.device(device):
        run_state_machine_as_test(machine, settings=settings_for(chunk.programs, 25 if backend == "torch" else 20))


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, GradScaler])
def test_no_pickle_after_a_look_at_gradients_that_an_update_came_before(cls: type) -> None:
    """The programs found this."""
    scaler, optimizer = started(cls, "cpu"), sgd([torch.ones(3)])
    scaler.unscale_(optimizer)
    scaler.update()
    pickle.dumps(scaler)
    scaler._check_inf_per_device(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled at the beginning of an iteration"):
        pickle.dumps(scaler)
