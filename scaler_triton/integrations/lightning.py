"""Lightning's Trainer and Fabric: precision plugins with our scalers and our guard, for any optimizer and sharding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

import scaler_triton
from scaler_triton import GradScaler, StepGuard
from scaler_triton.integrations import updates, versions
from scaler_triton.integrations.unscaled import Unscaled, clip_again, unscale_once

# Where a Trainer or a Fabric comes from -> its package on PyPI, and where its plugins are.
_SOURCES = {
    "lightning.pytorch": ("lightning", "lightning.pytorch.plugins"),
    "lightning.fabric": ("lightning", "lightning.fabric.plugins"),
    "pytorch_lightning": ("pytorch-lightning", "pytorch_lightning.plugins"),
    "lightning_fabric": ("pytorch-lightning", "lightning_fabric.plugins"),
}
_CALLBACKS = ("LogScaler", "WaitForSkips")  # which import Lightning
# What a guard works with -> Lightning's plugin for it, without FSDP.
_GUARDED = {"bf16-mixed": "MixedPrecision", "bf16-true": "HalfPrecision", "32-true": "Precision"}


def __getattr__(name: str) -> Any:
    if name in _CALLBACKS:
        return getattr(import_module("scaler_triton.integrations.lightning_callbacks"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def mixed_precision(framework: type, scaler: GradScaler | None = None, *, device: str | None = None) -> Any:
    """Return Lightning's `MixedPrecision("16-mixed", device, scaler)`, which clips by norm whatever the optimizer.

        trainer = Trainer(accelerator="gpu", plugins=mixed_precision(Trainer))
        fabric = Fabric(accelerator="gpu", plugins=mixed_precision(Fabric))

    Takes the place of `precision="16-mixed"`, for one device, DDP and ModelParallelStrategy (FSDP2, tensor parallel).
    Gradients are unscaled before `on_before_optimizer_step`, a fused optimizer's too. The scale is updated once for
    each loss, however many optimizers are stepped on it. In a checkpoint the scaler's state has Lightning's own key:
    the plugins read each other's.

    Args:
        framework: the `Trainer` or `Fabric` that will get it: of lightning or of pytorch_lightning, or a subclass.
        scaler: of this package; None: a `GradScaler` with its defaults.
        device: device type for autocast, and for that scaler; None: that of a given scaler, else "cuda".

    Raises: TypeError naming `framework` or `scaler`; ValueError if the scaler is enabled for another `device`.
    """
    plugin_class = _plugin_class(framework, "MixedPrecision")
    device = _device_of(device, None if scaler is None else _checked(scaler))
    return plugin_class("16-mixed", device, scaler or GradScaler(device))


def fsdp_precision(framework: type, scaler: GradScaler | None = None) -> Any:
    """Return Lightning's `FSDPPrecision("16-mixed")` with a scaler of ours, and clipping by norm in the Trainer.

        trainer = Trainer(accelerator="gpu", strategy="fsdp", plugins=fsdp_precision(Trainer))

    Args:
        framework: as for `mixed_precision`.
        scaler: a `ShardedGradScaler`, or one with a `process_group`; None: a `ShardedGradScaler` with its defaults.

    Raises: TypeError naming `framework` or `scaler`.
    """
    plugin = _plugin_class(framework, "FSDPPrecision")("16-mixed")
    given = _checked(scaler or scaler_triton.ShardedGradScaler())
    if (
        not given._ours.checks.sharded and given.process_group is None
    ):  # FSDP1's shards do not tell which ranks share them
        raise TypeError("scaler must be a ShardedGradScaler under FSDP1, or have a process_group: ranks would disagree")
    plugin.scaler = given  # the constructor refuses every scaler
    return plugin


def step_guard_precision(
    framework: type,
    guard: StepGuard | None = None,
    *,
    precision: str = "bf16-mixed",
    device: str | None = None,
    fsdp: bool = False,
) -> Any:
    """Return Lightning's plugin for `precision` with a guard, which Lightning itself would refuse.

        trainer = Trainer(accelerator="gpu", plugins=step_guard_precision(Trainer, StepGuard(spike_sigma=6.0)))

    Takes the place of `precision="bf16-mixed"`, "bf16-true" or "32-true". In the Trainer, clipping by norm checks and
    clips in one pass. A checkpoint of the Trainer's has the guard's state, and may be one of a run without a guard.

    Args:
        framework: as for `mixed_precision`.
        guard: None: a `StepGuard` with its defaults.
        precision: one of the three.
        device: device type for autocast, and for that guard; None: that of a given guard, else "cuda".
        fsdp: whether the strategy is Lightning's FSDP (FSDP1).

    Raises: TypeError or ValueError naming `framework`, `guard`, `precision` or `device`.
    """
    if precision not in _GUARDED:
        raise ValueError(f"precision must be one of {', '.join(_GUARDED)}, got {precision!r}")
    device = _device_of(device, None if guard is None else _checked(guard, is_guard=True))
    name = "FSDPPrecision" if fsdp else _GUARDED[precision]
    arguments = {"Precision": (), "MixedPrecision": (precision, device)}.get(name, (precision,))
    plugin = _plugin_class(framework, name, guarded=True)(*arguments)
    plugin.scaler = guard or StepGuard(device)
    return plugin


class _Plugin:
    """What the plugins share: the first call of a step that needs it unscales, and no other."""

    scaler: Any
    _theirs: tuple[type, bool]  # Lightning's plugin, and whether ours is for a guard
    _unscaled: Unscaled | None = None  # before the loss of the next backward was scaled

    def backward(self, tensor: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward; raise if it wrote gradients that are unscaled for a step still to come."""
        unscaled, self._unscaled = self._unscaled or Unscaled(self.scaler), None
        super().backward(tensor, model, *args, **kwargs)  # type: ignore[misc]  # Fabric's scales the loss
        unscaled.refuse_changes()

    def teardown(self) -> None:
        """End a run, also one that was interrupted."""
        updates.finish(self.scaler)
        super().teardown()  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.precision}, {self.scaler!r})"  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by Lightning's class, for launchers that spawn: our class is created at run time."""
        return _restored, self._theirs, self.__dict__


