"""Random programs on our GradScaler and on the specification: after every call both worlds are equal to the bit."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("hypothesis")

import torch
import torch.distributed as dist
from beyond_torch import FullShardedSpecification, FullSpecification
from fuzz_profile import Chunk, chunks, settings_for
from hypothesis import note, seed
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from specification import FP32_MAX, SMALLEST, Refused, departures
from worlds import (
    DTYPES,
    OPTIMIZERS,
    SHAPES,
    VARIANTS,
    BucketSpec,
    ClipSpec,
    GradientSpec,
    OptimizerSpec,
    ParameterSpec,
    World,
    Wrapper,
    assert_equal,
    assert_same_worlds,
    first_line,
    half_of,
    outcome,
)

from scaler_triton import GradScaler, ShardedGradScaler

pytestmark = pytest.mark.slow
interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None, reason="the CPU has Triton's interpreter without a GPU"
)

INF, NAN = float("inf"), float("nan")
SHAPE = (0, 1)  # which shape an assigned scale has: () or (1,)

# Mostly what training meets; what ends a step early stays rare, so that programs get far.
FORM_NAMES = ["dense", "accumulate", "accumulate-inplace", "keep", "none"] * 2
FORM_NAMES += ["transposed", "channels-last", "gaps", "offset"] * 2 + ["sparse", "uncoalesced", "piled", "expanded"]
PLANTS = [None] * 12 + [INF, -INF, NAN]
GOOD_SCALES = [1.0, 3.0, 2.0**16, 0.1, 1e-3, 2.0**100, 2.0**127, 2.0**-120, FP32_MAX, SMALLEST]
BAD_SCALES = [0.0, -1.0, INF, NAN, 1e-46]

scales = st.sampled_from(GOOD_SCALES)
any_scales = st.sampled_from(GOOD_SCALES * 2 + BAD_SCALES)
growth_factors = st.sampled_from([2.0, 1.0, 1.1, 4.0, 1e30])
any_growth_factors = growth_factors | st.sampled_from([0.5, INF, NAN, -1.0])
backoff_factors = st.sampled_from([0.5, 1.0, 0.3, 1e-30])
any_backoff_factors = backoff_factors | st.sampled_from([0.0, 1.5, NAN, -1.0])
intervals = st.integers(1, 4)
trackers = st.integers(0, 6)
indices = st.integers(0, 2)
dtypes = st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16])
all_dtypes = st.sampled_from(DTYPES)
rarely = st.integers(0, 15).map(lambda number: number == 15)

parameter_specs = st.builds(ParameterSpec, st.sampled_from(SHAPES), dtypes, rarely.map(lambda frozen: not frozen))


@st.composite
def optimizer_specs(draw: Any) -> OptimizerSpec:
    parameters = draw(st.lists(parameter_specs, min_size=1, max_size=4))
    if draw(st.integers(0, 7)) == 7:  # the scaler refuses its gradients, but for a fused optimizer
        parameters.append(ParameterSpec(draw(st.sampled_from(SHAPES)), torch.float16))
    name, variant = draw(st.sampled_from(list(OPTIMIZERS))), draw(st.sampled_from(list(VARIANTS)))
    return OptimizerSpec(name, variant, tuple(parameters))


gradient_specs = st.builds(
    GradientSpec,
    st.sampled_from(FORM_NAMES),
    st.integers(0, 20),
    st.sampled_from([1.0, 1e3, 1e-6, 1e30]),
    st.sampled_from(PLANTS),
)
backwards = st.lists(gradient_specs, min_size=1, max_size=6)
buckets = st.builds(BucketSpec, st.integers(0, 20), st.sampled_from([0, 0, 1]), st.booleans(), st.sampled_from(PLANTS))
state_dicts = st.fixed_dictionaries(
    {
        "scale": scales,
        "growth_factor": growth_factors,
        "backoff_factor": backoff_factors,
        "growth_interval": intervals,
        "_growth_tracker": trackers,
    }
)
defects = st.sampled_from(
    [
        ("scale", 0.0),
        ("scale", INF),
        ("growth_factor", 0.5),
        ("backoff_factor", 1.5),
        ("growth_interval", 0),
        ("_growth_tracker", -1),
        *((name, None) for name in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")),
    ]
)
clips = st.builds(
    ClipSpec,
    st.lists(indices, min_size=1, max_size=3).map(tuple),
    st.sampled_from([1.0, 1e-3, 0.0, 1e3, 1e30, INF]),
    st.sampled_from([2.0] * 6 + [2, INF, "inf", 1.0, 3, 0.5]),
    rarely,
    st.none() | st.none() | st.frozensets(st.integers(0, 5)),
    st.integers(0, 3).map(lambda number: number == 3),
    rarely,
)
limits = st.fixed_dictionaries(
    {
        "min_scale": st.sampled_from([SMALLEST, 2.0**-10, 4.0]),
        "max_scale": st.sampled_from([FP32_MAX, 2.0**20, 4.0]),
        "hysteresis": st.integers(1, 3),
        "consecutive_hysteresis": st.booleans(),
    }
)


def new_scale_tensor(value: float, size: int, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    """Return an argument for `update`, legal or not."""
    shape = () if size == 0 else (size,)
    return torch.full(shape, value, dtype=dtype, requires_grad=requires_grad)


class Programs(RuleBasedStateMachine):
    """Each rule is one call that a user can make, made in both worlds."""

    ours_class: type = GradScaler
    theirs_class: type = FullSpecification
    backend = "torch"
    half = torch.bfloat16

    @initialize(
        specs=st.lists(optimizer_specs(), min_size=1, max_size=3),
        scale=scales,
        growth=st.sampled_from([2.0, 1.1, 4.0]),
        backoff=st.sampled_from([0.5, 0.3]),
        interval=intervals,
        enabled=rarely.map(lambda disabled: not disabled),
        started=rarely.map(lambda not_yet: not not_yet),
        check_unscaled=rarely,
        limits=st.none() | st.none() | limits,
    )
    def start(
        self,
        specs: list[Any],
        scale: float,
        growth: float,
        backoff: float,
        interval: int,
        enabled: bool,
        started: bool,
        check_unscaled: bool,
        limits: dict[str, Any] | None,
    ) -> None:
        options = {"device": "cpu", "init_scale": scale, "growth_factor": growth, "backoff_factor": backoff}
        options |= {"growth_interval": interval, "enabled": enabled}
        options["check_unscaled"] = check_unscaled
        ours = self.ours_class(**options, backend=self.backend, **(limits or {}))
        theirs = self.theirs_class(**options, limits=limits)
        self.ours = World(ours, [spec.build(self.half) for spec in specs])
        self.theirs = World(theirs, [spec.build(self.half) for spec in specs], buried=[])
        theirs.tells_sparse = self.backend == "torch"
        if started:
            self.both(lambda world: world.scaler.scale(torch.ones(())))

    def both(self, call: Callable[[World], Any]) -> None:
        """Make a call in both worlds; results, errors and all that is left behind must be equal."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours, theirs = outcome(call, self.ours), outcome(call, self.theirs)
        self.compare(ours, theirs)
        assert_same_worlds(self.ours, self.theirs)

    def compare(self, ours: Any, theirs: Any) -> None:
        if isinstance(theirs, Refused):
            assert theirs.is_met_by(ours), (ours, theirs)
        elif isinstance(theirs, BaseException):
            note(f"raises {theirs!r}")
            assert type(ours) is type(theirs), (ours, theirs)
            assert first_line(ours) == first_line(theirs)
        else:
            assert_equal(ours, theirs, "result")

    def at(self, index: int, call: Callable[[World, Any], Any], wrapped: bool = False) -> None:
        """Make a call about one optimizer in both worlds."""

        def on_one(world: World) -> Any:
            optimizer = world.optimizers[index % len(world.optimizers)]
            return call(world, Wrapper(optimizer) if wrapped else optimizer)

        self.both(on_one)

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

    # Flags as frameworks touch them.

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

    @precondition(lambda self: self.ours.scaler._scale is not None)
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

    @rule()
    def lazy_init(self) -> None:
        self.both(lambda world: world.scaler._lazy_init_scale_growth_tracker(torch.device("cpu")))

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


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named_parameters(world: World) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{i}.{j}", p) for i, optimizer in enumerate(world.optimizers) for j, p in enumerate(parameters_of(optimizer))
    ]


