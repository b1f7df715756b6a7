"""Accelerate: what the one line changes and refuses; ranks train, clip, skip, accumulate and resume with our scaler."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jobs
import pytest
import torch
import torch.distributed as dist
from jobs import BAD_STEPS, FUSED, SCALES, SKIPPED, STEPS
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer as Original
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, GradScalerKwargs

from scaler_triton import GradScaler, ShardedGradScaler
from scaler_triton.integrations import accelerate as integration
from scaler_triton.integrations.accelerate import _AcceleratedOptimizer, use_scaler_triton

pytestmark = pytest.mark.usefixtures("first_accelerator")

INF, DECAY = float("inf"), 0.9375  # of the learning rate, in each step of the scheduler
PLAIN_AND_FUSED = pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])


def forget() -> None:
    """Let the next Accelerator of this process be its first."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def shard(version: int, *, flat: bool = False, whole: bool = False) -> None:
    """Do what Accelerate does for an `fsdp_plugin=` on GPUs only: on a CPU it passes over it."""
    kind = "FULL_STATE_DICT" if whole else "SHARDED_STATE_DICT"
    options = {"use_orig_params": not flat, "state_dict_type": kind} if version == 1 else {}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, cpu_ram_efficient_loading=False, **options)
    plugin.set_mixed_precision("fp16")
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP


def new_accelerator(sharding: str = "ddp", **options: Any) -> Accelerator:
    """Make an Accelerator for fp16: "ddp", which without ranks is one process, "fsdp1", -flat or -whole, "fsdp2"."""
    handlers = [GradScalerKwargs(**jobs.SETTINGS)]
    accelerator = Accelerator(**{"cpu": True, "mixed_precision": "fp16", "kwargs_handlers": handlers} | options)
    if sharding != "ddp":
        shard(int(sharding[4]), flat=sharding.endswith("flat"), whole=sharding.endswith("whole"))
    return accelerator


def use_torch(accelerator: Accelerator) -> Any:
    """Put torch's scaler where Accelerate does on a GPU."""
    cls = integration._scaler_class(accelerator)
    theirs = next(base for base in cls.__mro__ if base.__module__.startswith("torch."))
    accelerator.scaler, accelerator.native_amp = theirs(accelerator.device.type, **jobs.SETTINGS), True
    return accelerator.scaler


def ready(name: str = "SGD", layers: int = 1, *, settings: Any = (), **options: Any) -> tuple[Any, ...]:
    """An accelerator with our scaler, then prepared layers of two weights, then their optimizers."""
    accelerator = new_accelerator()
    use_scaler_triton(accelerator, **dict(settings))
    return accelerator, *prepare(accelerator, name, layers, **options)


def prepare(accelerator: Accelerator, name: str = "SGD", layers: int = 1, **options: Any) -> tuple[Any, ...]:
    made = [nn.Linear(2, 1, bias=False) for _ in range(layers)]
    optimizers = [getattr(torch.optim, name)(layer.parameters(), lr=0.5, **options) for layer in made]
    return tuple(accelerator.prepare(*made, *optimizers))


def backward(accelerator: Accelerator, *layers: nn.Module, value: float = 1.0) -> None:
    """Leave a gradient of (3, 4) in every layer, scaled; of another size by `value`."""
    accelerator.backward(sum((layer(torch.tensor([[3.0, 4.0]])) * value).float().sum() for layer in layers))


def norm_of(accelerator: Accelerator, *layers: nn.Module, max_norm: float = 1e9) -> float:
    return float(accelerator.clip_grad_norm_([p for layer in layers for p in layer.parameters()], max_norm))


def assert_stepped(layer: nn.Module, before: Tensor) -> None:
    """Assert that SGD has taken one step by a gradient that was unscaled once."""
    assert torch.equal(layer.weight, before - 0.5 * torch.tensor([[3.0, 4.0]]))


# What it gives, and when.


