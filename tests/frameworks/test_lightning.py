"""Lightning's Trainer and Fabric: our plugin trains as theirs, clips whatever the optimizer, resumes; ranks agree."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import pytest
import torch
from jobs import BAD_STEPS, FUSED, SCALES, SETTINGS, STEPS, batches, loss_of, new_net, new_optimizer, whole
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, sharded_grad_scaler

import scaler_triton
from scaler_triton import GradScaler, ShardedGradScaler, patch_torch
from scaler_triton.integrations import lightning, versions

NAMESPACES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
}
MAX_NORM = 0.01  # small enough to clip at every step
QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
ONE = {"accelerator": "cpu", "devices": 1}
KINDS = pytest.mark.parametrize("kind", ["Trainer", "Fabric"])
OPTIMIZERS = pytest.mark.parametrize("optimizer", FUSED)
BETWEEN = "ran between clipping, which unscaled the gradients of SGD, and the step"


def space(name: str, kind: str) -> Any:
    """Import what one of Lightning's namespaces has for a Trainer or for a Fabric."""
    module = import_module(NAMESPACES[name][kind == "Fabric"])
    parts = {part: import_module(f"{module.__name__}.{part}") for part in ("plugins", "strategies")}
    return SimpleNamespace(module=module, cls=getattr(module, kind), **parts)


def ours(**options: Any) -> GradScaler:
    return GradScaler("cpu", **SETTINGS, **options)


def theirs() -> Any:
    return torch.amp.GradScaler("cpu", **SETTINGS)


def plugin(name: str, kind: str = "Trainer", scaler: Any = None, *, own: bool = False) -> Any:
    """Make our plugin, or Lightning's own with torch's scaler."""
    if own:
        return space(name, kind).plugins.MixedPrecision("16-mixed", "cpu", scaler or theirs())
    return lightning.mixed_precision(space(name, kind).cls, scaler or ours(), device="cpu")


Trace = list[tuple[Any, ...]]  # scale, growth tracker, learning rate and parameters after every step


def state_after(scaler: Any, optimizer: Any, module: nn.Module) -> tuple[Any, ...]:
    return scaler.get_scale(), scaler._get_growth_tracker(), optimizer.param_groups[0]["lr"], whole(module)


def assert_same(one: Trace, other: Trace) -> None:
    """Assert that two runs went alike, to the bit."""
    for mine, theirs in zip(one, other, strict=True):
        assert mine[:3] == theirs[:3]
        assert torch.equal(mine[3], theirs[3])
    assert not torch.equal(one[0][3], one[-1][3])  # it did train
    assert one[-1][3].isfinite().all()


def scales_of(trace: Trace) -> list[float]:
    return [scale for scale, *_ in trace]


