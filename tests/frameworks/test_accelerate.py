"""Accelerate: what the one line changes and refuses; ranks train, clip, skip and resume with our scaler."""

import functools
import os
import pickle
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jobs
import pytest
import torch
import torch.distributed as dist
from jobs import BAD_STEPS, FUSED, SCALES, SKIPPED, STEPS
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer as Original
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, GradScalerKwargs
from accelerate.utils.modeling import get_grad_scaler
from ranks.cases import CollectiveCounter, new_optimizer, values_of

from scaler_triton import GradScaler, ShardedGradScaler, StepGuard, patch_torch
from scaler_triton.integrations import accelerate as integration
from scaler_triton.integrations.accelerate import _AcceleratedOptimizer, use_scaler_triton, use_step_guard

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
    plugin.set_mixed_precision(AcceleratorState().mixed_precision)
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


def use_torch(accelerator: Accelerator, **settings: Any) -> Any:
    """Put torch's scaler where Accelerate does on a GPU."""
    cls = integration._scaler_class(accelerator)
    theirs = next(base for base in cls.__mro__ if base.__module__.startswith("torch."))
    accelerator.scaler, accelerator.native_amp = theirs(accelerator.device.type, **jobs.SETTINGS | settings), True
    return accelerator.scaler


USES = {True: use_scaler_triton, False: use_torch, "guard": functools.partial(use_step_guard, **jobs.GUARD)}


def prepare(accelerator: Accelerator, name: str = "SGD", layers: int = 1, **options: Any) -> tuple[Any, ...]:
    """Layers of two weights, then their optimizers."""
    made = [nn.Linear(2, 1, bias=False) for _ in range(layers)]
    for layer in made:
        nn.init.constant_(layer.weight, 8.0)
    optimizers = [getattr(torch.optim, name)(layer.parameters(), lr=0.5, **options) for layer in made]
    return tuple(accelerator.prepare(*made, *optimizers))


def ready(*what: Any, precision: str = "fp16", settings: Any = (), **options: Any) -> tuple[Any, ...]:
    """An accelerator with our scaler, or in another precision with a guard, then what it has prepared."""
    accelerator = new_accelerator(mixed_precision=precision)
    USES[True if precision == "fp16" else "guard"](accelerator, **dict(settings))
    return accelerator, *prepare(accelerator, *what, **options)


def backward(accelerator: Accelerator, *layers: nn.Module, value: float = 1.0) -> None:
    """Leave a gradient of (3, 4) in every layer, scaled; of another size by `value`."""
    accelerator.backward(sum((layer(torch.tensor([[3.0, 4.0]])) * value).float().sum() for layer in layers))


def norm_of(accelerator: Accelerator, *layers: nn.Module) -> float:
    return float(accelerator.clip_grad_norm_([p for layer in layers for p in layer.parameters()], 1e9))


def test_the_scaler_gets_the_numbers_of_accelerates_and_more_settings():
    numbers = {"init_scale": 32.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7}
    accelerator = new_accelerator(kwargs_handlers=[GradScalerKwargs(**numbers)])
    scaler = use_scaler_triton(accelerator)
    assert accelerator.scaler is scaler
    assert scaler.state_dict() == GradScaler("cpu", **numbers).state_dict()
    state = {"scale": 4.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 9, "_growth_tracker": 5}
    use_torch(accelerator).load_state_dict(state)
    assert use_scaler_triton(accelerator).state_dict() == state  # of the scaler before it
    scaler = use_scaler_triton(new_accelerator(), init_scale=64.0, min_scale=2.0)
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.limits.min_scale) == (64.0, 2, 2.0)


def test_a_scaler_of_ours_stays_with_what_was_prepared():
    """As it is after `patch_torch()`; called again it changes nothing."""
    with patch_torch():
        made = [get_grad_scaler(DistributedType[kind]) for kind in ("FSDP", "MULTI_GPU", "NO")]
    assert [type(each) for each in made] == [ShardedGradScaler, GradScaler, GradScaler]
    accelerator = new_accelerator()
    accelerator.scaler, accelerator.native_amp = GradScaler("cpu", init_scale=4.0), True
    scaler, (layer, optimizer) = accelerator.scaler, prepare(accelerator)
    assert type(optimizer) is Original
    for _ in range(2):
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