def test_the_scaler_gets_accelerates_numbers():
    numbers = {"init_scale": 32.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7}
    accelerator = new_accelerator(kwargs_handlers=[GradScalerKwargs(**numbers)])
    scaler = use_scaler_triton(accelerator)
    assert type(scaler) is GradScaler
    assert accelerator.scaler is scaler
    assert scaler.state_dict() == GradScaler("cpu", **numbers).state_dict()
    state = {"scale": 4.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 9, "_growth_tracker": 5}
    use_torch(accelerator).load_state_dict(state)
    assert use_scaler_triton(accelerator).state_dict() == state  # of the scaler before it
    scaler = use_scaler_triton(new_accelerator(), init_scale=64.0, min_scale=2.0)
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.limits.min_scale) == (64.0, 2, 2.0)


def test_a_scaler_of_ours_stays_with_what_was_prepared():
    accelerator = new_accelerator()
    accelerator.scaler, accelerator.native_amp = GradScaler("cpu", init_scale=4.0), True  # as under patch_torch()
    scaler, (layer, optimizer) = accelerator.scaler, prepare(accelerator)
    assert type(optimizer) is Original
    for _ in range(2):  # called again it changes nothing
        assert use_scaler_triton(accelerator) is optimizer.scaler is scaler
        assert type(optimizer) is _AcceleratedOptimizer
    backward(accelerator, layer)
    assert norm_of(accelerator, layer) == 5.0


def test_another_accelerator_or_a_disabled_scaler_is_left_to_accelerate():
    use_scaler_triton(new_accelerator())
    other, disabled = new_accelerator(), new_accelerator(kwargs_handlers=[GradScalerKwargs(enabled=False)])
    use_torch(other)
    assert not use_scaler_triton(disabled).is_enabled()
    for accelerator in (other, disabled):
        layer, optimizer = prepare(accelerator)
        assert (type(optimizer) is Original) == (accelerator is other)
        backward(accelerator, layer)
        with mock.patch.object(GradScaler, "clip_grad_norm_", side_effect=AssertionError):
            assert norm_of(accelerator, layer) == 5.0
        optimizer.step()
        assert not optimizer.step_was_skipped


def another_kind(kind: str) -> Accelerator:
    accelerator = new_accelerator()
    AcceleratorState._shared_state["distributed_type"] = DistributedType[kind]
    return accelerator


def prepared(first: Callable[[Accelerator], Any], *what: nn.Module) -> Accelerator:
    accelerator = new_accelerator()
    first(accelerator)
    accelerator.prepare(*what) if what else prepare(accelerator)
    return accelerator