def module_of(name: str, optimizer: str, data: Sequence[Tensor], decay: bool = False, **methods: Any) -> Any:
    """Make a LightningModule that trains the model on the data and keeps a trace."""

    class Module(space(name, "Trainer").module.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.trace, self.seen = new_net(), [], []

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return loss_of(self.net, batch)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen.append(self.net.up.weight.grad)

        def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
            self.trace.append(state_after(self.trainer.scaler, self.trainer.optimizers[0], self.net))

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(data, batch_size=None)

        def configure_optimizers(self) -> Any:
            made = new_optimizer(optimizer, self.parameters())
            scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
            return ([made], [{"scheduler": scheduler, "interval": "step"}]) if decay else made

    return type("Module", (Module,), methods)()


def fit(name: str, precision: Any, module: Any, **options: Any) -> Any:
    """Train by the Trainer; return the module."""
    path = options.pop("ckpt_path", None)
    trainer = space(name, "Trainer").cls(plugins=precision, **{**ONE, "max_epochs": 1, **QUIET, **options})
    trainer.fit(module, ckpt_path=path)
    module.last_trainer = trainer
    return module


class Loop:
    """A model and its optimizer, set up by Fabric."""

    def __init__(self, name: str, precision: Any, optimizer: str, **options: Any) -> None:
        self.fabric = space(name, "Fabric").cls(**ONE | options, plugins=precision)
        net = new_net()
        self.net, self.optimizer = self.fabric.setup(net, new_optimizer(optimizer, net.parameters()))
        self.scaler, self.trace = precision.scaler, []
        self.state = {"model": self.net, "optimizer": self.optimizer, "scaler": self.scaler}

    def backward(self, batch: Tensor) -> None:
        self.optimizer.zero_grad()
        self.fabric.backward(loss_of(self.net, batch.to(self.fabric.device)))

    def run(self, steps: slice = slice(None), **clip: Any) -> Loop:
        """Train on some of the batches; clip as `Fabric.clip_gradients` is told to."""
        for batch in batches()[steps]:
            self.backward(batch)
            if clip:
                self.fabric.clip_gradients(self.net, self.optimizer, error_if_nonfinite=False, **clip)
            self.optimizer.step()
            self.trace.append(state_after(self.scaler, self.optimizer, self.net))
        return self


def train(kind: str, name: str, precision: Any, optimizer: str, clip: str = "") -> Trace:
    """Train by the Trainer or in a Fabric loop."""
    if kind == "Fabric":
        return Loop(name, precision, optimizer).run(**({clip: MAX_NORM} if clip else {})).trace
    algorithm = {"max_norm": "norm", "clip_val": "value"}.get(clip)
    options = {"gradient_clip_val": MAX_NORM, "gradient_clip_algorithm": algorithm} if clip else {}
    return fit(name, precision, module_of(name, optimizer, batches(), decay=not clip), **options).trace


def by_hand(kind: str, optimizer_name: str, clip: str) -> Trace:
    """Train the same in a loop of one's own."""
    net, trace, scaler = new_net(), [], ours()
    optimizer = new_optimizer(optimizer_name, net.parameters())
    for batch in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(lambda x: net(x.half() if kind == "Fabric" else x), batch)  # as Fabric rounds it
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip == "clip_val":
            nn.utils.clip_grad_value_(net.parameters(), MAX_NORM)
        elif kind == "Fabric":
            nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        else:
            scaler.clip_grad_norm_(optimizer, MAX_NORM, parameters=net.parameters())
        scaler.step(optimizer)
        scaler.update()
        trace.append(state_after(scaler, optimizer, net))
    return trace


# The plugins.


@KINDS
@pytest.mark.parametrize("name", NAMESPACES)
def test_each_class_has_a_plugin_of_its_own(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(NAMESPACES[name][0])
    here = space(name, kind)
    mixed = lightning.mixed_precision(type("Mine", (here.cls,), {}), device="cpu")
    sharded = lightning.fsdp_precision(here.cls)
    for made, cls, scaler in ((mixed, "MixedPrecision", GradScaler), (sharded, "FSDPPrecision", ShardedGradScaler)):
        assert isinstance(made, getattr(here.plugins, cls))
        assert type(made).__qualname__ == cls  # the key in checkpoints
        assert (made.precision, type(made.scaler)) == ("16-mixed", scaler)
    with patch_torch():  # Lightning's own plugins make ours
        own = [here.plugins.MixedPrecision("16-mixed", "cpu"), here.plugins.FSDPPrecision("16-mixed")]
        assert [type(each.scaler) for each in own] == [GradScaler, ShardedGradScaler]
    for make in (lightning.mixed_precision, lightning.fsdp_precision):
        with pytest.raises(TypeError, match="scaler must be a GradScaler or ShardedGradScaler of scaler_triton"):
            make(here.cls, theirs())
    for other in (nn.Module, type("Model", (), {"__module__": "lightning.pytorch.core"}), "Trainer", None):
        with pytest.raises(TypeError, match="framework must be Lightning's class Trainer or Fabric"):
            lightning.mixed_precision(other, ours(), device="cpu")
    with pytest.raises(ValueError, match="does not use a scaler"):  # where it no longer does, pass the scaler on
        here.plugins.FSDPPrecision("16-mixed", sharded_grad_scaler.ShardedGradScaler("cpu"))
    assert scales_of(train(kind, name, plugin(name, kind), "adamw-fused")) == SCALES
    monkeypatch.setattr(versions, "version", lambda package: "1.0")
    monkeypatch.setattr(versions, "_warned", set())
    with pytest.warns(UserWarning, match=f"^{name.replace('_', '-')} 1.0 is installed") as caught:
        lightning.mixed_precision(here.cls, ours())
    assert caught[0].filename == __file__


# One process.


@KINDS
@OPTIMIZERS
def test_trains_as_lightnings_own_plugin(name: str, kind: str, optimizer: str) -> None:
    """Learning rates fall after skipped steps, too, as with Lightning's own."""
    mine = train(kind, name, plugin(name, kind), optimizer)
    for scaler in (theirs(), ours()):
        assert_same(mine, train(kind, name, plugin(name, kind, scaler, own=True), optimizer))
    assert scales_of(mine) == SCALES


@KINDS
@OPTIMIZERS
@pytest.mark.parametrize("clip", ["max_norm", "clip_val"])
def test_clips_as_by_hand(name: str, kind: str, optimizer: str, clip: str) -> None:
    mine = train(kind, name, plugin(name, kind), optimizer, clip)
    assert_same(mine, by_hand(kind, optimizer, clip))
    assert scales_of(mine) == SCALES
    if optimizer == "adamw-fused":  # where this no longer raises, Lightning has caught up: say so in docs/lightning.md
        with pytest.raises((RuntimeError, NotImplementedError), match="does not allow for grad|is not implemented"):
            train(kind, name, plugin(name, kind, own=True), optimizer, clip)


@OPTIMIZERS
@pytest.mark.parametrize(("saver", "loader"), [("ours", "ours"), ("ours", "own"), ("own", "ours")])
def test_the_trainer_resumes_to_the_bit(name: str, optimizer: str, saver: str, loader: str, tmp_path: Path) -> None:
    """Three steps, a checkpoint, three more; Lightning's own plugin with torch's scaler reads and writes the same."""
    path = tmp_path / "run.ckpt"
    first = fit(name, plugin(name, own=saver == "own"), module_of(name, optimizer, batches()[:3], decay=True))
    first.last_trainer.save_checkpoint(path)
    assert torch.load(path, weights_only=False)["MixedPrecision"] == first.last_trainer.scaler.state_dict()
    made = plugin(name, own=loader == "own")
    made.scaler.load_state_dict(made.scaler.state_dict() | {"scale": 2.0})  # the checkpoint's must replace it
    second = fit(name, made, module_of(name, optimizer, batches()[3:], decay=True), max_epochs=2, ckpt_path=path)
    assert_same(train("Trainer", name, plugin(name), optimizer)[3:], second.trace)


@OPTIMIZERS
def test_fabric_resumes_to_the_bit(name: str, optimizer: str, tmp_path: Path) -> None:
    """The scaler goes into the state that `Fabric.save` is given, as it has to with torch's."""
    whole_run, first, second = (Loop(name, plugin(name, "Fabric"), optimizer) for _ in range(3))
    first.run(slice(0, 3)).fabric.save(tmp_path / "run.ckpt", first.state)
    second.fabric.load(tmp_path / "run.ckpt", second.state)
    assert_same(whole_run.run().trace[3:], second.run(slice(3, 6)).trace)


def test_a_backward_between_clipping_and_step_is_refused_in_fabric(name: str) -> None:
    mine = Loop(name, plugin(name, "Fabric"), "sgd")
    mine.backward(batches()[0])
    mine.fabric.clip_gradients(mine.net, mine.optimizer, clip_val=MAX_NORM)
    with pytest.raises(RuntimeError, match=BETWEEN):
        mine.backward(batches()[0])
    mine.scaler.update()  # the step is left out
    mine.run(slice(1), clip_val=MAX_NORM)
    expected = Loop(name, plugin(name, "Fabric"), "sgd").run(slice(1), clip_val=MAX_NORM)
    assert torch.equal(whole(mine.net), whole(expected.net))


def test_hooks_see_unscaled_gradients_whatever_the_optimizer(name: str) -> None:
    net = new_net()
    loss_of(net, batches()[0]).backward()
    for optimizer in FUSED:
        seen = fit(name, plugin(name), module_of(name, optimizer, batches()[:1])).seen
        torch.testing.assert_close(seen[0], net.up.weight.grad, rtol=0.02, atol=1e-3)  # fp16 there, fp32 here


@OPTIMIZERS
def test_accumulates_and_a_training_step_may_return_none(name: str, optimizer: str) -> None:
    """Then nothing is unscaled, clipped or stepped, and the next batch goes on."""
    for options in ({"accumulate_grad_batches": 2}, {"gradient_clip_val": 1e9 if optimizer == "adamw" else None}):
        traces = []
        for own in (False, True):
            module = module_of(name, optimizer, batches(), on_before_optimizer_step=lambda self, optimizer: None)
            if "gradient_clip_val" in options:
                step = module.training_step
                module.training_step = lambda batch, index, step=step: step(batch, index) if index != 2 else None
            traces.append(fit(name, plugin(name, own=own), module, **options).trace)
        assert_same(*traces)


def pair_of(name: str, optimizer: str, step: Any) -> Any:
    """Make a LightningModule with two optimizers, whose training step is `step(module, loss)`, by hand."""

    def configure_optimizers(self: Any) -> Any:
        self.automatic_optimization = False
        return [new_optimizer(optimizer, part.parameters()) for part in (self.net.up, self.net.down)]

    return module_of(
        name,
        "",
        batches(bad=()),
        configure_optimizers=configure_optimizers,
        on_before_optimizer_step=lambda self, optimizer: None,
        training_step=lambda self, batch, index: step(self, lambda: loss_of(self.net, batch)),
    )


def in_turn(clips: str, module: Any, loss: Any) -> None:
    """Clip both optimizers by 1 exactly, or none, then step them; the second is clipped once more in between."""
    one, other = module.optimizers()
    one.zero_grad()
    other.zero_grad()
    module.manual_backward(loss())
    for each in [one, other] * bool(clips):
        module.clip_gradients(each, 1e9, clips)
    one.step()
    if clips:
        module.clip_gradients(other, 1e9, clips)
    other.step()


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused"])
def test_two_optimizers_are_clipped_before_either_steps(name: str, optimizer: str) -> None:
    """The first one's step updates the scale, and must not have the other's gradients divided a second time."""
    ended = []
    for clips in ("", "norm", "value"):
        scaler = GradScaler("cpu", init_scale=8.0)  # which does not grow: unclipped gradients would be divided by it
        module = fit(name, plugin(name, scaler=scaler), pair_of(name, optimizer, partial(in_turn, clips)))
        ended.append(whole(module.net))
    assert torch.equal(ended[0], ended[1])
    assert torch.equal(ended[0], ended[2])


def hasty(toggles: bool, steps_between: bool, module: Any, loss: Any) -> None:
    """Clip the gradients of both optimizers, each after a backward of its own, and step then."""
    for optimizer in module.optimizers():
        if toggles:
            module.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        module.manual_backward(loss())
        module.clip_gradients(optimizer, MAX_NORM, "norm")
        if toggles:
            module.untoggle_optimizer(optimizer)
    one, other = module.optimizers()
    one.step()
    if steps_between:
        module.manual_backward(loss())
    other.step()


def test_a_backward_that_adds_to_unscaled_gradients_is_refused(name: str) -> None:
    made = plugin(name)
    for toggles, steps_between in ((False, False), (True, True)):
        with pytest.raises(RuntimeError, match=BETWEEN):
            fit(name, made, pair_of(name, "sgd", partial(hasty, toggles, steps_between)))
    before = made.scaler.stats().updates
    fit(name, made, pair_of(name, "sgd", partial(hasty, True, False)))  # a backward touches only what it is to
    assert made.scaler.stats().updates == before + 2 * STEPS


def test_a_run_that_was_interrupted_in_a_step_leaves_nothing_to_the_next(name: str) -> None:
    made, module, kept = plugin(name), module_of(name, "sgd", batches()), []

    def interrupt(optimizer: Any) -> None:
        kept.append(optimizer)  # as a traceback might
        raise ValueError("interrupted")

    seen, module.on_before_optimizer_step = module.on_before_optimizer_step, interrupt
    with pytest.raises(ValueError, match="interrupted"):
        fit(name, made, module)
    module.on_before_optimizer_step = seen
    assert_same(fit(name, made, module).trace, fit(name, plugin(name), module_of(name, "sgd", batches())).trace)


def test_a_plugin_can_be_copied_pickled_and_keeps_no_model(name: str) -> None:
    made, module = plugin(name), module_of(name, "sgd", batches())
    fit(name, made, module, gradient_clip_val=MAX_NORM)
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(twin) is type(made)
        assert twin.scaler.state_dict() == made.scaler.state_dict()
        assert twin.scaler is not made.scaler
    weight = weakref.ref(module.net.up.weight)
    del module
    gc.collect()
    assert weight() is None


def test_a_disabled_scaler_clips_too_and_lbfgs_is_refused(name: str) -> None:
    module = module_of(name, "sgd", batches(bad=()), on_train_batch_end=lambda self, outputs, batch, index: None)
    before = whole(module.net)
    fit(name, plugin(name, scaler=ours(enabled=False)), module, gradient_clip_val=0.001)
    moved = (whole(module.net) - before).norm().item()
    assert 0 < moved <= STEPS * 2.0**-4 * 0.001 * 1.01  # lr times the norm, a step; 1 % for rounding the weights
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())
    with pytest.raises(Exception, match="LBFGS optimizer are not compatible"):
        fit(name, plugin(name), module)


# Ranks, one of which overflows: both skip, hold one scale, and train as one process does.

# How far the weights may end from one process's. Gradients are the same but for the order of sums in fp32; Lightning
# has FSDP1 keep and reduce them in fp16.
TOLERANCES = {"ddp": 1e-6, "fsdp1": 1e-3, "no-shard": 1e-3, "fsdp2": 1e-6}


def environment(rank: int, kind: str, name: str) -> Any:
    """Make a cluster environment for processes that are there already, with their group."""
    base = import_module(f"{NAMESPACES[name][1]}.plugins.environments").ClusterEnvironment
    methods = {"detect": lambda: True, "world_size": lambda: 2, "node_rank": lambda: 0}
    methods |= {"set_world_size": lambda value: None, "set_global_rank": lambda value: None}
    methods |= {"global_rank": lambda: rank, "local_rank": lambda: rank}
    fixed = {"creates_processes_externally": True, "main_address": "127.0.0.1", "main_port": 0}
    return type("Ranks", (base,), fixed | {name: staticmethod(method) for name, method in methods.items()})()


def on_cpu(strategy: Any, sharding: str, **options: Any) -> Any:
    """Make Lightning's FSDP strategy for CPUs: it goes on with a model that is wrapped already."""

    class OnCpu(strategy):  # type: ignore[misc]
        def _setup_model(self, model: nn.Module) -> nn.Module:
            return super()._setup_model(self._wrapped(model))

        def setup_module(self, module: nn.Module) -> nn.Module:
            return super().setup_module(self._wrapped(module))

        def _wrapped(self, model: nn.Module) -> nn.Module:
            options = {"mixed_precision": self.mixed_precision_config, "sharding_strategy": self.sharding_strategy}
            return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True, **options)

    return OnCpu(sharding_strategy=sharding, **options)