def give(optimizer: torch.optim.Optimizer, gradients: list[GradientSpec]) -> None:
    for position, parameter in enumerate(parameters_of(optimizer)):
        gradients[position % len(gradients)].give(parameter)


def extend(optimizer: torch.optim.Optimizer, spec: ParameterSpec, half: torch.dtype) -> None:
    group = optimizer.param_groups[0]
    fused_momentum = bool(group["fused"] and group.get("momentum"))
    optimizer.add_param_group({"params": [spec.build(half_of(fused_momentum, half))]})


def rearrange(optimizer: torch.optim.Optimizer, whole: bool) -> None:
    """Reverse the order of an optimizer's parameters; where they are not to stay whole the first one leaves."""
    first = optimizer.param_groups[0]["params"]
    if not whole and len(first) > 1:
        del first[0]
    first.reverse()
    optimizer.param_groups.reverse()


def scaled(scaler: Any, loss: torch.Tensor, form: str) -> Any:
    losses = {
        "tensor": loss,
        "list": [loss, loss.reshape(1)],
        "tuple": (loss, [loss]),
        "generator": (each for each in [loss]),
        "number": 3,
    }
    result = scaler.scale(losses[form])
    return list(result) if form == "generator" else result


def numbers(found: dict[Any, torch.Tensor]) -> list[float]:
    return [flag.item() for flag in found.values()]