REFUSED = {
    "no fp16": (lambda: new_accelerator(mixed_precision="no"), {}, "mixed_precision='fp16', got 'no'$"),
    "bf16": (lambda: new_accelerator(mixed_precision="bf16"), {}, "mixed_precision='fp16', got 'bf16': bf16 needs no"),
    "a layer": (lambda: nn.Linear(1, 1), {}, r"must be an accelerate\.Accelerator, got Linear$"),
    "a trainer": (lambda: SimpleNamespace(accelerator=1), {}, r"got SimpleNamespace; pass its \.accelerator$"),
    "DEEPSPEED": (lambda: another_kind("DEEPSPEED"), {}, "distributed_type that uses torch's scaler, got DEEPSPEED"),
    "MEGATRON_LM": (lambda: another_kind("MEGATRON_LM"), {}, "torch's scaler, got MEGATRON_LM"),
    "XLA": (lambda: another_kind("XLA"), {}, "torch's scaler, got XLA"),
    "an optimizer": (lambda: prepared(use_torch), {}, "must have prepared nothing yet, .*: SGD"),
    "a model without autocast": (lambda: prepared(id, nn.Linear(1, 1)), {}, "prepared nothing yet, .*: Linear"),
    "settings once prepared": (lambda: prepared(use_scaler_triton), {"min_scale": 1.0}, "must have prepared nothing yet"),
    "wrong settings": (new_accelerator, {"min_scale": -1.0}, "min_scale"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses_and_changes_nothing(what):
    make, settings, text = REFUSED[what]
    given = make()
    before = dict(vars(given))
    with pytest.raises((TypeError, ValueError), match=text):
        use_scaler_triton(given, **settings)
    assert vars(given) == before


def test_an_optimizer_without_a_state_is_stepped():
    """As torchao's CPUOffloadOptimizer, which has one inside and skips `__init__`."""

    class Offloading(torch.optim.Optimizer):
        def __init__(self, inside: torch.optim.Optimizer) -> None:
            self.inside = inside
            self.state_dict, self.load_state_dict, self.step = inside.state_dict, inside.load_state_dict, inside.step

        param_groups = property(lambda self: self.inside.param_groups)  # type: ignore[assignment]

    accelerator = new_accelerator()
    use_scaler_triton(accelerator)
    layer = nn.Linear(2, 1, bias=False)
    layer, optimizer = accelerator.prepare(layer, Offloading(torch.optim.SGD(layer.parameters(), lr=0.5)))
    before = layer.weight.detach().clone()
    backward(accelerator, layer)
    optimizer.step()
    assert_stepped(layer, before)
    assert not optimizer.step_was_skipped


MADE = """
import scaler_triton
scaler_triton.patch_torch()
from accelerate.utils import DistributedType
from accelerate.utils.modeling import get_grad_scaler
for kind, cls in {"FSDP": "ShardedGradScaler", "MULTI_GPU": "GradScaler", "NO": "GradScaler"}.items():
    made = get_grad_scaler(DistributedType[kind], init_scale=4.0)
    assert type(made) is getattr(scaler_triton, cls), (kind, type(made))
"""


def test_accelerate_makes_ours_after_torch_is_patched():
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-W", "ignore", "-c", MADE], cwd=root, timeout=120, check=True)


def test_optimizers_and_accelerators_can_be_pickled():
    accelerator, layer, optimizer = ready("AdamW", fused=True, settings={"min_scale": 1.0})
    for value in (1.0, INF):
        optimizer.zero_grad()
        backward(accelerator, layer, value=value)
        optimizer.step()
        assert optimizer.step_was_skipped == (value == INF)
    clone = pickle.loads(pickle.dumps(optimizer))
    assert type(clone) is _AcceleratedOptimizer
    assert clone.scaler.state_dict() == optimizer.scaler.state_dict()
    assert clone.step_was_skipped
    clone.param_groups[0]["params"][0].grad = clone.scaler.scale(torch.ones(1, 2))
    clone.step()
    assert not clone.step_was_skipped
    other = pickle.loads(pickle.dumps(accelerator))
    assert other.clip_grad_norm_.args == other.prepare_optimizer.args == (other,)
    assert other.scaler.stats().skipped == 1


# Clipping.


def test_clips_by_any_norm_some_parameters_and_by_value():
    for norm_type, norm in ((2, 5.0), (1.0, 7.0), (INF, 4.0)):
        accelerator, layer, _ = ready()
        backward(accelerator, layer)
        assert float(accelerator.clip_grad_norm_(layer.weight, norm / 2, norm_type)) == norm  # a single tensor, too
        torch.testing.assert_close(layer.weight.grad, torch.tensor([[1.5, 2.0]]), rtol=1e-6, atol=0)  # norm + 1e-6
        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer"):
            norm_of(accelerator, layer)
    for frozen in (False, True):
        accelerator, layer = new_accelerator(), nn.Linear(2, 1)
        scaler = use_scaler_triton(accelerator)
        layer.bias.requires_grad_(not frozen)
        layer, _ = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.5))
        backward(accelerator, layer)
        with mock.patch.object(scaler, "unscale_", wraps=scaler.unscale_) as unscale:
            assert float(accelerator.clip_grad_norm_([layer.weight], 2.5)) == 5.0
        assert unscale.called is not frozen  # what is frozen costs no second pass
    accelerator, layer, optimizer = ready()
    backward(accelerator, layer)
    accelerator.clip_grad_value_(layer.parameters(), 3.5)
    assert layer.weight.grad.tolist() == [[3.0, 3.5]]
    before = layer.weight.detach().clone()
    optimizer.step()
    assert torch.equal(layer.weight, before - torch.tensor([[1.5, 1.75]]))
    layer.weight.grad = None
    unheld = nn.Parameter(torch.zeros(2))
    unheld.grad = torch.tensor([3.0, 4.0])
    assert float(accelerator.clip_grad_norm_([unheld], 1.0)) == 5.0  # which is Accelerate's affair