def prepared(use: Any) -> Accelerator:
    accelerator = new_accelerator()
    use(accelerator)
    prepare(accelerator)
    return accelerator


def with_a_model() -> Accelerator:
    accelerator = new_accelerator()
    accelerator.prepare(nn.Linear(1, 1))  # without autocast
    return accelerator


def with_deepspeed() -> Accelerator:
    accelerator = new_accelerator()
    AcceleratorState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    return accelerator


@pytest.mark.parametrize(
    ("use", "make", "settings", "text"),
    [
        (use_scaler_triton, lambda: new_accelerator(mixed_precision="no"), {}, "'fp16', got 'no'$"),
        (use_scaler_triton, lambda: new_accelerator(mixed_precision="bf16"), {}, "'fp16', got 'bf16': bf16 needs no"),
        (use_scaler_triton, lambda: nn.Linear(1, 1), {}, r"accelerate\.Accelerator, or a Trainer .*, got Linear$"),
        (use_scaler_triton, lambda: SimpleNamespace(accelerator=1), {}, "or a Trainer that has one, got int$"),
        (use_scaler_triton, with_deepspeed, {}, "distributed_type that leaves the step to Accelerate, got DEEPSPEED"),
        (use_scaler_triton, lambda: prepared(use_torch), {}, "must have prepared nothing yet, .*: SGD"),
        (use_scaler_triton, with_a_model, {}, "must have prepared nothing yet, .*: Linear"),
        (use_scaler_triton, lambda: prepared(use_scaler_triton), {"min_scale": 1.0}, "must have prepared nothing yet"),
        (use_scaler_triton, new_accelerator, {"min_scale": -1.0}, "min_scale"),
        (use_step_guard, new_accelerator, {}, "'bf16' or mixed_precision='no', got 'fp16': fp16 needs a scale"),
        (use_step_guard, with_deepspeed, {}, "distributed_type that leaves the step to Accelerate, got DEEPSPEED"),
        (use_step_guard, lambda: nn.Linear(1, 1), {}, r"accelerate\.Accelerator, or a Trainer .*, got Linear$"),
        (use_step_guard, lambda: new_accelerator(mixed_precision="no"), {"spike_sigma": 0.0}, "spike_sigma"),
    ],
)
def test_refuses_and_changes_nothing(use, make, settings, text):
    given = make()
    before = dict(vars(given))
    with pytest.raises((TypeError, ValueError), match=text):
        use(given, **settings)
    assert vars(given) == before


def test_optimizers_and_accelerators_can_be_pickled():
    accelerator, layer, optimizer = ready("AdamW", fused=True, settings={"min_scale": 1.0})
    backward(accelerator, layer, value=INF)
    optimizer.step()
    assert optimizer.step_was_skipped
    clone, other = pickle.loads(pickle.dumps(optimizer)), pickle.loads(pickle.dumps(accelerator))
    assert type(clone) is _AcceleratedOptimizer
    assert clone.step_was_skipped
    clone.param_groups[0]["params"][0].grad = clone.scaler.scale(torch.ones(1, 2))
    clone.step()
    assert not clone.step_was_skipped
    assert other.clip_grad_norm_.args == other.prepare_optimizer.args == (other,)
    assert other.scaler.stats().skipped == 1


@PLAIN_AND_FUSED
def test_who_asks_only_after_the_next_clipping_is_told_of_the_step_before(options):
    accelerator, layer, optimizer = ready("AdamW", **options)
    backward(accelerator, layer, value=INF)
    optimizer.step()
    optimizer.zero_grad()
    backward(accelerator, layer)
    norm_of(accelerator, layer)
    assert optimizer.step_was_skipped