class _Guarded:
    """A guard's part in Lightning's plugins, most of which know of no scaler; between them and `_Plugin`."""

    scaler: Any

    def state_dict(self) -> dict[str, Any]:
        """Return the guard's state, for checkpoints."""
        state: dict[str, Any] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the guard's state."""
        self.scaler.load_state_dict(state_dict)


class _TrainerPlugin(_Plugin):
    """The Trainer's plugin, which unscales, clips and steps."""

    _clip_model: Any = None  # what holds the FSDP modules
    _no_backward = False  # in hooks after a training step that returned None: there is nothing to clip

    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
        """Start a run; keep the model as the strategy has wrapped it."""
        self._clip_model = model
        self.scaler._ours.steps.reset()  # a run may have been interrupted in a step
        return super().connect(model, optimizers, lr_schedulers)  # type: ignore[misc]

    def teardown(self) -> None:
        """End a run; drop its model, as the plugin may be reused."""
        self._clip_model = None
        super().teardown()

    def pre_backward(self, tensor: Any, module: Any) -> Any:
        """Scale the loss; first note which gradients are unscaled."""
        updates.begin(self.scaler, module.trainer.strategy.optimizers)
        self._unscaled = Unscaled(self.scaler)
        return super().pre_backward(tensor, module)  # type: ignore[misc]

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, unscale, call the hooks, clip, step and update: Lightning's order for all optimizers."""
        is_guard = isinstance(self.scaler, StepGuard)  # hooks need not wait for it: it checks when it clips, or steps
        if isinstance(optimizer, torch.optim.LBFGS):
            if not is_guard:  # Lightning's own refuses it
                return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)  # type: ignore[misc]
            if self.scaler.is_enabled():
                return updates.step(self.scaler, optimizer, closure=closure, **kwargs)  # the guard refuses it
            closure = functools.partial(self._wrap_closure, model, optimizer, closure)  # type: ignore[attr-defined]
            return optimizer.step(closure=closure, **kwargs)  # type: ignore[no-untyped-call]
        result = closure()
        no_backward = result is None and model.automatic_optimization
        if not (no_backward or is_guard):
            unscale_once(self.scaler, optimizer)
        self._no_backward = no_backward
        try:
            self._after_closure(model, optimizer)  # type: ignore[attr-defined]
        finally:
            self._no_backward = False
        if no_backward:
            return result
        return updates.step(self.scaler, optimizer, **kwargs)

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        """Clip by norm or by value, after unscaling; also before `step` in manual optimization."""
        if clip_val <= 0 or self._no_backward:
            return
        by_norm = gradient_clip_algorithm == "norm"
        if not (by_norm and isinstance(self.scaler, StepGuard)):
            unscale_once(self.scaler, optimizer)
        if by_norm:
            self.clip_grad_by_norm(optimizer, clip_val)
        else:
            self.clip_grad_by_value(optimizer, clip_val)  # type: ignore[attr-defined]

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip by the norm of the whole model, however it is sharded."""
        # A scaler has unscaled them already, for hooks to see them unscaled.
        parameters = list(self.main_params(optimizer))  # type: ignore[attr-defined]
        clip_again(self.scaler, [optimizer], clip_val, model=self._clip_model, parameters=parameters)


class _FabricPlugin(_Plugin):
    """Fabric's plugin; its strategy clips afterwards.

    It is not told of optimizers before their first step, only of modules.
    """

    def convert_module(self, module: Any) -> Any:
        """Set a module up."""
        converted = super().convert_module(module)  # type: ignore[misc]
        updates.expect(self.scaler, converted)
        return converted

    def backward(self, tensor: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        """Scale the loss and run backward."""
        updates.begin(self.scaler)
        super().backward(tensor, model, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step by the scaler, then update; a guard raises if there is a closure."""
        if isinstance(optimizer, torch.optim.LBFGS) and not isinstance(self.scaler, StepGuard):  # refused
            return super().optimizer_step(optimizer, **kwargs)  # type: ignore[misc]
        return updates.step(self.scaler, optimizer, **kwargs)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscale once per step, a fused optimizer's gradients, too."""
        unscale_once(self.scaler, optimizer)