def test_a_subclass_keeps_its_own_clipping():
    class Watched(Accelerator):
        norms: tuple[float, ...] = ()

        def clip_grad_norm_(self, *args: Any) -> None:
            self.norms += (float(super().clip_grad_norm_(*args)),)

    accelerator = Watched(cpu=True, mixed_precision="fp16")
    use_scaler_triton(accelerator, init_scale=8.0)
    layer, optimizer = prepare(accelerator)
    before = layer.weight.detach().clone()
    backward(accelerator, layer)
    accelerator.clip_grad_norm_(layer.parameters(), 9.0)
    assert accelerator.norms == (5.0,)
    optimizer.step()
    assert_stepped(layer, before)


def test_an_optimizer_that_was_prepared_twice_is_clipped_once():
    """As a notebook's cell may that is run again: each time the bare optimizer is wrapped anew."""
    accelerator, layer, optimizer = ready()
    again = accelerator.prepare(optimizer.optimizer)
    assert again is not optimizer
    before = layer.weight.detach().clone()
    backward(accelerator, layer)
    assert norm_of(accelerator, layer) == 5.0
    again.step()
    assert_stepped(layer, before)


@pytest.mark.parametrize("order", ["together", "in turn", "backward in turn"])
def test_several_optimizers_are_clipped_then_stepped_in_turn(order):
    """Each is divided once, though the first one's step has updated the scale."""
    accelerator, *layers, one, other = ready(layers=2, settings={"growth_interval": 1})
    before = [layer.weight.detach().clone() for layer in layers]
    if order == "together":
        backward(accelerator, *layers)
        with mock.patch.object(accelerator.scaler, "unscale_", side_effect=AssertionError):  # all in one pass
            assert norm_of(accelerator, *layers) == pytest.approx(50**0.5, rel=1e-6)
    elif order == "in turn":
        backward(accelerator, *layers)
        assert norm_of(accelerator, layers[0]) == 5.0
        assert layers[1].weight.grad.tolist() == [[24.0, 32.0]]  # scaled still
        assert norm_of(accelerator, layers[1]) == 5.0
    else:  # of another model, which may come between clipping and the step
        for layer in layers:
            backward(accelerator, layer)
            assert norm_of(accelerator, layer) == 5.0
    for optimizer, layer, weight in zip((one, other), layers, before, strict=True):
        optimizer.step()
        assert not optimizer.step_was_skipped
        assert_stepped(layer, weight)


def test_a_backward_between_clipping_and_the_step_is_refused():
    """Else the next clipping would take scaled gradients for unscaled ones, and nobody would check them."""
    text = "ran between clipping, which unscaled the gradients of SGD, and the step"
    accelerator, layer, optimizer = ready()
    backward(accelerator, layer)
    norm_of(accelerator, layer)
    with pytest.raises(RuntimeError, match=text):
        backward(accelerator, layer, value=INF)
    accelerator.scaler.update()  # the step is left out
    optimizer.zero_grad()
    backward(accelerator, layer)
    assert norm_of(accelerator, layer) == 5.0
    accelerator, one, other, first, second = ready(layers=2)
    backward(accelerator, one, other)
    norm_of(accelerator, one, other)
    first.step()
    with pytest.raises(RuntimeError, match=text):  # of a step that waits while another's has updated the scale
        backward(accelerator, other)
    second.zero_grad()
    backward(accelerator, other)


