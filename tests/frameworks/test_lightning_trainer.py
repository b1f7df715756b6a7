"""Lightning's Trainer on one device: with our plugin it trains as with its own, and clips fused optimizers too."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import lightning_cases as cases
import pytest
import torch
from torch import Tensor, nn

from scaler_triton import GradScaler
from scaler_triton.integrations import lightning

pytestmark = [pytest.mark.filterwarnings(known) for known in cases.KNOWN_WARNINGS]


def plugin(name: str, **options: Any) -> Any:
    return lightning.mixed_precision(cases.namespace(name).Trainer, cases.ours(**options), device="cpu")


def lightnings_own(name: str, scaler: Any) -> Any:
    return cases.namespace(name).trainer_plugins.MixedPrecision("16-mixed", "cpu", scaler)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "sgd-fused"])
@pytest.mark.parametrize("scaler", [cases.ours, cases.theirs])
def test_trains_as_lightnings_own_plugin(name: str, optimizer: str, scaler: Any) -> None:
    module = cases.fit(name, plugin(name), optimizer, decay=True)
    own = cases.fit(name, lightnings_own(name, scaler()), optimizer, decay=True)
    module.trace.assert_same(own.trace)
    assert module.trace.scales == cases.SCALES
    assert module.trace.rates == [0.1 * 0.5**step for step in range(1, 7)]  # also after skipped steps


def test_is_lightnings_own_class_by_name_and_kind(name: str) -> None:
    space, made = cases.namespace(name), plugin(name)
    assert isinstance(made, space.trainer_plugins.MixedPrecision)
    assert type(made).__qualname__ == "MixedPrecision"  # the key in checkpoints
    assert space.Trainer(plugins=made, accelerator="cpu", **cases.QUIET).scaler is made.scaler


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "sgd-fused"])
def test_clips_by_norm(name: str, optimizer: str) -> None:
    module = cases.fit(name, plugin(name), optimizer, gradient_clip_val=cases.MAX_NORM)
    module.trace.assert_same(cases.by_hand(cases.ours(), optimizer, cases.clip))
    assert module.trace.scales == cases.SCALES


def test_clips_as_lightnings_own_plugin(name: str) -> None:
    module = cases.fit(name, plugin(name), "sgd", gradient_clip_val=cases.MAX_NORM)
    own = cases.fit(name, lightnings_own(name, cases.theirs()), "sgd", gradient_clip_val=cases.MAX_NORM)
    for mine, other in zip(module.trace.weights, own.trace.weights, strict=True):
        # torch sums the norm in fp32, we in fp64: its last bits differ.
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
    assert module.trace.scales == own.trace.scales == cases.SCALES


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "sgd-fused"])
def test_clips_by_value(name: str, optimizer: str) -> None:
    def clip(scaler: GradScaler, optimizer: Any, net: nn.Module) -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(net.parameters(), cases.MAX_NORM)

    options = {"gradient_clip_val": cases.MAX_NORM, "gradient_clip_algorithm": "value"}
    module = cases.fit(name, plugin(name), optimizer, **options)
    module.trace.assert_same(cases.by_hand(cases.ours(), optimizer, clip))


def test_lightnings_own_plugin_refuses_to_clip_a_fused_optimizer(name: str) -> None:
    """If this fails, Lightning has caught up: say so in docs/lightning.md."""
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        cases.fit(name, lightnings_own(name, cases.ours()), "adamw-fused", gradient_clip_val=1.0)


def test_hooks_see_unscaled_gradients_whatever_the_optimizer(name: str) -> None:
    plain = cases.fit(name, plugin(name), "adamw")
    fused = cases.fit(name, plugin(name), "adamw-fused")
    assert torch.equal(plain.seen[0], fused.seen[0])
    net = cases.network()
    (net(cases.batches()[0]).square().mean()).backward()
    torch.testing.assert_close(fused.seen[0], net[0].weight.grad, rtol=0.02, atol=1e-4)  # fp16 there, fp32 here


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
def test_accumulates(name: str, optimizer: str) -> None:
    module = cases.fit(name, plugin(name), optimizer, accumulate_grad_batches=2)
    own = cases.fit(name, lightnings_own(name, cases.theirs()), optimizer, accumulate_grad_batches=2)
    module.trace.assert_same(own.trace)
    assert module.trace.scales == [8.0, 4.0, 4.0, 4.0, 4.0, 2.0]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("saver", ["ours", "theirs"])
@pytest.mark.parametrize("loader", ["ours", "theirs"])
def test_resumes_to_the_bit(name: str, optimizer: str, saver: str, loader: str, tmp_path: Path) -> None:
    """Three steps, a checkpoint, three more; Lightning's own plugin with torch's scaler reads and writes the same."""
    space, path = cases.namespace(name), tmp_path / "run.ckpt"
    plugins = {"ours": lambda: plugin(name), "theirs": lambda: lightnings_own(name, cases.theirs())}
    options = {"accelerator": "cpu", "devices": 1} | cases.QUIET
    first = cases.module_of(space.pl, optimizer, cases.batches()[:3], decay=True)
    trainer = space.Trainer(plugins=plugins[saver](), max_epochs=1, **options)
    trainer.fit(first)
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)["MixedPrecision"]
    assert saved == trainer.scaler.state_dict()
    second = cases.module_of(space.pl, optimizer, cases.batches()[3:], decay=True)
    trainer = space.Trainer(plugins=plugins[loader](), max_epochs=2, **options)
    # Without the checkpoint it would begin at the scale that the run had by then.
    trainer.scaler.load_state_dict(trainer.scaler.state_dict() | {"scale": 2.0})
    trainer.fit(second, ckpt_path=path)
    whole = cases.fit(name, plugin(name), optimizer, decay=True)
    whole.trace.assert_same(second.trace, since=3)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.:UserWarning")  # it did
@pytest.mark.parametrize("clip", [None, 1e9])  # so large that both clip by 1 exactly
def test_a_training_step_may_return_none(name: str, clip: float | None) -> None:
    """Then nothing is unscaled, clipped or stepped, and the next batch goes on."""
    space = cases.namespace(name)
    traces = []
    for each in (plugin(name), lightnings_own(name, cases.theirs())):
        module = cases.module_of(space.pl, "adamw", cases.batches())
        step = module.training_step
        module.training_step = lambda batch, index, step=step: step(batch, index) if index != 2 else None
        module.on_before_optimizer_step = lambda optimizer: None
        options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "gradient_clip_val": clip} | cases.QUIET
        space.Trainer(plugins=each, **options).fit(module)
        traces.append(module.trace)
    traces[0].assert_same(traces[1])
    assert torch.equal(traces[0].weights[1], traces[0].weights[2])


def gan_of(pl: Any, optimizer: str, algorithm: str) -> Any:
    """Make a LightningModule with two optimizers that steps and clips by hand."""

    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.judge, self.trace = nn.Linear(5, 5), nn.Linear(5, 1), cases.Trace()

        def training_step(self, batch: Tensor, index: int) -> None:
            for which, optimizer in enumerate(self.optimizers()):
                optimizer.zero_grad()
                fake = self.judge(self.generator(batch)).float()
                self.manual_backward(fake.square().mean() if which else (fake - 1).square().mean())
                self.clip_gradients(optimizer, cases.MAX_NORM, algorithm)
                optimizer.step()
            self.trace.add(self.trainer.scaler, self.trainer.optimizers[0], self)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(cases.batches(), batch_size=None)

        def configure_optimizers(self) -> Any:
            return [cases.new_optimizer(optimizer, part.parameters()) for part in (self.generator, self.judge)]

    torch.manual_seed(0)
    return Gan()


def gan_by_hand(made: Any, optimizer: str, algorithm: str) -> cases.Trace:
    """The same without the Trainer: a scale, step and update for each optimizer, under the plugin's autocast."""
    torch.manual_seed(0)
    generator, judge, trace, scaler = nn.Linear(5, 5), nn.Linear(5, 1), cases.Trace(), made.scaler
    both = nn.ModuleList([generator, judge])
    optimizers = [cases.new_optimizer(optimizer, part.parameters()) for part in both]
    for batch in cases.batches():
        with made.train_step_context():
            for which, each in enumerate(optimizers):
                each.zero_grad()
                fake = judge(generator(batch)).float()
                scaler.scale(fake.square().mean() if which else (fake - 1).square().mean()).backward()
                scaler.unscale_(each)
                if algorithm == "norm":
                    scaler.clip_grad_norm_(each, cases.MAX_NORM, parameters=both[which].parameters())
                else:
                    nn.utils.clip_grad_value_(both[which].parameters(), cases.MAX_NORM)
                scaler.step(each)
                scaler.update()
        trace.add(scaler, optimizers[0], both)
    return trace


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_two_optimizers_clipped_by_hand(name: str, optimizer: str, algorithm: str) -> None:
    space = cases.namespace(name)
    module = gan_of(space.pl, optimizer, algorithm)
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1} | cases.QUIET
    space.Trainer(plugins=plugin(name), **options).fit(module)
    module.trace.assert_same(gan_by_hand(plugin(name), optimizer, algorithm))