@pytest.mark.parametrize(("norm_type", "norm"), [(2, 5.0), (1.0, 7.0), (INF, 4.0)])
def test_clips_a_single_tensor_by_any_norm_and_leaves_what_no_optimizer_holds_to_accelerate(norm_type, norm):
    accelerator, layer, _ = ready()
    backward(accelerator, layer)
    assert float(accelerator.clip_grad_norm_(layer.weight, norm / 2, norm_type)) == norm
    torch.testing.assert_close(layer.weight.grad, torch.tensor([[1.5, 2.0]]), rtol=1e-6, atol=0)  # norm + 1e-6
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer"):
        norm_of(accelerator, layer)
    accelerator.scaler.update()
    unheld = nn.Parameter(torch.zeros(2))
    unheld.grad = torch.tensor([3.0, 4.0])
    assert float(accelerator.clip_grad_norm_([unheld], 1.0, norm_type)) == norm


@PLAIN_AND_FUSED
def test_a_hook_of_the_optimizer_is_told_whether_its_own_step_is_skipped(options):
    """It runs while the optimizer steps, as an average does that lives in one; a plain one's in good steps only."""
    accelerator, layer, optimizer = ready(**options)
    seen = []
    optimizer.optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.step_was_skipped))
    for value in (1.0, INF, 1.0):
        backward(accelerator, layer, value=value)
        optimizer.step()
        optimizer.zero_grad()
    assert seen == ([False, True, False] if options else [False, False])


@pytest.mark.parametrize("order", ["together", "in turn", "backward in turn"])
def test_several_optimizers_are_clipped_then_stepped_in_turn(order):
    accelerator, *layers, one, other = ready("SGD", 2, settings={"growth_interval": 1})
    if order != "backward in turn":
        backward(accelerator, *layers)
    if order == "together":
        assert norm_of(accelerator, *layers) == pytest.approx(50**0.5, rel=1e-6)
    else:
        for layer in layers:
            if order == "backward in turn":  # of another model, which may come between clipping and the step
                backward(accelerator, layer)
            assert layer.weight.grad.tolist() == [[24.0, 32.0]]  # scaled still
            assert norm_of(accelerator, layer) == 5.0
    for optimizer, layer in zip((one, other), layers, strict=True):
        optimizer.step()
        assert layer.weight.tolist() == [[8.0 - 1.5, 8.0 - 2.0]]


@pytest.mark.parametrize("count", [1, 2])
def test_a_backward_between_clipping_and_the_step_is_refused(count):
    """Also if another's step has updated the scale. Else nobody would check the gradients that it adds."""
    accelerator, *made = ready("SGD", count)
    layers, optimizers = made[:count], made[count:]
    backward(accelerator, *layers)
    norm_of(accelerator, *layers)
    for optimizer in optimizers[1:]:
        optimizer.step()
    with pytest.raises(RuntimeError, match="ran between clipping, which unscaled the gradients of SGD, and the step"):
        backward(accelerator, layers[0], value=INF)
    accelerator.scaler.update(8.0)  # the step is left out
    optimizers[0].zero_grad()
    backward(accelerator, layers[0])
    assert norm_of(accelerator, layers[0]) == 5.0


@PLAIN_AND_FUSED
@pytest.mark.parametrize("when", ["clipped", "unscaled as a wrapper", "stepped", "clipped, then a new optimizer"])
def test_an_optimizer_that_is_prepared_after_an_interruption_begins_a_new_step(when, options):
    accelerator, layer, optimizer = ready("AdamW", **options)
    scaler, kept = accelerator.scaler, optimizer
    backward(accelerator, layer, value=INF)
    scaler.unscale_(optimizer) if when == "unscaled as a wrapper" else norm_of(accelerator, layer)
    if when == "stepped":
        scaler.step(optimizer.optimizer)  # and no update
    kept.zero_grad()
    if when.endswith("new optimizer"):
        accelerator.free_memory()
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5, **options)
    optimizer = accelerator.prepare(optimizer)
    backward(accelerator, layer)
    assert norm_of(accelerator, layer) == 5.0
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert (scaler.stats().updates, scaler.stats().skipped) == (1, 0)


# Several optimizers, one loss.

X = torch.tensor([[3.0, 4.0]])
TWO = pytest.mark.parametrize(("name", "fused"), [(name, each) for name in ("SGD", "AdamW") for each in (False, True)])


def record(scaler: GradScaler, layers: Iterable[nn.Module]) -> tuple[Any, ...]:
    """Return the scaler's numbers, from its state, and the weights."""
    state, stats = scaler.state_dict(), scaler.stats()
    return state["scale"], state["_growth_tracker"], stats.updates, stats.skipped, jobs.whole(*layers).tolist()