@PLAIN_AND_FUSED
@pytest.mark.parametrize("when", ["clipped", "unscaled as a wrapper", "stepped", "clipped, then a new optimizer"])
def test_an_optimizer_that_is_prepared_after_an_interruption_begins_a_new_step(when, options):
    accelerator, layer, optimizer = ready("AdamW", **options)
    scaler = accelerator.scaler
    backward(accelerator, layer, value=INF)
    if when == "unscaled as a wrapper":
        scaler.unscale_(optimizer)
    else:
        norm_of(accelerator, layer)
    if when == "stepped":
        scaler.step(optimizer.optimizer)  # and no update
    if when.endswith("new optimizer"):
        accelerator.free_memory()
        kept, optimizer = optimizer, torch.optim.AdamW(layer.parameters(), lr=0.5, **options)
        assert kept.optimizer is not optimizer
    optimizer.zero_grad()
    layer, optimizer = accelerator.prepare(layer, optimizer)
    backward(accelerator, layer)
    assert norm_of(accelerator, layer) == 5.0
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert (scaler.stats().updates, scaler.stats().skipped) == (1, 0)


# What it says of skipped steps.


@PLAIN_AND_FUSED
@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("by", ["", "norm", "value", "hand"])
def test_an_answer_stays_until_the_next_step(by, asked, options):
    """Whether or not somebody asked before the next unscaling, which asks nobody."""
    accelerator, layer, optimizer = ready("AdamW", **options)
    told = [optimizer.step_was_skipped]
    for value in (INF, 1.0, 1.0):
        optimizer.zero_grad()
        backward(accelerator, layer, value=value)
        with mock.patch.object(accelerator.scaler, "was_skipped", side_effect=AssertionError("asked")):
            if by == "hand":
                accelerator.unscale_gradients(optimizer)
            elif by:
                getattr(accelerator, f"clip_grad_{by}_")(layer.parameters(), 1.0)
        told.append(optimizer.step_was_skipped)
        optimizer.step()
        if asked:
            assert accelerator.optimizer_step_was_skipped == (value == INF)
    assert told == [False, False, True, False]


def test_accelerate_does_not_see_that_a_fused_optimizer_skips():
    """If this fails, Accelerate has caught up: say so in docs/accelerate.md."""
    accelerator = new_accelerator()
    use_torch(accelerator)
    layer, optimizer = prepare(accelerator, "AdamW", fused=True)
    backward(accelerator, layer, value=INF)
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped


def test_nobody_asks_but_the_scheduler():
    job = Job(0, "ddp", "adamw-fused")
    with mock.patch.object(job.scaler, "was_skipped", side_effect=AssertionError("asked")):
        job.backward(0)
        job.accelerator.clip_grad_norm_(job.model.parameters(), 1.0)
        job.optimizer.step()
        with pytest.raises(AssertionError, match="asked"):
            job.scheduler.step()


# Ranks, one of which overflows.


@contextmanager
def launched(rank: int) -> Iterator[None]:
    """What `accelerate launch` puts into the environment, and no state of an Accelerator before or after."""
    size = str(dist.get_world_size())
    launcher = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    # Without the last one its device would be called cpu:0, which FSDP1 takes for another than cpu.
    added = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_TORCH_DEVICE": "cpu"}
    # Barriers, and `fully_shard` without a mesh, take what torch is built for, even where there is none.
    on_cpu = mock.patch.object(torch._C, "_get_accelerator", return_value=torch.device("cpu"))
    with mock.patch.dict(os.environ, launcher | added), on_cpu, nothing_offloaded():
        try:
            yield
        finally:
            forget()


@contextmanager
def nothing_offloaded() -> Iterator[None]:
    """Let FSDP1 copy whole states: on a CPU what it "offloads" is the memory that it frees, and saving that crashes."""
    original = FullyShardedDataParallel.state_dict_type

    def state_dict_type(model: nn.Module, kind: Any, *configs: Any) -> Any:
        for config in configs:
            if type(config).__name__.startswith("Full"):
                config.offload_to_cpu = False
        return original(model, kind, *configs)

    with mock.patch.object(FullyShardedDataParallel, "state_dict_type", state_dict_type):
        yield