def pair_of(pl: Any, optimizer: str, step: Any) -> Any:
    """Make a LightningModule with two optimizers, whose training step is `step(module, loss)`."""

    class Pair(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.encoder, self.head = nn.Linear(5, 5), nn.Linear(5, 1)

        def training_step(self, batch: Tensor, index: int) -> None:
            step(self, lambda: self.head(self.encoder(batch)).float().square().mean())

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(cases.batches(bad=()), batch_size=None)

        def configure_optimizers(self) -> Any:
            return [cases.new_optimizer(optimizer, part.parameters()) for part in (self.encoder, self.head)]

    torch.manual_seed(0)
    return Pair()


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_two_optimizers_are_clipped_before_either_steps(name: str, optimizer: str, algorithm: str) -> None:
    """The first one's step updates the scale, and must not have the other's gradients divided a second time."""

    def step(clips: bool, module: Any, loss: Any) -> None:
        one, other = module.optimizers()
        one.zero_grad()
        other.zero_grad()
        module.manual_backward(loss())
        for each in [one, other] * clips:
            module.clip_gradients(each, 1e9, algorithm)  # by 1 exactly
        one.step()
        if clips:
            module.clip_gradients(other, 1e9, algorithm)
        other.step()

    space, trained = cases.namespace(name), []
    for clips in (True, False):
        module, scaler = pair_of(space.pl, optimizer, partial(step, clips)), GradScaler("cpu", init_scale=8.0)
        made = lightning.mixed_precision(space.Trainer, scaler, device="cpu")
        space.Trainer(plugins=made, accelerator="cpu", devices=1, max_epochs=1, **cases.QUIET).fit(module)
        trained.append(cases.values(module))
    assert torch.equal(*trained)


def hasty_step(toggles: bool, module: Any, loss: Any) -> None:
    """Clip the gradients of both optimizers, each after a backward of its own, and step then."""
    for optimizer in module.optimizers():
        if toggles:
            module.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        module.manual_backward(loss())
        module.clip_gradients(optimizer, cases.MAX_NORM, "norm")
        if toggles:
            module.untoggle_optimizer(optimizer)
    for optimizer in module.optimizers():
        optimizer.step()


def test_a_backward_that_adds_to_unscaled_gradients_is_refused(name: str) -> None:
    space, made = cases.namespace(name), plugin(name)
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1} | cases.QUIET
    hasty = pair_of(space.pl, "sgd", partial(hasty_step, False))
    with pytest.raises(
        RuntimeError, match="written gradients of SGD between clipping, which unscaled them, and the step"
    ):
        space.Trainer(plugins=made, **options).fit(hasty)
    patient = pair_of(space.pl, "sgd", partial(hasty_step, True))  # a backward touches only what it is to
    space.Trainer(plugins=made, **options).fit(patient)
    assert made.scaler.stats().updates == 2 * cases.STEPS


