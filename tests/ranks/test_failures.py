"""Trouble on one rank, or on all: nothing hangs, the ranks stay equal, and the next step is right."""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import cases
from ranks.cases import KINDS, STEPS, UNSCALE, Fault, Report, assert_agreed, new_optimizer, new_scaler, train
from scaler_triton.watch.watch import Watch

pytestmark = pytest.mark.distributed

BAD_STEP = 1
TOLD = "PeerFailedError: Another rank failed to check its gradients"


# A check that fails.

FLAWS: dict[str, tuple[Callable[[Tensor], Tensor], Any, str]] = {  # of a parameter; its gradient's; the error
    "expanded": (Tensor.clone, lambda ones: ones[:1, :1].expand(2, 2), "RuntimeError: unsupported operation: more"),
    "csr": (Tensor.to_sparse_csr, Tensor.to_sparse_csr, "NotImplementedError: the gradient of .* torch.sparse_csr"),
    "complex": (Tensor.cfloat, Tensor.cfloat, "NotImplementedError: the gradient of parameter .* torch.complex64"),
    "no memory": (Tensor.clone, None, "OutOfMemoryError: out of memory"),  # for the first op
    "never scaled": (Tensor.clone, None, "AssertionError: Attempted (unscale_|step) but _scale is None."),
}


def flawed(rank: int, kind: str, name: str, flaw: str, unscale: bool, options: dict[str, Any]) -> Report:
    """At one step the last rank cannot check its gradients; all write errors down and go on."""
    scaler, params = new_scaler(kind, **options), cases.agreeing_params(kind)
    is_bad = rank == dist.get_world_size() - 1
    (data, grad, _), ones = FLAWS[flaw if is_bad else "no memory"], torch.ones(2, 2)
    odd_one = nn.Parameter(data(ones))
    groups = [{"params": [param]} for param in (*params, odd_one)]
    optimizer = OldStyle(groups) if name == "old style" else new_optimizer(name, groups)
    method = "unscale_" if unscale else "step"
    call = getattr(scaler, method)

    def backward(step: int) -> None:
        fails = is_bad and step == bad_step_of(flaw)
        cases.give_grads(new_scaler(kind) if fails and flaw == "never scaled" else scaler, params, step)
        odd_one.grad = grad(ones) if fails and grad is not None else None
        setattr(scaler, method, without_memory if fails and flaw == "no memory" else call)

    def without_memory(*args: Any) -> None:
        with cases.FirstOpFails():
            call(*args)

    return train(rank, scaler, optimizer, backward, unscale=unscale, tolerant=True)


def bad_step_of(flaw: str) -> int:
    return 0 if flaw == "never scaled" else BAD_STEP


KINDS_THAT_CHECK = [("grad", {}), ("sharded", {}), ("sharded", {"measure": True}), ("guard", {})]


@pytest.mark.parametrize(
    ("kind", "options", "flaw"),
    [
        *((*kind, flaw) for kind in KINDS_THAT_CHECK for flaw in FLAWS if (kind[0], flaw) != ("guard", "never scaled")),
        ("guard", {"spike_sigma": None}, "expanded"),
    ],
    ids=str,
)
@UNSCALE
@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw-fused", "old style"])
def test_a_rank_alone_with_a_check_that_fails(ranks, kind, options, name, flaw, unscale):
    *peers, failed = reports = ranks.run(flawed, kind, name, flaw, unscale, options)
    bad_step = bad_step_of(flaw)
    assert_agreed(reports, [bad_step], kind=kind)
    assert re.match(FLAWS[flaw][2], failed.errors[bad_step])
    for report in reports:
        assert None not in report.stepped
        assert [step for step, error in enumerate(report.errors) if error and step != bad_step] == []
        windows = [] if kind != "guard" or options else [STEPS - 1]
        assert report.windows == reports[0].windows
        assert [len(norms) for norms in report.windows] == windows
    for peer in peers:
        assert peer.errors[bad_step].startswith(TOLD if name in ("sgd", "adamw") else "")


# Optimizers that ask the scaler themselves.


class OldStyle(torch.optim.Optimizer):
    """SGD that takes the scaler as an argument, as apex's and TransformerEngine's fused optimizers do."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any, *, only_with_gradients: bool = False) -> None:
        super().__init__(params, {"lr": cases.LEARNING_RATE})
        self.only_with_gradients = only_with_gradients
        self.asked: list[dict[str, float]] = []

    @torch.no_grad()
    def step(self, closure: None = None, *, grad_scaler: Any = None) -> None:
        """Ask for the flag once per param group of one parameter, as apex does, and unscale unless somebody has."""
        ready = grad_scaler._per_optimizer_states[id(self)]["stage"].name == "READY"
        for param in cases.params_of(self):
            if self.only_with_gradients and param.grad is None:
                continue
            flags = grad_scaler._check_inf_per_device(self)
            self.asked.append({device.type: flag.item() for device, flag in flags.items()})
            scale = grad_scaler._get_scale_async() if ready else 1.0
            if param.grad is not None and not flags[param.device].item():
                cases.local_of(param).sub_(cases.local_of(param.grad) / scale, alpha=cases.LEARNING_RATE)


def old_style(rank: int, kind: str, unscale: bool, gradless: Sequence[int], always: bool) -> tuple[Report, Any]:
    """An old-style optimizer with three param groups, one step bad; the report, and all the flags that it was told."""
    scaler = new_scaler(kind)
    params = [*cases.agreeing_params(kind), cases.plain_param(2), cases.plain_param(4)]
    optimizer = OldStyle([{"params": [param]} for param in params], only_with_gradients=not always)
    backward = cases.giving(scaler, params, range(len(params)) if rank in gradless else ())
    return train(rank, scaler, optimizer, backward, [Fault(BAD_STEP, 1, -1)], unscale=unscale), optimizer.asked


@KINDS
@UNSCALE
@pytest.mark.parametrize(("gradless", "always"), [((), True), ((0,), True), ((0,), False)])
def test_old_style_optimizers_ask_often_or_never_and_cost_one_collective(two, kind, unscale, gradless, always):
    for rank, (report, asked) in enumerate(two.run(old_style, kind, unscale, gradless, always)):
        assert_agreed([report], [BAD_STEP])
        groups = len(asked) // STEPS
        assert groups >= 3 or rank in gradless
        assert asked == [{cases.DEVICE: float(step == BAD_STEP)} for step in range(STEPS) for _ in range(groups)]


def watched(rank: int, unscale: bool) -> tuple[str | None, float, float]:
    """The watch of one rank raises when it meets gradients: what is raised, the weight then and after another step."""
    scaler, params = new_scaler("sharded"), [cases.plain_param(2)]
    optimizer = new_optimizer("sgd", params)

    def step(fails: bool) -> str | None:
        cases.give_grads(scaler, params, 0)
        method = "unscale_" if unscale else "step"
        with mock.patch.object(Watch, "met", side_effect=ZeroDivisionError) if fails else nullcontext():
            error = cases.attempt(scaler, method, optimizer).error
        if unscale:
            error = cases.attempt(scaler, "step", optimizer).error or error
        scaler.update()
        return error

    before = params[0].detach().clone()
    raised = step(rank == 0)
    unchanged = torch.equal(params[0], before)
    return raised, float(unchanged), float(step(False) is None and not torch.equal(params[0], before))


@UNSCALE
def test_a_watch_that_raises_on_one_rank_keeps_no_other_waiting(two, unscale):
    first, second = two.run(watched, unscale)
    assert first[0].startswith("ZeroDivisionError")
    assert second[0].startswith(TOLD)
    assert first[1:] == second[1:] == (1.0, 1.0)
