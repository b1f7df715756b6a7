"""Fabric on one device: with our plugin a loop trains as with Fabric's own, and clips fused optimizers too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning_cases as cases
import pytest
import torch
from torch import nn

from scaler_triton import GradScaler
from scaler_triton.integrations import lightning

pytestmark = [pytest.mark.filterwarnings(known) for known in cases.KNOWN_WARNINGS]


@pytest.fixture(params=cases.NAMESPACES)
def name(request: pytest.FixtureRequest) -> str:
    """Each namespace that is installed."""
    pytest.importorskip(cases.NAMESPACES[request.param][1])
    return request.param


def plugin(name: str) -> Any:
    return lightning.mixed_precision(cases.namespace(name).Fabric, cases.ours(), device="cpu")


def fabrics_own(name: str, scaler: Any) -> Any:
    return cases.namespace(name).fabric_plugins.MixedPrecision("16-mixed", "cpu", scaler)


class Loop:
    """A model and its optimizer, set up by Fabric."""

    def __init__(self, name: str, precision: Any, optimizer: str) -> None:
        self.fabric = cases.namespace(name).Fabric(accelerator="cpu", devices=1, plugins=precision)
        net = cases.network()
        self.net, self.optimizer = self.fabric.setup(net, cases.new_optimizer(optimizer, net.parameters()))
        self.scaler, self.trace = precision.scaler, cases.Trace()

    def run(self, steps: slice = slice(None), **clip: Any) -> Loop:
        """Train on some of the batches; clip as `Fabric.clip_gradients` is told to."""
        for batch in cases.batches()[steps]:
            self.optimizer.zero_grad()
            self.fabric.backward(self.net(batch).float().square().mean())
            if clip:
                self.fabric.clip_gradients(self.net, self.optimizer, **clip)
            self.optimizer.step()
            self.trace.add(self.scaler, self.optimizer, self.net)
        return self


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "sgd-fused"])
@pytest.mark.parametrize("whose", ["ours", "fabric's own"])
def test_trains_as_fabrics_own_plugin(name: str, whose: str, optimizer: str) -> None:
    mine = Loop(name, plugin(name) if whose == "ours" else fabrics_own(name, cases.ours()), optimizer).run()
    mine.trace.assert_same(Loop(name, fabrics_own(name, cases.theirs()), optimizer).run().trace)
    assert mine.trace.scales == cases.SCALES


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "sgd-fused"])
@pytest.mark.parametrize("by_value", [False, True])
def test_clips(name: str, optimizer: str, by_value: bool) -> None:
    def clip(scaler: GradScaler, optimizer: Any, net: nn.Module) -> None:
        scaler.unscale_(optimizer)
        if by_value:
            nn.utils.clip_grad_value_(net.parameters(), cases.MAX_NORM)
        else:
            nn.utils.clip_grad_norm_(net.parameters(), cases.MAX_NORM)

    options = {"clip_val": cases.MAX_NORM} if by_value else {"max_norm": cases.MAX_NORM, "error_if_nonfinite": False}
    mine = Loop(name, plugin(name), optimizer).run(**options)
    mine.trace.assert_same(cases.by_hand(GradScaler("cpu", **cases.SETTINGS), optimizer, clip))


def test_a_backward_between_clipping_and_step_is_refused(name: str) -> None:
    """Its gradients are scaled, those that are there are not; Fabric's own plugin refuses the next clipping."""
    mine = Loop(name, plugin(name), "sgd")

    def backward() -> None:
        mine.fabric.backward(mine.net(cases.batches()[0]).float().square().mean())

    backward()
    mine.fabric.clip_gradients(mine.net, mine.optimizer, clip_val=cases.MAX_NORM)
    with pytest.raises(
        RuntimeError, match="written gradients of SGD between clipping, which unscaled them, and the step"
    ):
        backward()
    mine.scaler.update()  # the step is left out
    mine.optimizer.zero_grad()
    backward()
    mine.fabric.clip_gradients(mine.net, mine.optimizer, clip_val=cases.MAX_NORM)
    mine.optimizer.step()
    expected = Loop(name, plugin(name), "sgd").run(slice(1), clip_val=cases.MAX_NORM)
    assert torch.equal(cases.values(mine.net), cases.values(expected.net))


def test_clips_more_than_once_a_step(name: str) -> None:
    mine = Loop(name, plugin(name), "adamw-fused")
    mine.fabric.backward(mine.net(cases.batches()[0]).float().square().mean())
    for _ in range(2):
        mine.fabric.clip_gradients(mine.net, mine.optimizer, clip_val=cases.MAX_NORM)
    norm = mine.fabric.clip_gradients(mine.net, mine.optimizer, max_norm=cases.MAX_NORM)
    assert cases.MAX_NORM < norm <= 58**0.5 * cases.MAX_NORM  # of 58 values, each clipped already


def test_fabrics_own_plugin_refuses_to_clip_a_fused_optimizer(name: str) -> None:
    """If this fails, Fabric has caught up: say so in docs/lightning.md."""
    with pytest.raises(NotImplementedError, match="Gradient clipping is not implemented"):
        Loop(name, fabrics_own(name, cases.ours()), "adamw-fused").run(max_norm=1.0)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
def test_resumes_to_the_bit(name: str, optimizer: str, tmp_path: Path) -> None:
    """The scaler goes into the state that `Fabric.save` is given, as it has to with torch's."""
    whole, first, second = (Loop(name, plugin(name), optimizer) for _ in range(3))
    whole.run()
    first.run(slice(0, 3))
    first.fabric.save(tmp_path / "run.ckpt", state_of(first))
    second.fabric.load(tmp_path / "run.ckpt", state_of(second))
    whole.trace.assert_same(second.run(slice(3, 6)).trace, since=3)


def state_of(loop: Loop) -> dict[str, Any]:
    return {"model": loop.net, "optimizer": loop.optimizer, "scaler": loop.scaler}


def test_the_scaler_clips_at_once(name: str) -> None:
    """Fabric's wrapped optimizer may be handed to the scaler itself."""
    mine, other = (Loop(name, plugin(name), "adamw-fused") for _ in range(2))
    norms = []
    for loop in (mine, other):
        loop.fabric.backward(loop.net(cases.batches()[0]).float().square().mean())
    norms.append(mine.scaler.clip_grad_norm_(mine.optimizer, cases.MAX_NORM))
    norms.append(other.fabric.clip_gradients(other.net, other.optimizer, max_norm=cases.MAX_NORM))
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)  # torch sums in fp32
    mine.optimizer.step()
    assert mine.scaler.get_scale() == 8.0