def test_a_backward_before_a_step_that_waits_for_anothers_is_refused(name: str) -> None:
    def step(module: Any, loss: Any) -> None:
        one, other = module.optimizers()
        module.manual_backward(loss())
        for each in (one, other):
            module.clip_gradients(each, cases.MAX_NORM, "norm")
        one.step()
        module.manual_backward(loss())
        other.step()

    space, made = cases.namespace(name), plugin(name)
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1} | cases.QUIET
    with pytest.raises(RuntimeError, match="written gradients of SGD between clipping"):
        space.Trainer(plugins=made, **options).fit(pair_of(space.pl, "sgd", step))


def test_a_run_that_was_interrupted_in_a_step_leaves_nothing_to_the_next(name: str) -> None:
    space, made = cases.namespace(name), plugin(name)
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1} | cases.QUIET
    module = cases.module_of(space.pl, "sgd", cases.batches())
    kept = []  # as a traceback might

    def interrupt(optimizer: Any) -> None:
        kept.append(optimizer)
        raise ValueError("interrupted")

    before = cases.values(module.net)
    seen, module.on_before_optimizer_step = module.on_before_optimizer_step, interrupt
    with pytest.raises(ValueError, match="interrupted"):
        space.Trainer(plugins=made, **options).fit(module)
    assert torch.equal(cases.values(module.net), before)
    module.on_before_optimizer_step = seen
    space.Trainer(plugins=made, **options).fit(module)
    module.trace.assert_same(cases.fit(name, plugin(name), "sgd").trace)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.:UserWarning")  # it did