@dataclass
class Report:
    """What a run left on one rank; lists run over the optimizer's steps."""

    scales: list[float] = field(default_factory=list)
    trackers: list[int] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    collectives: list[tuple[int, int]] = field(default_factory=list)  # of the clipping, of the step
    clipped_by_scaler: list[Any] = field(default_factory=list)  # its argument `parameters`
    digests: list[str] = field(default_factory=list)
    step_counts: set[float] = field(default_factory=set)  # of the optimizer's state
    kinds: tuple[str, ...] = ()  # of the model, a parameter and the scaler, and in which dtype a layer answers


AS_TORCHS = ("scales", "trackers", "skipped", "rates", "digests", "step_counts")


class Job:
    """A model, an optimizer and a scheduler that an Accelerator has prepared."""

    def __init__(self, rank: int, sharding: str, name: str, *, ours: bool = True, **options: Any) -> None:
        self.rank, self.sharding = rank, sharding
        self.accelerator = new_accelerator(sharding, **options)
        self.scaler = (use_scaler_triton if ours else use_torch)(self.accelerator)
        net: nn.Module = jobs.new_net()
        if sharding == "fsdp1-flat":
            net = self.accelerator.prepare(net)
        optimizer = jobs.new_optimizer(name, net.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: DECAY**n)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(net, optimizer, scheduler)
        self.dtypes: set[str] = set()
        layer = next(module for module in self.model.modules() if isinstance(module, nn.Linear))
        layer.register_forward_hook(lambda module, args, output: self.dtypes.add(str(output.dtype)))

    def train(self, steps: range, overflows: Collection[int], max_norm: float = 0.05) -> Report:
        """Train as Accelerate's documentation shows, each step on this rank's part of its own batch."""
        report = Report()
        spy = mock.MagicMock(side_effect=getattr(self.scaler, "clip_grad_norm_", None))
        for step in steps:
            with (
                self.accelerator.accumulate(self.model),
                mock.patch.object(self.scaler, "clip_grad_norm_", spy, create=True),
            ):
                self.backward(step)
                # One rank alone sees it; under DDP, which has added up the gradients, all do.
                if step in overflows and (self.rank == 1 or self.sharding == "ddp"):
                    jobs.overflow(self.model.parameters())
                if self.accelerator.sync_gradients:
                    self._step(report, max_norm)
                self.scheduler.step()
                self.optimizer.zero_grad()
        report.clipped_by_scaler = [call.kwargs["parameters"] for call in spy.call_args_list]
        report.digests = jobs.digests(self.model)
        report.step_counts = {float(state["step"]) for state in self.optimizer.state.values() if "step" in state}
        held = (self.model, next(self.model.parameters()), self.scaler)
        report.kinds = (*(type(each).__name__ for each in held), *self.dtypes)
        return report

    def backward(self, step: int) -> None:
        x = torch.randn(jobs.BATCH, jobs.WIDTH, generator=torch.Generator().manual_seed(step))
        part = x.chunk(dist.get_world_size())[self.rank] if dist.is_initialized() else x
        self.accelerator.backward(jobs.loss_of(self.model, part.to(self.accelerator.device)))

    def _step(self, report: Report, max_norm: float) -> None:
        with jobs.Collectives() as clipping:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
        with jobs.Collectives() as stepping:
            self.optimizer.step()
        report.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        report.collectives.append((clipping.count, stepping.count))
        report.skipped.append(self.accelerator.optimizer_step_was_skipped)
        report.rates.append(self.scheduler.get_last_lr()[0])
        report.scales.append(self.scaler.get_scale())
        report.trackers.append(self.scaler._get_growth_tracker())

    def state(self) -> tuple[dict[str, Any], list[str]]:
        return self.scaler.state_dict(), jobs.digests(self.model)


def train(rank: int, sharding: str, name: str, overflows: Collection[int], steps: int, **options: Any) -> Report:
    """Train a fresh job from the start."""
    max_norm = options.pop("max_norm", 0.05)
    with launched(rank):
        return Job(rank, sharding, name, **options).train(range(steps), overflows, max_norm)