def in_a_bare_loop(bad: str, name: str, clip: str, interval: int, **options: Any) -> list[tuple[Any, ...]]:
    """Step both optimizers, then update once."""
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=interval)
    layers = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    for layer in layers:
        nn.init.constant_(layer.weight, 8.0)
    optimizers = [getattr(torch.optim, name)(layer.parameters(), lr=0.5, **options) for layer in layers]
    trace = []
    for factors in jobs.parts_of_losses(bad):
        with torch.autocast("cpu", torch.float16):
            parts = [layer(X) * factor for layer, factor in zip(layers, factors, strict=True)]
        scaler.scale(sum(part.float().sum() for part in parts)).backward()
        if clip == "together":
            scaler.clip_grad_norm_(optimizers, 1.0)
        for optimizer, layer in zip(optimizers, layers, strict=True):
            if clip == "in turn":
                scaler.clip_grad_norm_(optimizer, 1.0)
            elif clip == "by value":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_value_(layer.parameters(), 2.0)
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        trace.append(record(scaler, layers))
    return trace


def alone(factors: Iterable[float], name: str, **options: Any) -> list[float]:
    """Train a layer by the gradients themselves, without a scaler; leave out the infinite ones."""
    weight = nn.Parameter(torch.full((1, 2), 8.0))
    optimizer = getattr(torch.optim, name)([weight], lr=0.5, **options)
    for factor in factors:
        if factor != INF:
            weight.grad = X * factor
            optimizer.step()
    return weight.flatten().tolist()


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("clip", ["", "together", "in turn", "by value"])
@TWO
@pytest.mark.parametrize("bad", jobs.BAD_PARTS)
def test_all_optimizers_step_by_the_scale_of_their_loss_which_is_updated_once(bad, name, fused, clip, interval):
    accelerator, *layers, one, other = ready(name, 2, settings={"growth_interval": interval}, fused=fused)
    scaler, trace, expected = accelerator.scaler, [], in_a_bare_loop(bad, name, clip, interval, fused=fused)
    for factors in jobs.parts_of_losses(bad):
        both = [p for layer in layers for p in layer.parameters()]
        accelerator.backward(sum((layer(X) * each).sum() for layer, each in zip(layers, factors, strict=True)))
        if clip == "together":
            accelerator.clip_grad_norm_(both, 1.0)
        for optimizer, layer in ((one, layers[0]), (other, layers[1])):
            if clip == "in turn":
                accelerator.clip_grad_norm_(layer.parameters(), 1.0)
            elif clip == "by value":
                accelerator.clip_grad_value_(layer.parameters(), 2.0)
            optimizer.step()
            optimizer.zero_grad()
        infinite = [factor == INF for factor in factors]
        skipped = [any(infinite)] * 2 if clip == "together" else infinite
        assert [one.step_was_skipped, other.step_was_skipped] == skipped
        assert scaler.get_scale() == expected[len(trace)][0]  # the last one's step has updated it
        trace.append(record(scaler, layers))
    assert trace == expected
    assert trace[-1][2] == len(trace)
    if not clip:
        parts = zip(*jobs.parts_of_losses(bad), strict=True)
        assert trace[-1][-1] == [number for factors in parts for number in alone(factors, name, fused=fused)]


@PLAIN_AND_FUSED
@pytest.mark.parametrize("bad", ["none", "first", "second"])
def test_a_gan_whose_second_loss_leaves_gradients_in_both_is_updated_for_each_loss(bad, options):
    """As by a loop that updates after each optimizer's step; each loss is scaled by the same."""
    accelerator, *layers, judge, generator = ready("AdamW", 2, settings={"growth_interval": 1}, **options)
    scaler, scales, expected = accelerator.scaler, [], []
    scale = 8.0
    for factors in jobs.parts_of_losses(bad):
        for number, optimizer in enumerate((judge, generator)):
            optimizer.zero_grad()
            loss = sum(layer(X).sum() for layer in layers) * factors[number]
            with mock.patch.object(GradScaler, "scale", autospec=True, side_effect=GradScaler.scale) as spy:
                accelerator.backward(loss)
            scales.append(spy.call_args.args[0].get_scale())
            optimizer.step()
            expected.append(scale)
            assert optimizer.step_was_skipped == (factors[number] == INF)
            scale *= 0.5 if factors[number] == INF else 2.0
    assert scales == expected
    assert (scaler.state_dict()["scale"], scaler.stats().updates) == (scale, len(expected))


