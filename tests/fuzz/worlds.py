"""A scaler with its optimizers, twice: what programs are made of, built in two worlds, which must stay equal."""

import copy
import itertools
import pickle
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from helpers import Wrapper, bits, params_of
from hypothesis import note
from hypothesis.errors import UnsatisfiedAssumption
from hypothesis.stateful import RuleBasedStateMachine
from specification import Refused
from torch import Tensor

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.5}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "adagrad": (torch.optim.Adagrad, {}),
}
VARIANTS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
SHAPES = [(3,), (), (0,), (1,), (4, 5), (7, 1), (2, 3, 2, 2)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class ParameterSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True

    def build(self, half: torch.dtype) -> torch.nn.Parameter:
        """Return the parameter, all ones; `half` stands in for bf16, and for fp16 too if it is fp32."""
        replaced = self.dtype is torch.bfloat16 or (self.dtype is torch.float16 and half is torch.float32)
        dtype = half if replaced else self.dtype
        return torch.nn.Parameter(torch.ones(self.shape, dtype=dtype), requires_grad=self.requires_grad)


def half_of(fused_momentum: bool, half: torch.dtype) -> torch.dtype:
    """Return the dtype that stands in for bf16.

    torch 2.13's fused SGD on the CPU reads memory that is not its own for bf16 and fp16 momentum: two calls with equal
    arguments differ.
    """
    return torch.float32 if fused_momentum else half


class OptimizerSpec(NamedTuple):
    name: str
    variant: str
    parameters: tuple[ParameterSpec, ...]

    def build(self, half: torch.dtype) -> torch.optim.Optimizer:
        cls, options = OPTIMIZERS[self.name]
        half = half_of(self.name == "momentum" and self.variant == "fused", half)
        return cls([spec.build(half) for spec in self.parameters], lr=0.125, **options, **VARIANTS[self.variant])


class GradientSpec(NamedTuple):
    """What a backward pass leaves in one parameter's `.grad`."""

    form: str
    seed: int = 0
    magnitude: float = 1.0
    plant: float | None = None  # this value somewhere

    def give(self, parameter: Tensor) -> None:
        old, made = parameter.grad, self.build(parameter)
        if self.form == "keep" and old is not None:
            return
        if self.form == "accumulate-inplace" and old is not None:
            parameter.grad += made
            return
        parameter.grad = None
        if self.form == "accumulate" and old is not None:
            parameter.grad = made + old if old.is_sparse else old + made
        elif self.form != "none":
            parameter.grad = made

    def build(self, parameter: Tensor) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(self.seed)
        values = torch.randn(parameter.shape, generator=generator, device="cpu") * self.magnitude
        values = values.to(torch.get_default_device(), parameter.dtype)
        if self.plant is not None and values.numel():
            values.view(-1)[self.seed % values.numel()] = self.plant
        dims, make = FORMS.get(self.form, (0, torch.clone))
        return make(values) if values.dim() >= dims else values


def _copied(values: Tensor, stride: Sequence[int], offset: int, size: int) -> Tensor:
    made = torch.full((size,), 7.0, dtype=values.dtype).as_strided(values.shape, stride, offset)
    return made.copy_(values)


def _expanded(values: Tensor) -> Tensor:
    # As large as if it were dense: torch's fused kernels read on, and must read the same in both worlds.
    memory = torch.full((values.numel() + 1,), 7.0, dtype=values.dtype)
    return memory.as_strided(values.shape, (0, *values.stride()[1:]))


def _with_rows(values: Tensor, row: Callable[[Tensor], Tensor]) -> Tensor:
    rows = row(torch.arange(len(values)))
    return torch.sparse_coo_tensor(rows[None], values, values.shape, check_invariants=False)


# Each from a number of dims on.
FORMS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "transposed": (2, lambda values: values.mT.contiguous().mT),
    "channels-last": (4, lambda values: values.contiguous(memory_format=torch.channels_last)),
    "gaps": (0, lambda values: _copied(values, [2 * s for s in values.stride()], 1, 2 * values.numel() + 2)),
    "offset": (0, lambda values: _copied(values, values.stride(), 3, values.numel() + 5)),
    "expanded": (1, _expanded),
    "sparse": (2, lambda values: values.to_sparse(1)),
    "uncoalesced": (2, lambda values: _with_rows(values, lambda row: row // 3)),  # up to three values a row
    "piled": (2, lambda values: _with_rows(values, lambda row: row * 0)),
}


@dataclass
class World:
    scaler: Any
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    buried: list[torch.optim.Optimizer] | None = None  # replaced optimizers, where their ids must not come back

    def replace(self, index: int, new: Callable[[], torch.optim.Optimizer]) -> None:
        if self.buried is not None:  # difference 11
            self.buried.append(self.optimizers[index])
        del self.optimizers[index]
        self.optimizers.insert(index, new())

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        pairs = enumerate(self.optimizers)
        return [(f"{i}.{j}", p) for i, optimizer in pairs for j, p in enumerate(params_of(optimizer))]


class ClipSpec(NamedTuple):
    """A call of `clip_grad_norm_`."""

    indices: tuple[int, ...]  # of the optimizers, in this order
    max_norm: float
    norm_type: Any = 2.0
    error_if_nonfinite: bool = False
    subset: frozenset[int] | None = None  # positions among their parameters; None: `parameters=` is not given
    wrapped: bool = False

    def clip(self, world: World, **options: Any) -> Tensor:
        chosen = [world.optimizers[i] for i in dict.fromkeys(i % len(world.optimizers) for i in self.indices)]
        if self.subset is not None:
            parameters = [parameter for optimizer in chosen for parameter in params_of(optimizer)]
            options["parameters"] = [p for i, p in enumerate(parameters) if i in self.subset]
        passed = [Wrapper(each) for each in chosen] if self.wrapped else chosen
        return world.scaler.clip_grad_norm_(passed, self.max_norm, self.norm_type, self.error_if_nonfinite, **options)


def assert_equal(ours: Any, theirs: Any, what: str) -> None:
    """Assert that two results are the same: types, numbers, and tensors to the bit of their whole memory."""
    assert type(ours) is type(theirs), (what, ours, theirs)
    if isinstance(ours, Tensor):
        _assert_same_tensor(ours.detach(), theirs.detach(), what)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), what
        assert_equal(list(ours.values()), list(theirs.values()), what)
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), what
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(mine, other, f"{what}[{index}]")
    else:
        assert ours == theirs or (ours != ours and theirs != theirs), (what, ours, theirs)