def _plugin_class(framework: type, name: str, *, guarded: bool = False) -> Any:
    """Return the plugin for a Trainer or a Fabric, derived from its own of that name."""
    package, plugins = _source(framework)
    versions.check(package)
    return _derived(getattr(import_module(plugins), name), guarded)


def _source(framework: type) -> tuple[str, str]:
    for cls in getattr(framework, "__mro__", ()):
        for source, found in _SOURCES.items():
            if cls.__module__.startswith(f"{source}.") and cls.__name__ in ("Trainer", "Fabric"):
                return found
    raise TypeError(f"framework must be Lightning's class Trainer or Fabric, or a subclass of one, got {framework!r}")


@functools.cache
def _derived(theirs: type, guarded: bool) -> Any:
    """Return our subclass of a plugin; of the same name, which is the key of its state in checkpoints."""
    ours = _TrainerPlugin if hasattr(theirs, "clip_gradients") else _FabricPlugin
    bases = (ours, _Guarded, theirs) if guarded else (ours, theirs)
    return type(theirs.__name__, bases, {"__doc__": theirs.__doc__, "_theirs": (theirs, guarded)})


def _restored(theirs: type, guarded: bool) -> Any:
    plugin_class = _derived(theirs, guarded)
    return plugin_class.__new__(plugin_class)


def _device_of(device: str | None, scaler: GradScaler | None) -> str:
    """Return a device type for autocast: with another one than the scaler's nothing would be in half precision."""
    if scaler is None:
        return device or "cuda"
    if device is not None and scaler.is_enabled() and torch.device(device).type != scaler._device:
        raise ValueError(f"device must be that of the scaler, {scaler._device!r}, got {device!r}; it may be left out")
    return device or scaler._device


def _checked(scaler: Any, *, is_guard: bool = False) -> Any:
    """Return a scaler if it is of the right kind: a guard does not scale, and fp16 needs that."""
    if not isinstance(scaler, GradScaler) or isinstance(scaler, StepGuard) is not is_guard:
        wanted = "guard must be a StepGuard" if is_guard else "scaler must be a GradScaler or ShardedGradScaler"
        raise TypeError(f"{wanted} of scaler_triton, got {scaler!r}")
    return scaler