def test_an_update_that_waits_is_in_what_is_saved_and_not_lost_when_optimizers_are_prepared(tmp_path):
    accelerator, *layers, one, other = ready("SGD", 2, settings={"growth_interval": 1})
    backward(accelerator, *layers)
    one.step()
    accelerator.save_state(str(tmp_path))
    assert torch.load(tmp_path / "scaler.pt")["scale"] == 16.0
    backward(accelerator, *layers)
    other.step()
    assert pickle.loads(pickle.dumps(accelerator)).scaler.stats().updates == 2
    backward(accelerator, *layers)
    one.step()
    accelerator.prepare(torch.optim.SGD(layers[0].parameters(), lr=0.5))
    assert accelerator.scaler.stats().updates == 3


def test_with_accumulation_the_steps_of_all_are_updated_for_once():
    accelerator = new_accelerator(gradient_accumulation_steps=2)
    use_scaler_triton(accelerator, growth_interval=1)
    *layers, one, other = prepare(accelerator, layers=2)
    for number in range(1, 5):
        with accelerator.accumulate(*layers):
            backward(accelerator, *layers)
            for optimizer in (one, other):
                optimizer.step()
                optimizer.zero_grad()
        assert accelerator.scaler.stats().updates == number // 2
    assert [layer.weight.tolist() for layer in layers] == [[[8.0 - 3.0, 8.0 - 4.0]]] * 2


def test_an_optimizer_of_a_run_that_is_over_is_not_waited_for():
    accelerator, layer, kept = ready()
    accelerator.free_memory()
    layer, optimizer = prepare(accelerator)
    backward(accelerator, layer)
    optimizer.step()
    assert (accelerator.scaler.stats().updates, kept.step_was_skipped) == (1, False)


# A guard, where Accelerate has no scaler.


@PLAIN_AND_FUSED
def test_a_guard_takes_one_decision_on_optimizers_that_are_clipped_together(options):
    """Each step counts; one that is left out does not."""
    accelerator, *layers, one, other = ready("SGD", 2, precision="bf16", **options)
    backward(accelerator, *layers)
    norm_of(accelerator, *layers)
    one.step()
    for optimizer in (one, other):  # whose step is left out
        optimizer.zero_grad()
    for value, skipped in ((1.0, False), (INF, True), (1.0, False)):
        before = jobs.whole(other_layer := layers[1])
        accelerator.backward(layers[0](torch.full((1, 2), value)).float().sum() + other_layer(torch.ones(1, 2)).sum())
        norm_of(accelerator, *layers)
        for optimizer in (one, other):
            optimizer.step()
            assert optimizer.step_was_skipped == skipped
            optimizer.zero_grad()
        assert torch.equal(jobs.whole(other_layer), before) == skipped
    assert (accelerator.scaler.stats().updates, accelerator.scaler.stats().skipped) == (7, 2)


@pytest.mark.parametrize("bad", [INF, 1e6])
def test_a_guard_remembers_what_clipping_by_value_hides_over_the_step_of_another(bad):
    accelerator = new_accelerator(mixed_precision="no")
    guard = use_step_guard(accelerator, spike_sigma=6.0, window=2)
    (layer, one), (other_layer, other) = prepare(accelerator), prepare(accelerator)
    for value, skipped in ((1.0, False), (1.1, False), (bad, True)):
        accelerator.backward(layer(torch.ones(1, 2)).sum() + value * other_layer(torch.ones(1, 2)).sum())
        accelerator.clip_grad_value_([*layer.parameters(), *other_layer.parameters()], 0.5)
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
        assert (one.step_was_skipped, other.step_was_skipped) == (False, skipped)
    assert (guard.stats().updates, guard.stats().skipped) == (6, 1)


