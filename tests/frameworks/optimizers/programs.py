"""Programs with optimizers and wrappers of other packages, each as a user would write it.

A program takes a scaler's class. It trains a small net twice, with a new scaler of that class and with none at all, and
returns both runs' weights, which are equal where the scaler works. Where a batch overflows, the run without a scaler
leaves that batch out.
"""

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from peer import imported, make_importable
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]
Program = Callable[[Any], tuple[Tensor, Tensor]]
PROGRAMS: dict[str, Program] = {}


def program(bad: int | None = None) -> Callable[[Callable[[Any, Batches], nn.Module]], Program]:
    """Make a program of a function that trains with a scaler on batches; one of them may overflow."""

    def register(run: Callable[[Any, Batches], nn.Module]) -> Program:
        def both(scaler_class: Any) -> tuple[Tensor, Tensor]:
            is_guard = scaler_class.__name__ == "StepGuard"
            scaler = scaler_class("cpu") if is_guard else scaler_class("cpu", init_scale=1024.0)
            batches = list(drawn())
            trained = run(scaler, [(x * torch.inf, y) if at == bad else (x, y) for at, (x, y) in enumerate(batches)])
            without = [batch for at, batch in enumerate(batches) if at != bad]
            return weights(trained), weights(run(torch.amp.GradScaler("cpu", enabled=False), without))

        both.__doc__ = run.__doc__
        PROGRAMS[run.__name__] = both
        return both

    return register


def drawn() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield six batches."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        yield torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


def weights(model: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def new_model() -> nn.Module:
    """Return the net with its first weights, and seed what optimizers draw."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def loss_of(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the loss of a batch."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def train(model: Any, outer: Any, scaler: Any, batches: Batches, inner: Any = None, **backward: Any) -> nn.Module:
    """Train as usual; with `inner`, its gradients are unscaled and clipped, and `outer` steps."""
    for batch in batches:
        outer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward(**backward)
        if inner is not None:
            scaler.unscale_(inner)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(outer)
        scaler.update()
    return model  # type: ignore[no-any-return]


# The wrapper steps, what it wraps was unscaled.


@program()
def schedulefree_unscales_inner(scaler: Any, batches: Batches) -> nn.Module:
    """schedulefree's `ScheduleFreeWrapper` steps, its `.base` was unscaled."""
    model = new_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = imported("schedulefree").ScheduleFreeWrapper(inner, momentum=0.9)
    outer.train()
    return train(model, outer, scaler, batches, inner)


@program()
def torchft_unscales_inner(scaler: Any, batches: Batches) -> nn.Module:
    """torchft's `OptimizerWrapper` steps, its `.optim` was unscaled."""
    model = new_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = imported("torchft.optim").OptimizerWrapper(manager(), inner)
    return train(model, outer, scaler, batches, inner)


@program()
def timm_unscales_inner(scaler: Any, batches: Batches) -> nn.Module:
    """timm's `Lookahead` steps, its `._base_optimizer` was unscaled."""
    if find_spec("torchvision"):  # without it there is no timm, either
        make_importable()
    model = new_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(model, imported("timm.optim").Lookahead(inner, k=2), scaler, batches, inner)


@program()
def adascale_unscales_inner(scaler: Any, batches: Batches) -> nn.Module:
    """fairscale's `AdaScale` steps, what it wraps was unscaled."""
    model = new_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return accumulate(model, adascale(inner), scaler, batches, inner)


@program()
def opacus_unscales_inner(scaler: Any, batches: Batches) -> nn.Module:
    """Opacus' `DPOptimizer` steps, its `.original_optimizer` was unscaled."""
    model, outer = private(torch.optim.SGD)
    return train(model, outer, scaler, batches, outer.original_optimizer)


def manager() -> Any:
    """Return what a wrapper of torchft's asks: whether all replicas are well."""
    return SimpleNamespace(should_commit=lambda: True, start_quorum=lambda: None)


# AdaScale forwards what it lacks to the optimizer that it wraps, and its hooks look at scaled gradients.


def adascale(inner: Any) -> Any:
    """Return fairscale's AdaScale, for two backward passes a step."""
    return imported("fairscale.optim").AdaScale(inner, num_gradients_to_accumulate=2)


def accumulate(model: nn.Module, outer: Any, scaler: Any, batches: Batches, inner: Any = None) -> nn.Module:
    """Train with two backward passes a step, as AdaScale needs it."""
    for xs, ys in batches:
        outer.zero_grad()
        for batch in zip(xs.chunk(2), ys.chunk(2), strict=True):
            scaler.scale(loss_of(model, batch) / 2).backward()
        if inner is not None:
            scaler.unscale_(inner)
        scaler.step(outer)
        scaler.update()
    outer.unhook()
    return model


@program()
def adascale_around_fused_sgd(scaler: Any, batches: Batches) -> nn.Module:
    """`AdaScale` around torch's fused SGD."""
    model = new_model()
    outer = adascale(torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
    return accumulate(model, outer, scaler, batches)


@program()
def adascale_around_fused_adamw(scaler: Any, batches: Batches) -> nn.Module:
    """`AdaScale` around torch's fused AdamW."""
    model = new_model()
    outer = adascale(torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2, fused=True))  # Adam hides factors from 0
    return accumulate(model, outer, scaler, batches)


@program(bad=2)
def adascale_after_a_skip(scaler: Any, batches: Batches) -> nn.Module:
    """`AdaScale`, the third of six steps overflows."""
    model = new_model()
    return accumulate(model, adascale(torch.optim.SGD(model.parameters(), lr=0.1)), scaler, batches)


# Second derivatives are scaled, too, and are not in `.grad`.


@program()
def adahessian(scaler: Any, batches: Batches) -> nn.Module:
    """pytorch_optimizer's `AdaHessian`, `backward(create_graph=True)`."""
    model = new_model()
    optimizer = imported("pytorch_optimizer").AdaHessian(model.parameters(), lr=0.05)
    return train(model, optimizer, scaler, batches, create_graph=True)


@program()
def sophia_h(scaler: Any, batches: Batches) -> nn.Module:
    """pytorch_optimizer's `SophiaH`, `backward(create_graph=True)`."""
    model = new_model()
    optimizer = imported("pytorch_optimizer").SophiaH(model.parameters(), lr=0.05, update_period=2)
    return train(model, optimizer, scaler, batches, create_graph=True)


# Opacus clips each sample's gradient in `step`, from `grad_sample`.


def private(optimizer_class: Any) -> tuple[nn.Module, Any]:
    """Return a model whose hooks keep each sample's gradient, and an optimizer that clips them and adds no noise."""
    model = imported("opacus").GradSampleModule(new_model())
    inner = optimizer_class(model.parameters(), lr=0.1)
    private = imported("opacus.optimizers").DPOptimizer
    return model, private(inner, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=8)


@program()
def opacus_hooks(scaler: Any, batches: Batches) -> nn.Module:
    """Opacus' `DPOptimizer`, with hooks that keep each sample's gradient."""
    model, optimizer = private(torch.optim.SGD)
    return train(model, optimizer, scaler, batches)


# A closure by position reaches the optimizer's `step`, which calls backward once more.


def train_with_closure(model: nn.Module, optimizer: Any, scaler: Any, batches: Batches, first: bool) -> nn.Module:
    """Train with a closure that scales its loss; `first`: gradients are there before the step."""
    for batch in batches:

        def closure(batch: Sequence[Tensor] = batch) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            return loss

        closure() if first else None
        scaler.step(optimizer, closure)
        scaler.update()
    return model


@program()
def sam_scales_in_its_closure(scaler: Any, batches: Batches) -> nn.Module:
    """pytorch_optimizer's `SAM`, `step(optimizer, closure)`, and the closure scales its loss."""
    model = new_model()
    optimizer = imported("pytorch_optimizer").SAM(model.parameters(), base_optimizer=torch.optim.SGD, lr=0.1)
    return train_with_closure(model, optimizer, scaler, batches, first=True)


@program()
def schedulefree_scales_in_its_closure(scaler: Any, batches: Batches) -> nn.Module:
    """schedulefree's `SGDScheduleFreeClosure`, with such a closure."""
    model = new_model()
    optimizer = imported("schedulefree").SGDScheduleFreeClosure(model.parameters(), lr=0.1)
    return train_with_closure(model, optimizer, scaler, batches, first=True)


# Optimizers that clear gradients themselves


@program(bad=2)
def heavyball_without_zero_grad(scaler: Any, batches: Batches) -> nn.Module:
    """heavyball's `SGD` in a loop without `zero_grad`, one step overflows."""
    model = new_model()
    imported("heavyball.utils").compile_mode = None  # else each step is compiled first
    optimizer = imported("heavyball").SGD(model.parameters(), lr=0.1)
    for batch in batches:
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)  # also clears the gradients
        scaler.update()
    return model


