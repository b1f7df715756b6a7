"""What two ranks run under Lightning's Trainer and Fabric; FSDP too, on CPUs."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import lightning_cases as cases
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard, sharded_grad_scaler
from torch.distributed.tensor import DTensor

from scaler_triton import GradScaler, ShardedGradScaler, patch_torch
from scaler_triton.integrations import lightning

BAD_RANK = 1  # at the bad steps the other one's gradients are finite


def environment(rank: int, base: type) -> Any:
    """Make a cluster environment for processes that are there already, with their group."""

    class Ranks(base):  # type: ignore[misc]
        creates_processes_externally = True
        main_address, main_port = "127.0.0.1", 0
        detect = staticmethod(lambda: True)
        world_size = staticmethod(lambda: 2)
        set_world_size = set_global_rank = staticmethod(lambda value: None)
        global_rank = local_rank = staticmethod(lambda: rank)
        node_rank = staticmethod(lambda: 0)

    return Ranks()


def on_cpu(strategy: Any, kind: str, **options: Any) -> Any:
    """Make Lightning's FSDP strategy for CPUs: it goes on with a model that is wrapped already."""

    class OnCpu(strategy):  # type: ignore[misc]
        def _setup_model(self, model: nn.Module) -> nn.Module:
            return super()._setup_model(self._wrapped(model))

        def setup_module(self, module: nn.Module) -> nn.Module:
            return super().setup_module(self._wrapped(module))

        def _wrapped(self, model: nn.Module) -> nn.Module:
            return FullyShardedDataParallel(
                model,
                mixed_precision=self.mixed_precision_config,
                sharding_strategy=self.sharding_strategy,
                device_id=torch.device("cpu"),
                use_orig_params=True,
            )

    return OnCpu(sharding_strategy=kind, **options)


def fsdp_plugin(framework: type, scaler: Any) -> Any:
    """Make our plugin with autocast on the CPU; Lightning's is on GPUs only."""
    return _autocast_on_cpu(lightning.fsdp_precision(framework, scaler))


def own_fsdp_plugin(plugins: Any, scaler: Any) -> Any:
    """Make Lightning's own plugin, and give it the scaler, which its constructor refuses."""
    plugin = plugins.FSDPPrecision("16-mixed")
    plugin.scaler = scaler
    return _autocast_on_cpu(plugin)


def patched_fsdp_plugin(plugins: Any) -> Any:
    """Make Lightning's own plugin under `patch_torch`; it makes the scaler, without arguments."""
    # Only the defaults are others: those for a GPU would disable the scaler here.
    defaults = ("cpu", cases.SETTINGS["init_scale"], 0.5, 2.0, cases.SETTINGS["growth_interval"], True, None)
    with mock.patch.object(ShardedGradScaler.__init__, "__defaults__", defaults):
        plugin = plugins.FSDPPrecision("16-mixed")
    assert type(plugin.scaler) is ShardedGradScaler
    assert plugin.scaler.is_enabled()
    return _autocast_on_cpu(plugin)


def _autocast_on_cpu(plugin: Any) -> Any:
    plugin.forward_context = lambda: torch.autocast("cpu", torch.float16)
    return plugin


def _fsdp1_plugin(framework: type, plugins: Any, strategy: str) -> Any:
    if strategy == "fsdp1-patched":
        return patched_fsdp_plugin(plugins)
    if strategy in ("fsdp1-own", "fsdp1-torch"):
        return own_fsdp_plugin(plugins, scaler_of(strategy))
    return fsdp_plugin(framework, scaler_of(strategy))


def _patched(strategy: str) -> Any:
    if strategy != "fsdp1-patched":
        return nullcontext()
    # A case before this one may have imported Accelerate.
    warnings.filterwarnings("ignore", "torch's gradient scalers were taken before patch_torch", UserWarning)
    return patch_torch()


def scaler_of(strategy: str) -> Any:
    """Make the scaler that fits: of ours, unless torch's is asked for."""
    if strategy == "fsdp1-torch":
        return sharded_grad_scaler.ShardedGradScaler("cpu", **cases.SETTINGS)
    return (ShardedGradScaler if strategy.startswith("fsdp1") else GradScaler)("cpu", **cases.SETTINGS)