def _assert_same_tensor(ours: Tensor, theirs: Tensor, what: str) -> None:
    looks = [(t.dtype, t.shape, t.layout) for t in (ours, theirs)]
    assert looks[0] == looks[1], (what, *looks)
    if ours.layout is not torch.strided:
        assert ours.is_coalesced() == theirs.is_coalesced(), what
        # Copies: coalescing leaves memory that it never wrote behind its result.
        _assert_same_tensor(ours._indices().clone(), theirs._indices().clone(), f"{what}.indices")
        _assert_same_tensor(ours._values().clone(), theirs._values().clone(), f"{what}.values")
        return
    assert ours.stride() == theirs.stride(), (what, ours.stride(), theirs.stride())
    mine, other = _memory(ours), _memory(theirs)
    same = torch.equal(mine.view(torch.uint8), other.view(torch.uint8)) or torch.equal(bits(mine), bits(other))
    assert same, f"{what}\nours   {ours.tolist()}\ntheirs {theirs.tolist()}"


def _memory(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor: what lies between its elements must stay as it is."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def assert_same_worlds(ours: World, theirs: World) -> None:
    for name in ("_scale", "_growth_tracker", "_growth_factor", "_backoff_factor", "_growth_interval", "_enabled"):
        assert_equal(getattr(ours.scaler, name, None), getattr(theirs.scaler, name, None), name)
    assert_equal(ours.scaler.state_dict(), theirs.scaler.state_dict(), "state_dict")
    for index, pair in enumerate(zip(ours.optimizers, theirs.optimizers, strict=True)):
        views = [_view(world.scaler, optimizer) for world, optimizer in zip((ours, theirs), pair, strict=True)]
        assert_equal(*views, f"optimizers[{index}]")


def _view(scaler: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what can be seen of an optimizer, and of what a scaler knows of it."""
    ours = getattr(scaler, "_ours", None)  # torch's name for the states would tell ours that other code may write them
    known = getattr(scaler, "_per_optimizer_states", {}) if ours is None else ours.steps
    state = known.get(id(optimizer), {})
    owner = getattr(state, "owner", None)
    if owner is not None and owner() is not optimizer:
        state = {}  # of a dead optimizer at the same id, until the new one is used
    return {
        "stage": state["stage"].name if state else "READY",
        "flags": [flag.item() for flag in state["found_inf_per_device"].values()] if state else [],
        "set on it": [name for name in ("grad_scale", "found_inf") if hasattr(optimizer, name)],
        "parameters": [(p, p.grad, dict(optimizer.state.get(p, {}))) for p in params_of(optimizer)],
    }


def outcome(call: Callable[[World], Any], world: World) -> Any:
    try:
        return call(world)
    except UnsatisfiedAssumption:
        raise
    except Exception as error:
        return error


def first_line(error: BaseException) -> str:
    """Return an exception's text without C++ stack traces, and without the name of the model's class."""
    return re.sub(r"^'\w+' object has", "the object has", next(iter(str(error).splitlines()), ""))


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


class TwoWorlds(RuleBasedStateMachine):
    """Makes calls in both worlds."""

    ours: World
    theirs: World

    def both(self, call: Callable[[World], Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours, theirs = outcome(call, self.ours), outcome(call, self.theirs)
        if isinstance(theirs, Refused):
            assert theirs.is_met_by(ours), (ours, theirs)
        elif isinstance(theirs, BaseException):
            note(f"raises {theirs!r}")
            assert type(ours) is type(theirs), (ours, theirs)
            assert first_line(ours) == first_line(theirs)
        else:
            assert_equal(ours, theirs, "result")
        self.compare()

    def compare(self) -> None:
        assert_same_worlds(self.ours, self.theirs)

    def at(self, index: int, call: Callable[[World, Any], Any], wrapped: bool = False) -> None:
        def on_one(world: World) -> Any:
            optimizer = world.optimizers[index % len(world.optimizers)]
            return call(world, Wrapper(optimizer) if wrapped else optimizer)

        self.both(on_one)

    def give(self, index: int, gradients: list[GradientSpec]) -> None:
        def give(_: World, optimizer: Any) -> None:
            for gradient, parameter in zip(itertools.cycle(gradients), params_of(optimizer), strict=False):
                gradient.give(parameter)

        self.at(index, give)

    def clip_by(self, spec: ClipSpec) -> None:
        """Clip; the specification takes the last bits of the norm from ours."""
        measured: list[torch.Tensor] = []

        def call(world: World) -> torch.Tensor:
            if world is self.theirs:
                return spec.clip(world, measured=measured)
            measured.append(spec.clip(world))
            return measured[0]

        self.both(call)