def parts(kind: str, name: str, strategy: str) -> tuple[Any, Any]:
    """Make plugin and strategy: "ddp", "fsdp2", "fsdp1", "no-shard" of FSDP1, or "torch": FSDP1 with torch's scaler."""
    here = space(name, kind)
    if strategy == "ddp":
        return plugin(name, kind), here.strategies.DDPStrategy()
    if strategy == "fsdp2":
        sizes: dict[str, Any] = {"data_parallel_size": 2, "tensor_parallel_size": 1}
        if kind == "Fabric":
            sizes["parallelize_fn"] = lambda net, mesh: jobs.shard(net, mesh["data_parallel"])
        return plugin(name, kind), here.strategies.ModelParallelStrategy(**sizes)
    made = here.plugins.FSDPPrecision("16-mixed") if strategy == "torch" else lightning.fsdp_precision(here.cls)
    made.scaler = (sharded_grad_scaler if strategy == "torch" else scaler_triton).ShardedGradScaler("cpu", **SETTINGS)
    made.forward_context = lambda: torch.autocast("cpu", torch.float16)  # Lightning's is for GPUs only
    sharding = "NO_SHARD" if strategy == "no-shard" else "FULL_SHARD"
    return made, on_cpu(here.strategies.FSDPStrategy, sharding, state_dict_type="sharded")