def test_a_step_without_backward_is_forgotten_by_the_next_run(name: str) -> None:
    space, made = cases.namespace(name), plugin(name)
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1} | cases.QUIET
    first = cases.module_of(space.pl, "sgd", cases.batches())
    first.training_step = lambda batch, batch_idx: None
    first.on_before_optimizer_step = first.on_train_batch_end = lambda *arguments: None
    space.Trainer(plugins=made, **options).fit(first)
    second = gan_of(space.pl, "sgd", "norm")
    space.Trainer(plugins=made, **options).fit(second)
    second.trace.assert_same(gan_by_hand(plugin(name), "sgd", "norm"))


def test_a_plugin_that_outlives_its_trainer_keeps_no_model(name: str) -> None:
    space, made = cases.namespace(name), plugin(name)
    module = cases.module_of(space.pl, "sgd", cases.batches())
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "gradient_clip_val": cases.MAX_NORM} | cases.QUIET
    space.Trainer(plugins=made, **options).fit(module)
    weight = weakref.ref(module.net[0].weight)
    del module
    gc.collect()
    assert weight() is None


def test_a_disabled_scaler_clips_too(name: str) -> None:
    module = cases.module_of(cases.namespace(name).pl, "sgd", cases.batches(bad=()))
    module.on_train_batch_end = lambda outputs, batch, index: None
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "gradient_clip_val": 0.0001} | cases.QUIET
    before = cases.values(module.net)
    cases.namespace(name).Trainer(plugins=plugin(name, enabled=False), **options).fit(module)
    moved = (cases.values(module.net) - before).norm().item()
    assert 0 < moved <= cases.STEPS * 0.1 * 0.0001 * 1.01  # lr times the norm, a step; 1 % for rounding the weights


def test_lbfgs_is_refused_as_by_lightning(name: str) -> None:
    space = cases.namespace(name)
    module = cases.module_of(space.pl, "sgd", cases.batches())
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1} | cases.QUIET
    with pytest.raises(Exception, match="LBFGS optimizer are not compatible"):
        space.Trainer(plugins=plugin(name), **options).fit(module)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_can_be_copied_and_pickled(name: str, copied: Any) -> None:
    made = plugin(name)
    made.scaler.scale(torch.ones(()))
    twin = copied(made)
    assert type(twin) is type(made)
    assert twin.scaler.state_dict() == made.scaler.state_dict()
    assert twin.scaler is not made.scaler