def test_a_guard_sees_what_clipping_by_value_hides_clips_again_and_refuses_what_it_cannot_check():
    accelerator = new_accelerator(mixed_precision="no")
    layer, optimizer = prepare(accelerator)
    use_step_guard(SimpleNamespace(accelerator=accelerator))  # after `prepare`, by a Trainer
    backward(accelerator, layer)
    assert [norm_of(accelerator, layer) for _ in range(2)] == [5.0, 5.0]  # as without a scaler
    optimizer.step()
    optimizer.zero_grad()
    backward(accelerator, layer)
    layer.weight.grad[0, 0] = INF
    accelerator.clip_grad_value_(layer.parameters(), 1.0)
    assert layer.weight.grad.isfinite().all()
    optimizer.step()
    assert optimizer.step_was_skipped
    optimizer.zero_grad()
    backward(accelerator, layer)
    norm_of(accelerator, layer)
    with pytest.raises(RuntimeError, match="between clipping, which checked the gradients of SGD, and the step"):
        backward(accelerator, layer)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):  # Accelerate's is positional
        optimizer.step(lambda: None)


# Ranks, one of which overflows.


@contextmanager
def launched(rank: int) -> Iterator[None]:
    """What `accelerate launch` puts into the environment, and no state of an Accelerator before or after."""
    size, original = str(dist.get_world_size()), FullyShardedDataParallel.state_dict_type
    launcher = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    # Without the last one its device would be called cpu:0, which FSDP1 takes for another than cpu.
    added = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_TORCH_DEVICE": "cpu"}

    def state_dict_type(model: nn.Module, kind: Any, *configs: Any) -> Any:
        """On a CPU what FSDP1 "offloads" of whole states is the memory that it frees, and saving that crashes."""
        for config in configs:
            config.offload_to_cpu &= "Full" not in type(config).__name__
        return original(model, kind, *configs)

    with (
        mock.patch.dict(os.environ, launcher | added),
        # Barriers, and `fully_shard` without a mesh, take what torch is built for, even where there is none.
        mock.patch.object(torch._C, "_get_accelerator", return_value=torch.device("cpu")),
        mock.patch.object(FullyShardedDataParallel, "state_dict_type", state_dict_type),
    ):
        try:
            yield
        finally:
            forget()


Report = dict[str, Any]  # what a run left on one rank; lists run over the optimizer's steps
KEPT = ("scales", "trackers", "skipped", "rates", "digests", "step_counts")


class Job:
    """A model, an optimizer and a scheduler that an Accelerator has prepared; in tests/gpu by its own plugin."""

    def __init__(self, rank: int, sharding: str, name: str, *, ours: bool | str = True, **options: Any) -> None:
        self.rank, self.sharding = rank, sharding
        self.accelerator = new_accelerator(sharding, mixed_precision="bf16" if ours == "guard" else "fp16", **options)
        self.scaler = USES[ours](self.accelerator)
        net: nn.Module = jobs.new_net()
        if sharding == "fsdp1-flat":
            net = self.accelerator.prepare(net)
        optimizer = new_optimizer(name, net.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: DECAY**n)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(net, optimizer, scheduler)
        self.dtypes: set[str] = set()
        layer = next(module for module in self.model.modules() if isinstance(module, nn.Linear))
        layer.register_forward_hook(lambda module, args, output: self.dtypes.add(str(output.dtype)))

    def train(self, steps: Iterable[int], overflows: Collection[int], max_norm: float = 0.05) -> Report:
        """Train as Accelerate's documentation shows, each step on this rank's part of its own batch."""
        report: Report = defaultdict(list)
        clip = getattr(self.scaler, "clip_grad_norm_", None)
        with mock.patch.object(self.scaler, "clip_grad_norm_", mock.Mock(side_effect=clip), create=True) as spy:
            for step in steps:
                self.backward(step)
                # One rank alone sees it; under DDP, which has added up the gradients, all do.
                if step in overflows and (self.rank == 1 or self.sharding == "ddp"):
                    jobs.overflow(self.model.parameters())
                self._step(report, max_norm)
                self.scheduler.step()
                self.optimizer.zero_grad()
        report["clipped_by_scaler"] = [call.kwargs["parameters"] for call in spy.call_args_list]
        report["digests"] = jobs.digests(self.model)
        report["step_counts"] = {float(state["step"]) for state in self.optimizer.state.values() if "step" in state}
        held = (self.model, next(self.model.parameters()), self.scaler)
        report["kinds"] = (*(type(each).__name__ for each in held), *self.dtypes)
        return report

    def backward(self, step: int) -> None:
        x = torch.randn(jobs.BATCH, jobs.WIDTH, generator=torch.Generator().manual_seed(step))
        part = x.chunk(dist.get_world_size())[self.rank] if dist.is_initialized() else x
        self.accelerator.backward(jobs.loss_of(self.model, part.to(self.accelerator.device)))

    def _step(self, report: Report, max_norm: float) -> None:
        with CollectiveCounter() as clipping:
            self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
        with CollectiveCounter() as stepping:
            self.optimizer.step()
        report["collectives"].append((clipping.count, stepping.count))
        report["skipped"].append(self.accelerator.optimizer_step_was_skipped)
        report["rates"].append(self.scheduler.get_last_lr()[0])
        report["scales"].append(self.scaler.get_scale())
        report["trackers"].append(self.scaler._get_growth_tracker())

    def state(self) -> tuple[dict[str, Any], list[str]]:
        return self.scaler.state_dict(), jobs.digests(self.model)