def resume(rank: int, sharding: str, name: str, folder: Path, trained: int, first_ours: bool) -> tuple[Any, ...]:
    """Save in the middle of a run, and load into a job that has taken `trained` steps of its own.

    Returns: the states that were saved and loaded; the reports of the run that went on, and of the other one.
    """
    max_norm = 0.05 if first_ours else 1e9  # then nothing is clipped: torch sums norms in fp32
    with launched(rank):
        first = Job(rank, sharding, name, ours=first_ours)
        first.train(range(5), {1}, max_norm)
        first.accelerator.save_state(str(folder))
        saved, straight = first.state(), first.train(range(5, 9), {6}, max_norm)
    with launched(rank):
        second = Job(rank, sharding, name)
        second.train(range(20, 20 + trained), ())
        second.accelerator.load_state(str(folder))
        return saved, second.state(), straight, second.train(range(5, 9), {6}, max_norm)


def save_early(rank: int, sharding: str, folder: Path) -> tuple[Any, ...]:
    """Save a job that nothing has happened to, and one between the first two of two backwards a step; or save nothing."""
    with launched(rank):
        job = Job(rank, sharding, "adamw")
        before = job.scaler.state_dict()
        job.accelerator.save_state(str(folder / "first"))
        after, reports = job.scaler.state_dict(), []
    for saves in (True, False):
        with launched(rank):
            job = Job(rank, sharding, "adamw", gradient_accumulation_steps=2)
            job.train(range(1), ())
            if saves:
                job.accelerator.save_state(str(folder / "second"))
            reports.append(job.train(range(1, 6), {3}))
    return before, after, *reports


def clip_some(rank: int, sharding: str) -> tuple[float, float, int]:
    """Clip one layer's parameters: the norm, what the ranks' gradients sum up to, and how many collectives it took."""
    with launched(rank):
        job = Job(rank, sharding, "adamw")
        job.backward(0)
        layer = [parameter for name, parameter in job.model.named_parameters() if ".up." in f".{name}"]
        with jobs.Collectives() as counter:
            norm = job.accelerator.clip_grad_norm_(layer, 1e9)
        return float(norm), norm_of_all(layer, sharding), counter.count


def clip_two_models(rank: int) -> tuple[list[float], list[int], list[bool]]:
    """Clip two FSDP1 models under one norm, then, after a step, one after the other."""
    with launched(rank):
        accelerator = new_accelerator("fsdp1")
        use_scaler_triton(accelerator)
        models = [accelerator.prepare(jobs.new_net(seed)) for seed in range(2)]
        optimizers = [accelerator.prepare(jobs.new_optimizer("adamw-fused", net.parameters())) for net in models]
        norms, counts = [], []
        for together in (True, False):
            x = torch.randn(jobs.BATCH, jobs.WIDTH, generator=torch.Generator().manual_seed(rank))
            accelerator.backward(sum(jobs.loss_of(net, x) for net in models))
            groups = [list(net.parameters()) for net in models]
            for group in [[*groups[0], *groups[1]]] if together else groups:
                with jobs.Collectives() as counter:
                    norms.append(float(accelerator.clip_grad_norm_(group, 1e9)))
                counts.append(counter.count)
                norms.append(norm_of_all(group, "fsdp1"))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return norms, counts, [optimizer.step_was_skipped for optimizer in optimizers]


def norm_of_all(parameters: list[Tensor], sharding: str) -> float:
    """The norm over the ranks' unscaled shards, in fp64; under DDP every rank holds all."""
    held = [jobs.local(parameter.grad).double() for parameter in parameters if parameter.grad is not None]
    total = torch.stack([torch.zeros((), dtype=torch.float64), *(values.square().sum() for values in held)]).sum()
    if sharding != "ddp":
        dist.all_reduce(total)
    return float(total.sqrt())


