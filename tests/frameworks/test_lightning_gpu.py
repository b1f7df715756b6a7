"""Lightning on a GPU: the Trainer with a fused optimizer that is clipped, Fabric, and FSDP by Lightning's strategy."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import lightning_cases as cases
import pytest
import torch

from scaler_triton.integrations import lightning

pytestmark = [pytest.mark.gpu, *(pytest.mark.filterwarnings(known) for known in cases.KNOWN_WARNINGS)]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
def test_trainer(name: str, optimizer: str) -> None:
    plugin = lightning.mixed_precision(cases.namespace(name).Trainer, cases.ours("cuda"))
    module = cases.fit(name, plugin, optimizer, accelerator="gpu", gradient_clip_val=cases.MAX_NORM)
    assert module.trace.scales == cases.SCALES
    by_hand = cases.by_hand(cases.ours("cuda"), optimizer, cases.clip, "cuda")
    for mine, other in zip(module.trace.weights, by_hand.weights, strict=True):
        # Lightning turns autocast's cache off, and cuBLAS may take another kernel.
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
def test_fabric(name: str, optimizer: str) -> None:
    scaler = cases.ours("cuda")
    plugin = lightning.mixed_precision(cases.namespace(name).Fabric, scaler)
    fabric = cases.namespace(name).Fabric(accelerator="gpu", devices=1, plugins=plugin)
    net = cases.network()
    model, wrapped = fabric.setup(net, cases.new_optimizer(optimizer, net.parameters()))
    scales = []
    for batch in cases.batches():
        wrapped.zero_grad()
        fabric.backward(model(batch.cuda()).float().square().mean())
        fabric.clip_gradients(model, wrapped, max_norm=cases.MAX_NORM, error_if_nonfinite=False)
        wrapped.step()
        scales.append(scaler.get_scale())
    assert scales == cases.SCALES
    assert cases.values(net).isfinite().all()


# Lightning opens a process group that it leaves open: in a process of its own.
FSDP = """
import sys
sys.path.insert(0, sys.argv[1])
import lightning_cases as cases
import scaler_triton
from scaler_triton.integrations import lightning
way, space = sys.argv[3], cases.namespace(sys.argv[2])
scaler = scaler_triton.ShardedGradScaler("cuda", **cases.SETTINGS)
if way == "ours":
    plugin = lightning.fsdp_precision(space.Trainer, scaler)
    options = {"gradient_clip_val": cases.MAX_NORM}
else:  # Lightning's own, which clips no fused optimizer
    if way == "patched":
        scaler_triton.patch_torch()
    plugin, options = space.trainer_plugins.FSDPPrecision("16-mixed"), {}
    if way == "given":
        plugin.scaler = scaler
    plugin.scaler.load_state_dict(scaler.state_dict())
assert type(plugin.scaler) is scaler_triton.ShardedGradScaler
# Lightning would shuffle the batches of ranks.
options |= {"strategy": "fsdp", "use_distributed_sampler": False}
module = cases.fit(sys.argv[2], plugin, "adamw-fused", accelerator="gpu", **options)
assert module.trace.scales == cases.SCALES, module.trace.scales
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ours", "given", "patched"])
def test_fsdp(way: str) -> None:
    name = next(name for name in cases.NAMESPACES if find_spec(name))
    here = Path(__file__).parent
    subprocess.run([sys.executable, "-c", FSDP, str(here), name, way], cwd=here.parents[1], check=True, timeout=240)