def data_of(rank: int) -> list[Tensor]:
    """Return this rank's batches; those of one rank overflow."""
    return batches(part=rank, bad=BAD_STEPS if rank == 1 else ())


def on_ranks(rank: int, kind: str, name: str, strategy: str, optimizer: str, clip: str) -> tuple[list[float], Tensor]:
    """Train under a strategy; return the scale after every step, and all parameters."""
    if kind == "Trainer":
        clipping = {"gradient_clip_val": MAX_NORM if clip else None}
        trainer, module = trainer_on(rank, name, strategy, optimizer, data_of(rank), max_epochs=1, **clipping)
        trainer.fit(module)
        return module.scales, whole(trainer.strategy.model)
    made, chosen = parts(kind, name, strategy)
    options = {"plugins": [made, environment(rank, kind, name)], "strategy": chosen}
    fabric = space(name, kind).cls(accelerator="cpu", devices=2, **options)
    fabric.launch()
    net, scales = fabric.setup_module(new_net()), []
    wrapped = fabric.setup_optimizers(new_optimizer(optimizer, net.parameters()))
    for batch in data_of(rank):
        wrapped.zero_grad()
        fabric.backward(loss_of(net, batch))
        if clip == "fabric":
            fabric.clip_gradients(net, wrapped, max_norm=MAX_NORM, error_if_nonfinite=False)
        elif clip == "scaler":
            made.scaler.clip_grad_norm_(wrapped, MAX_NORM, model=net)
        wrapped.step()
        scales.append(made.scaler.get_scale())
    return scales, whole(net)