def train(rank: int, sharding: str, name: str) -> Report:
    """Train a fresh job from the start."""
    with launched(rank):
        return Job(rank, sharding, name).train(range(STEPS), BAD_STEPS)


def resume(rank: int, sharding: str, name: str, folder: Path, trained: int, first_ours: bool | str) -> tuple[Any, ...]:
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
        second = Job(rank, sharding, name, ours=first_ours or True)
        second.train(range(20, 20 + trained), ())
        second.accelerator.load_state(str(folder))
        return saved, second.state(), straight, second.train(range(5, 9), {6}, max_norm)


KINDS = {
    "ddp": ("DistributedDataParallel", "Parameter", "GradScaler", "torch.float16"),
    "fsdp1": ("FullyShardedDataParallel", "Parameter", "ShardedGradScaler", "torch.float16"),
    "fsdp2": ("FSDPNet", "DTensor", "GradScaler", "torch.float16"),
}
KINDS["fsdp1-flat"] = KINDS["fsdp1"]


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("sharding", KINDS)
def test_all_ranks_clip_in_one_reduction_skip_and_say_so_and_the_scheduler_waits(two, sharding, name):
    before = [SKIPPED[:step].count(False) for step in range(STEPS)]
    for report in two(train, sharding, name):
        assert report["kinds"] == KINDS[sharding]
        assert (report["skipped"], report["scales"], report["trackers"]) == (SKIPPED, SCALES, [1, 0, 1, 0, 0, 1])
        assert report["step_counts"] == {float(SKIPPED.count(False))}
        # Accelerate steps a scheduler once a rank.
        assert report["rates"] == [pytest.approx(2.0**-4 * DECAY ** (2 * count), rel=1e-12) for count in before]
        # None: all parameters, which takes one pass. Under DDP nobody else needs to be asked.
        assert report["clipped_by_scaler"] == [None] * STEPS
        assert report["collectives"] == [(0 if sharding == "ddp" else 1, 0)] * STEPS


@pytest.mark.parametrize(
    ("sharding", "name", "trained", "first_ours"),
    [
        ("ddp", "adamw-fused", 0, True),
        ("fsdp1", "adamw-fused", 3, True),  # loads no shards into an optimizer without state, whatever the scaler
        ("fsdp1-whole", "adamw-fused", 0, True),
        ("fsdp2", "adamw-fused", 0, True),
        ("fsdp2", "adamw", 3, True),
        ("ddp", "adamw-fused", 0, "guard"),
        ("fsdp1-whole", "adamw-fused", 3, "guard"),
        ("fsdp2", "adamw", 3, "guard"),
        # torch's scaler before ours
        ("ddp", "adamw", 0, False),
        ("fsdp1-whole", "adamw", 0, False),
        ("fsdp2", "adamw", 0, False),
    ],
)
def test_resumes_to_the_bit(two, tmp_path, sharding, name, trained, first_ours):
    for saved, loaded, straight, resumed in two(resume, sharding, name, tmp_path, trained, first_ours):
        assert loaded == saved
        assert resumed["skipped"] == [False, True, False, False]
        assert [resumed[what] for what in KEPT] == [straight[what] for what in KEPT]