@program()
def optimi_gradient_release(scaler: Any, batches: Batches) -> nn.Module:
    """optimi's `SGD` with `gradient_release=True`."""
    optimi, model = imported("optimi"), new_model()
    optimizer = optimi.SGD(model.parameters(), lr=0.1, triton=False, gradient_release=True)
    optimi.prepare_for_gradient_release(model, optimizer)
    return train(model, optimizer, scaler, batches)


# Two replicas under torchft, in one process: their gradients are averaged, and one that skipped a step is healed.


@program()
def torchft_heals_without_the_scale(scaler: Any, batches: Batches) -> nn.Module:
    """torchft: one of two replicas skips, and is healed; the manager's state lacks the scaler's."""
    models, scalers = [new_model(), new_model()], [scaler, copy.deepcopy(scaler)]
    wrapper = imported("torchft.optim").OptimizerWrapper
    optimizers = [wrapper(manager(), torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)) for each in models]
    for step, (xs, ys) in enumerate(batches):
        replicas = list(zip(models, optimizers, scalers, xs.chunk(2), ys.chunk(2), strict=True))
        for model, optimizer, own, *batch in replicas:
            optimizer.zero_grad()
            own.scale(loss_of(model, batch)).backward()
        for first, second in zip(*(each.parameters() for each in models), strict=True):
            first.grad = (first.grad + second.grad) / 2  # type: ignore[operator]
            is_faulty = step == 2 and scaler.is_enabled()  # that replica alone
            second.grad = first.grad * (torch.inf if is_faulty else 1.0)
        for _, optimizer, own, *_ in replicas:
            own.step(optimizer)
            own.update()
        if step == 2:  # what it missed comes from the other one
            models[1].load_state_dict(models[0].state_dict())
            optimizers[1].load_state_dict(optimizers[0].state_dict())
    return nn.ModuleList(models)


def judged(run: Program, scaler_class: Any) -> str:
    """Return "right", "wrong", "NaN" or an error's class, then the codes in the texts of warnings or of the error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trained, expected = run(scaler_class)
        except ImportError:
            raise
        except Exception as error:
            found, texts = type(error).__name__, [str(error), *getattr(error, "__notes__", [])]
        else:
            texts = [str(each.message) for each in caught]
            found = "right" if torch.allclose(trained, expected, rtol=1e-4, atol=1e-6) else "wrong"
            found = found if bool(trained.isfinite().all()) else "NaN"
    codes = [code for text in texts for code in re.findall(r"\[ST\d+\]", text)]
    return " ".join([found, *dict.fromkeys(codes)])
