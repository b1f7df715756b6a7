"""torch.compile around a scaler, in parts or the whole step: it is the uncompiled run, bit by bit."""

import inspect
from typing import Any
from unittest import mock

import pytest
import torch
from compile_cases import OPTIMIZERS, fresh_compiler, fresh_net, in_parts, ours, run, theirs, whole_step
from helpers import PLACES, Place, assert_all_same, sgd, started, values
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import sharded_grad_scaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchSharded

from scaler_triton import GradScaler, ShardedGradScaler

# Torch's compiler meets deprecated parts of torch while it is imported.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    # After a graph break Dynamo asks every tensor it meets for `.grad`, the scaled loss, too.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
TORCHS_BREAKS = ("torch._dynamo.graph_break()", "trace into fused optimizer")


@PLACES
@pytest.mark.parametrize(("optimizer", "clip"), [*((name, "") for name in OPTIMIZERS), ("adamw-fused", "ours")])
def test_compiled_parts_end_and_break_as_with_torchs_scaler(place: Place, optimizer: str, clip: str) -> None:
    """At the head of an optimizer's step and at a fused optimizer's function, both of which torch leaves out."""
    results, met = [], []
    for new_scaler, clipped_by in ((ours, clip), (theirs, clip and "torch")):
        with fresh_compiler():
            results.append(in_parts(place, optimizer, clipped_by, new_scaler))
            met.append((dict(counters["graph_break"]), dict(counters["stats"]), dict(counters["frames"])))
    if not clip:  # torch sums norms in fp32
        assert_all_same(*results)
    assert met[0] == met[1]
    breaks, stats, _ = met[0]
    assert stats["unique_graphs"] > ("fused" not in optimizer)
    assert [reason for reason in breaks if not any(known in reason for known in TORCHS_BREAKS)] == []
    assert len(breaks) == 1 + ("fused" in optimizer)


@PLACES
@pytest.mark.parametrize(("name", "clip"), [("sgd", "torch"), ("adamw-fused", "ours")])
def test_a_whole_step_compiled(place: Place, name: str, clip: str) -> None:
    """Dynamo breaks its graph at the scaler's methods and traces nothing in them."""
    results = []
    for compiles in (True, False):
        net, scaler = fresh_net(place.device), ours(place)
        step = whole_step(net, OPTIMIZERS[name](net.parameters()), scaler, clip)
        with fresh_compiler():
            results.append(run(torch.compile(step, backend="aot_eager") if compiles else step, net, scaler))
            at_the_scaler = [text for text in counters["graph_break"] if "a scaler runs beside compiled code" in text]
            assert bool(at_the_scaler) == compiles
            traced = [seen() for seen in torch._dynamo.convert_frame.input_codes.seen]
            assert [code for code in traced if code is not None and "/scaler_triton/" in code.co_filename] == []
    assert_all_same(*results)


def test_a_compiled_optimizer_within_a_whole_step_compiled_is_compiled() -> None:
    """Dynamo is off within `scaler.step`, but for what was compiled by itself."""
    net, scaler, ran = fresh_net("cpu"), ours(Place("cpu", "torch")), []
    optimizer = OPTIMIZERS["sgd"](net.parameters())

    def backend(graph: Any, inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            ran.append(graph)
            return graph(*args)

        return call

    with fresh_compiler():
        optimizer.step = torch.compile(optimizer.step, backend=backend)  # type: ignore[method-assign]
        run(torch.compile(whole_step(net, optimizer, scaler), backend="eager"), net, scaler)
    assert len(ran) == 6  # of eight steps two were skipped


def test_in_a_full_graph_a_scaler_is_refused_by_its_reason() -> None:
    scaler = GradScaler("cpu")
    optimizer = OPTIMIZERS["sgd"]([nn.Parameter(torch.ones(2))])
    with fresh_compiler():
        compiled = torch.compile(lambda: scaler.unscale_(optimizer), backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="a scaler runs beside compiled code, not in it"):
            compiled()


@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
def test_every_method_of_ours_is_left_alone(cls: type) -> None:
    methods = {
        name: function
        for name, function in inspect.getmembers(cls, inspect.isfunction)
        if function.__module__.startswith("scaler_triton") and not name.startswith("__")
    }
    assert {"unscale_", "step", "update", "clip_grad_norm_", "stats", "overflow_report"} < set(methods)
    assert "scale" in methods
    for function in {*methods.values()} - {ShardedGradScaler.scale}:  # which torch compiles
        assert inspect.getattr_static(function, "_torchdynamo_disable")
        assert not hasattr(function, "__wrapped__")  # it costs nothing


def test_a_full_graph_scales_a_loss_as_with_torchs_sharded_scaler() -> None:
    for cls in (TorchSharded, ShardedGradScaler):
        scaler: Any = cls("cpu", init_scale=8.0)
        loss = scaler.scale(torch.ones(()))
        with fresh_compiler():
            compiled = torch.compile(scaler.scale, backend="eager", fullgraph=True)
            assert compiled(torch.ones(())).item() == loss.item() == 8.0


def test_compiled_code_scales_a_loss_in_a_patched_torch() -> None:
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    with fresh_compiler(), mock.patch.object(sharded_grad_scaler, "ShardedGradScaler", ShardedGradScaler):
        assert torch.compile(lambda loss: scaler.scale(loss), backend="eager")(torch.ones(())).item() == 8.0


@pytest.mark.parametrize("before", ["carried", "dropped", "raised"])
def test_a_loss_scaled_in_compiled_code_begins_a_step(before: str, two_ranks: None) -> None:
    """What was divided before it is over (differences 18 and 23), and what is divided after it waits for its step."""
    optimizer, scaler = sgd([torch.tensor([8.0])]), started(ShardedGradScaler, "cpu", init_scale=4.0)
    with fresh_compiler():
        scale = torch.compile(scaler.scale, backend="eager", fullgraph=True)
        scale(torch.ones(()))
        if before == "raised":
            with mock.patch.object(optimizer, "step", side_effect=MemoryError), pytest.raises(MemoryError):
                scaler.step(optimizer)
        else:
            scaler.unscale_(optimizer)
            scaler.update()
        if before != "carried":
            scale(torch.ones(()))
            optimizer.param_groups[0]["params"][0].grad.fill_(8.0)
        scaler.step(optimizer)
    assert values(optimizer) == [-1.0]