def trainer_on(rank: int, name: str, strategy: str, optimizer: str, data: list[Tensor], **options: Any) -> Any:
    """Make a Trainer for two ranks, and its module."""
    made, chosen = parts("Trainer", name, strategy)
    plugins = [made, environment(rank, "Trainer", name)]
    options |= {"accelerator": "cpu", "devices": 2, "use_distributed_sampler": False}
    trainer = space(name, "Trainer").cls(strategy=chosen, plugins=plugins, **QUIET, **options)

    def configure_model(self: Any) -> None:
        if strategy == "fsdp2":
            jobs.shard(self.net, self.device_mesh["data_parallel"])

    hooks = {"configure_model": configure_model, "on_before_optimizer_step": lambda self, optimizer: None}
    hooks["on_train_batch_end"] = lambda self, *arguments: self.scales.append(self.trainer.scaler.get_scale())
    module = module_of(name, optimizer, data, **hooks)
    module.scales = []
    return trainer, module


def in_one_process(optimizer_name: str, clip: str) -> Tensor:
    """Train on both ranks' batches by torch's scaler; the bad steps are skipped."""
    net, scaler = new_net(), theirs()
    optimizer = new_optimizer(optimizer_name, net.parameters())
    for pair in zip(data_of(0), data_of(1), strict=True):
        optimizer.zero_grad()
        for batch in pair:
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(net, batch) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM if clip else 1e9)
        scaler.step(optimizer)
        scaler.update()
    return whole(net)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "strategy", "optimizer", "clip"),
    [
        *(("Trainer", strategy, "sgd-fused", clip) for strategy in ("ddp", "fsdp1") for clip in ("", "trainer")),
        ("Trainer", "no-shard", "adamw-fused", "trainer"),
        ("Trainer", "fsdp2", "adamw-fused", "trainer"),
        ("Trainer", "fsdp2", "sgd", ""),
        *(("Fabric", strategy, "sgd", clip) for strategy in ("ddp", "fsdp1", "fsdp2") for clip in ("fabric", "scaler")),
        ("Fabric", "fsdp1", "adamw-fused", "fabric"),
    ],
)
def test_ranks_skip_together(two: Any, name: str, kind: str, strategy: str, optimizer: str, clip: str) -> None:
    (scales, mine), (other_scales, other) = two(on_ranks, kind, name, strategy, optimizer, clip)
    assert scales == other_scales == SCALES
    assert torch.equal(mine, other)
    expected = in_one_process(optimizer.removesuffix("-fused"), clip)
    torch.testing.assert_close(mine, expected, rtol=0, atol=TOLERANCES[strategy])