def fill(tensors: dict[Any, torch.Tensor], value: float) -> None:
    for tensor in tensors.values():
        tensor.fill_(value)


def assign(scaler: Any, value: float, size: int) -> None:
    scaler._scale = torch.full((1,) if size else (), value)


def asked(scaler: Any) -> list[Any]:
    getters = (scaler.get_growth_factor, scaler.get_backoff_factor, scaler.get_growth_interval)
    return [scaler.is_enabled(), scaler.get_scale(), scaler._get_growth_tracker(), *(getter() for getter in getters)]


def replace_scaler(world: World, how: str) -> None:
    copies = {"pickle": lambda s: pickle.loads(pickle.dumps(s)), "deepcopy": copy.deepcopy, "copy": copy.copy}
    world.scaler = copies[how](world.scaler)


class ShardedPrograms(Programs):
    """The same with ShardedGradScaler, in a group of one rank."""

    ours_class = ShardedGradScaler
    theirs_class = FullShardedSpecification
    half = torch.float16


class InterpretedPrograms(Programs):
    """The same through the kernels, under Triton's interpreter."""

    backend = "triton"


class InterpretedShardedPrograms(ShardedPrograms):
    """Both at once."""

    backend = "triton"


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A default group that this process has for itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(machine: type[Programs], chunk: Chunk, steps: int) -> None:
    """Run a chunk of programs; the differences from torch they met are printed with `-s`."""
    departures.clear()
    fresh = seed(chunk.seed)(type(machine.__name__, (machine,), {}))
    run_state_machine_as_test(fresh, settings=settings_for(chunk.programs, steps))
    print(f"{chunk}: departures from torch by number {dict(departures)}")


@pytest.mark.parametrize("chunk", chunks(in_ci=250), ids=str)
def test_programs_on_torch_ops(chunk: Chunk) -> None:
    run(Programs, chunk, steps=25)


@pytest.mark.parametrize("chunk", chunks(in_ci=150, share=0.5), ids=str)
def test_sharded_programs_on_torch_ops(chunk: Chunk, group_of_one: None) -> None:
    run(ShardedPrograms, chunk, steps=25)


@interpreted
@pytest.mark.parametrize("chunk", chunks(in_ci=15, share=0.02), ids=str)
def test_programs_through_the_interpreter(chunk: Chunk) -> None:
    run(InterpretedPrograms, chunk, steps=20)


@interpreted
@pytest.mark.parametrize("chunk", chunks(in_ci=8, share=0.01), ids=str)
def test_sharded_programs_through_the_interpreter(chunk: Chunk, group_of_one: None) -> None:
    run(InterpretedShardedPrograms, chunk, steps=20)