KINDS = {
    "ddp": ("DistributedDataParallel", "Parameter", "GradScaler", "torch.float16"),
    "fsdp1": ("FullyShardedDataParallel", "Parameter", "ShardedGradScaler", "torch.float16"),
    "fsdp1-flat": ("FullyShardedDataParallel", "Parameter", "ShardedGradScaler", "torch.float16"),
    "fsdp2": ("FSDPNet", "DTensor", "GradScaler", "torch.float16"),
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("sharding", KINDS)
def test_all_ranks_clip_in_one_reduction_skip_and_say_so_and_the_scheduler_waits(two, sharding, name):
    before = [SKIPPED[:step].count(False) for step in range(STEPS)]
    for report in two(train, sharding, name, BAD_STEPS, STEPS):
        assert report.kinds == KINDS[sharding]
        assert report.skipped == SKIPPED
        assert report.scales == SCALES
        assert report.trackers == [1, 0, 1, 0, 0, 1]
        assert report.step_counts == {float(SKIPPED.count(False))}
        # Accelerate steps a scheduler once a rank.
        assert report.rates == [pytest.approx(2.0**-4 * DECAY ** (2 * count), rel=1e-12) for count in before]
        # None: all parameters, which takes one pass. Under DDP nobody else needs to be asked.
        assert report.clipped_by_scaler == [None] * STEPS
        assert report.collectives == [(0 if sharding == "ddp" else 1, 0)] * STEPS


@pytest.mark.distributed
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("sharding", KINDS)
def test_equals_torchs_scaler_to_the_bit(two, sharding, every):
    """Also with gradients added up in several backwards."""
    overflows = tuple(every * (step + 1) - 1 for step in BAD_STEPS)
    ours, theirs = (
        two(train, sharding, "adamw", overflows, 6 * every, max_norm=1e9, ours=ours, gradient_accumulation_steps=every)
        for ours in (True, False)
    )
    for mine, other in zip(ours, theirs, strict=True):
        for what in AS_TORCHS:
            assert getattr(mine, what) == getattr(other, what), what
        # The sum of squares is taken in fp64, torch's in fp32, shard by shard.
        assert mine.norms == pytest.approx(other.norms, rel=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("sharding", "name", "trained", "first_ours"),
    [
        ("ddp", "adamw-fused", 0, True),
        ("fsdp1", "adamw-fused", 3, True),  # loads no shards into an optimizer without state, whatever the scaler
        ("fsdp1-whole", "adamw-fused", 0, True),
        ("fsdp2", "adamw-fused", 0, True),
        ("fsdp2", "adamw", 3, True),
        # torch's scaler before ours
        ("ddp", "adamw", 0, False),
        ("fsdp1-whole", "adamw", 0, False),
        ("fsdp2", "adamw", 0, False),
    ],
)
def test_resumes_to_the_bit(two, tmp_path, sharding, name, trained, first_ours):
    for saved, loaded, straight, resumed in two(resume, sharding, name, tmp_path, trained, first_ours):
        assert loaded == saved
        assert resumed.skipped == [False, True, False, False]
        for what in AS_TORCHS:
            assert getattr(resumed, what) == getattr(straight, what), what


@pytest.mark.distributed
@pytest.mark.parametrize("sharding", ["ddp", "fsdp1", "fsdp2"])
def test_saving_before_the_first_step_or_between_its_backwards_changes_nothing(two, tmp_path, sharding):
    for before, after, saved, straight in two(save_early, sharding, tmp_path):
        assert before == after
        assert saved == straight
        assert saved.skipped == [False, True, False]


@pytest.mark.distributed
def test_some_parameters_are_clipped_by_the_norm_of_all_their_shards(two):
    for sharding in ("ddp", "fsdp1", "fsdp2"):
        for norm, expected, collectives in two(clip_some, sharding):
            assert norm == pytest.approx(expected, rel=1e-6)  # summed by torch, in fp32
            assert collectives == (0 if sharding == "ddp" else 2)  # the flag's, then the norm's
    results = two(clip_two_models)
    assert results[0] == results[1]
    norms, collectives, skipped = results[0]
    assert norms[::2] == pytest.approx(norms[1::2], rel=1e-6)
    assert collectives == [1, 1, 1]
    assert skipped == [False, False]