def resumed(rank: int, name: str, optimizer: str, folder: str, saver: str, loader: str) -> tuple[list[float], bool]:
    """Save after three FSDP1 steps and go on in a new Trainer: the scales, and whether it ends as a whole run does."""
    path, ends, scales = f"{folder}/run.ckpt", {}, {}
    for which, strategy, steps in ("whole", saver, [0, 6]), ("first", saver, [0, 3]), ("second", loader, [3, 6]):
        data, last = data_of(rank)[slice(*steps)], which == "second"
        trainer, module = trainer_on(rank, name, strategy, optimizer, data, max_epochs=1 + last)
        if last:  # without the checkpoint it would begin at the scale that the run had by then
            trainer.scaler.load_state_dict(trainer.scaler.state_dict() | {"scale": 2.0})
        trainer.fit(module, ckpt_path=path if last else None)
        if which == "first":
            trainer.save_checkpoint(path)
        ends[which], scales[which] = whole(trainer.strategy.model), module.scales
    assert scales["first"] + scales["second"] == scales["whole"]
    return scales["whole"], torch.equal(ends["whole"], ends["second"])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("saver", "loader", "optimizer"),
    [
        ("fsdp1", "fsdp1", "adamw-fused"),
        # Lightning's own plugin with torch's scaler, which splits the ranks of a fused optimizer.
        ("torch", "fsdp1", "adamw"),
        ("fsdp1", "torch", "adamw"),
    ],
)
def test_fsdp_resumes_to_the_bit(two: Any, name: str, saver: str, loader: str, optimizer: str, tmp_path: Path) -> None:
    assert two(resumed, name, optimizer, str(tmp_path), saver, loader) == [(SCALES, True)] * 2