def train_two(rank: int, sharding: str, name: str, *, bare: bool) -> tuple[Report, bool]:
    """Train by two optimizers, of which one holds only a bias, through Accelerate or as a bare loop does.

    Returns: a report, and whether this rank has never held a gradient of the second one's.
    """
    with launched(rank):
        accelerator = new_accelerator(sharding)
        scaler = use_scaler_triton(accelerator, growth_interval=1)
        net = jobs.new_net()
        small = [net.down.bias]
        optimizers = [new_optimizer(name, [p for p in net.parameters() if p is not net.down.bias])]
        optimizers.append(new_optimizer(name, small))
        model, *optimizers = accelerator.prepare(net, *optimizers)
        report, held_none = defaultdict(list), True
        for step in range(STEPS):
            x = torch.randn(jobs.BATCH, jobs.WIDTH, generator=torch.Generator().manual_seed(step))
            accelerator.backward(jobs.loss_of(model, x.chunk(2)[rank]))
            gradients = [p.grad for p in optimizers[1].param_groups[0]["params"] if p.grad is not None]
            held_none &= not any(values_of(gradient).numel() for gradient in gradients)
            if step in BAD_STEPS and (rank == 1 or sharding == "ddp"):
                jobs.overflow(optimizers[step == BAD_STEPS[1]].param_groups[0]["params"])
            for optimizer in optimizers:
                scaler.step(optimizer.optimizer) if bare else optimizer.step()
                if rank == 0:
                    scaler.get_scale()  # as for a logger
            if bare:
                scaler.update()
            for optimizer in optimizers:
                report["skipped"].append(scaler.was_skipped(optimizer.optimizer))
                optimizer.zero_grad()
            report["numbers"].append((scaler.get_scale(), scaler.stats().updates, scaler.stats().skipped))
        report["digests"] = jobs.digests(model)
        return report, held_none


@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
@pytest.mark.parametrize("sharding", ["ddp", "fsdp1", "fsdp2"])
def test_ranks_update_together_though_one_holds_no_gradient_of_the_second_optimizer(two, sharding, name):
    expected = two(train_two, sharding, name, bare=True)
    assert [held_none for _, held_none in expected] == [sharding == "fsdp1", False]
    assert two(train_two, sharding, name, bare=False) == expected
    report = expected[0][0]
    assert report["skipped"] == [each for step in range(STEPS) for each in ((step == 1, step == 4))]
    assert report["numbers"][-1] == (8.0 * 2.0**4 / 2.0**2, STEPS, 2)


def train_guarded_on(rank: int, sharding: str, name: str) -> tuple[Report, list[str], int]:
    """Train with a guard; return the report, how a run without the bad steps ends, and the number of spikes."""
    with launched(rank):
        job = Job(rank, sharding, name, ours="guard")
        report = job.train(range(STEPS), BAD_STEPS)
        spikes = job.scaler.stats().spikes
    with launched(rank):
        good = [step for step in range(STEPS) if step not in BAD_STEPS]
        return report, Job(rank, sharding, name, ours="guard").train(good, ())["digests"], spikes


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("sharding", ["ddp", "fsdp1", "fsdp2"])
def test_ranks_with_a_guard_skip_together_in_one_reduction(two, sharding, name):
    """Under DDP, too, where they need not trust that their gradients are equal."""
    for report, never_seen, spikes in two(train_guarded_on, sharding, name):
        assert report["kinds"] == (*KINDS[sharding][:2], StepGuard.__name__, "torch.bfloat16")
        assert (report["skipped"], report["scales"], spikes) == (SKIPPED, [1.0] * STEPS, 0)
        assert report["digests"] == never_seen
        assert report["clipped_by_scaler"] == [None] * STEPS
        assert report["collectives"] == [(1, 0)] * STEPS