def whole(model: nn.Module) -> Tensor:
    """Return all of a model's parameters, on every rank."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return cases.values(model)
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().flatten().clone() for p in full])


def data_of(rank: int) -> list[Tensor]:
    """Return this rank's batches; one rank's overflow."""
    return cases.batches(part=rank, bad=cases.BAD_STEPS if rank == BAD_RANK else ())


def trainer_fit(rank: int, name: str, strategy: str, optimizer: str, clip: float | None) -> tuple[list[float], Tensor]:
    """Train under a strategy of the Trainer; return the scale after every step, and all parameters."""
    cases.quietly()
    space = cases.namespace(name)
    module = _module(space, optimizer, rank, strategy)
    with _patched(strategy):
        trainer = _trainer(space, rank, strategy, max_epochs=1, gradient_clip_val=clip)
        trainer.fit(module)
    return module.scales, whole(trainer.strategy.model)


def _trainer(space: Any, rank: int, strategy: str, **options: Any) -> Any:
    plugin, chosen = _trainer_parts(space, strategy)
    return space.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=chosen,
        plugins=[plugin, environment(rank, space.environments.ClusterEnvironment)],
        use_distributed_sampler=False,
        **cases.QUIET,
        **options,
    )


def _trainer_parts(space: Any, strategy: str) -> tuple[Any, Any]:
    strategies = space.trainer_strategies
    if strategy.startswith("fsdp1"):
        kind = "NO_SHARD" if strategy == "fsdp1-no-shard" else "FULL_SHARD"
        plugin = _fsdp1_plugin(space.Trainer, space.trainer_plugins, strategy)
        return plugin, on_cpu(strategies.FSDPStrategy, kind, state_dict_type="sharded")
    plugin = lightning.mixed_precision(space.Trainer, scaler_of(strategy), device="cpu")
    if strategy == "fsdp2":
        return plugin, strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return plugin, strategies.DDPStrategy()


def _module(space: Any, optimizer: str, rank: int, strategy: str) -> Any:
    class Module(space.pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.scales = cases.network(), []

        def configure_model(self) -> None:
            if strategy == "fsdp2":
                mesh = self.device_mesh["data_parallel"]
                fully_shard(self.net[0], mesh=mesh)
                fully_shard(self.net, mesh=mesh)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.net(batch).float().square().mean()

        def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
            self.scales.append(self.trainer.scaler.get_scale())

        def train_dataloader(self) -> Any:
            return _loader(data_of(rank))

        def configure_optimizers(self) -> Any:
            return cases.new_optimizer(optimizer, self.parameters())

    return Module()


def fsdp_resumed(
    rank: int, name: str, optimizer: str, folder: str, saver: str, loader: str
) -> tuple[list[float], bool]:
    """Save after three FSDP1 steps and go on in a new Trainer: the scales, and whether it ends as a whole run does.

    The whole run is the saver's; both are strategies as `trainer_fit` has them.
    """
    cases.quietly()
    ends, scales = {}, {}
    parts = ("whole", saver, [0, 6], None), ("first", saver, [0, 3], None), ("second", loader, [3, 6], "run.ckpt")
    for which, strategy, steps, path in parts:
        space = cases.namespace(name)
        module = _module(space, optimizer, rank, strategy)
        module.train_dataloader = lambda part=slice(*steps): _loader(data_of(rank)[part])
        trainer = _trainer(space, rank, strategy, max_epochs=2 if path else 1)
        if path:  # without the checkpoint it would begin at the scale that the run had by then
            trainer.scaler.load_state_dict(trainer.scaler.state_dict() | {"scale": 2.0})
        trainer.fit(module, ckpt_path=f"{folder}/{path}" if path else None)
        if which == "first":
            trainer.save_checkpoint(f"{folder}/run.ckpt")
        ends[which], scales[which] = whole(trainer.strategy.model), module.scales
    assert scales["first"] + scales["second"] == scales["whole"]
    return scales["whole"], torch.equal(ends["whole"], ends["second"])


def _loader(data: list[Tensor]) -> Any:
    return torch.utils.data.DataLoader(data, batch_size=None)


def fabric_fit(rank: int, name: str, strategy: str, optimizer: str, clip: str) -> tuple[list[float], Tensor]:
    """Train in a Fabric loop; return the scale after every step, and all parameters."""
    cases.quietly()
    with _patched(strategy):
        return _fabric_loop(rank, cases.namespace(name), strategy, optimizer, clip)


def _fabric_loop(rank: int, space: Any, strategy: str, optimizer: str, clip: str) -> tuple[list[float], Tensor]:
    scales = []
    plugin, chosen = _fabric_parts(space, strategy)
    plugins = [plugin, environment(rank, space.environments.ClusterEnvironment)]
    fabric = space.Fabric(accelerator="cpu", devices=2, strategy=chosen, plugins=plugins)
    fabric.launch()
    net = fabric.setup_module(cases.network())
    wrapped = fabric.setup_optimizers(cases.new_optimizer(optimizer, net.parameters()))
    for batch in data_of(rank):
        wrapped.zero_grad()
        fabric.backward(net(batch).float().square().mean())
        if clip == "fabric":
            fabric.clip_gradients(net, wrapped, max_norm=cases.MAX_NORM, error_if_nonfinite=False)
        elif clip == "scaler":
            plugin.scaler.clip_grad_norm_(wrapped, cases.MAX_NORM, model=net)
        wrapped.step()
        scales.append(plugin.scaler.get_scale())
    return scales, whole(net)


def _fabric_parts(space: Any, strategy: str) -> tuple[Any, Any]:
    strategies = space.fabric_strategies
    if strategy.startswith("fsdp1"):
        plugin = _fsdp1_plugin(space.Fabric, space.fabric_plugins, strategy)
        return plugin, on_cpu(strategies.FSDPStrategy, "FULL_SHARD")
    plugin = lightning.mixed_precision(space.Fabric, scaler_of(strategy), device="cpu")
    if strategy == "fsdp2":
        sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
        return plugin, strategies.ModelParallelStrategy(parallelize_fn=_sharded, **sizes)
    return plugin, strategies.DDPStrategy()


def _sharded(net: nn.Module, mesh: Any) -> nn.Module:
    for part in (net[0], net):
        fully_shard(part, mesh=mesh["data_parallel"])
    return net
