"""How many launches `clip_grad_norm_` takes: one pass that reads, one that writes; between them ranks add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import Place, flags, grads, places, sgd, started
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from scaler_triton import GradScaler, ShardedGradScaler

# torch's own ops are launches themselves.
PLACES = pytest.mark.parametrize("place", [place for place in places() if place.backend == "triton"], ids=str)


class Launches(TorchDispatchMode):
    """Notes what is launched: kernels of ours by their names, and ops of torch that are more than a look."""

    LOOKS = (
        "aten::empty",
        "aten::select",
        "aten::slice",
        "aten::view",
        "aten::unsqueeze",
        "aten::detach",
        "aten::expand",
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does to its shards is launched
        name = func.name().partition(".")[0]
        self.seen += [name] if name not in self.LOOKS else []
        return func(*args, **(kwargs or {}))

    def of(self, call: Callable[[], Any]) -> list[str]:
        """Return what a call launches."""
        from scaler_triton.kernels.launcher import Launch

        def noting(launch: Any, *args: Any) -> None:
            self.seen.append(launch._kernel.fn.__name__)
            with _disable_current_modes():  # the interpreter is no launch
                start(launch, *args)

        start = Launch.__call__
        with mock.patch.object(Launch, "__call__", noting), self:
            call()
        return self.seen


READ, WRITE = ["_sum_squares_kernel", "_finish_kernel"], ["_clip_kernel"]
ADD = ["aten::stack", "aten::sum"]
JOIN = ["aten::ne"] * 2  # two flags become one
REDUCE = ["c10d::allreduce_"]
SCALES, SETTLE = ["aten::pow"], ["aten::clamp", "aten::addcmul"]  # where no kernel does that on its way


@pytest.mark.parametrize(
    ("dtypes", "want"),
    [
        ([[torch.float32]], [*READ, *WRITE]),
        ([[torch.float32, torch.bfloat16]], [*READ, *READ, *ADD, *WRITE, *WRITE]),
        ([[torch.float32], [torch.float32]], [*READ, *READ, *ADD, *JOIN, *WRITE, *WRITE]),
    ],
    ids=["one dtype", "two dtypes", "two optimizers"],
)
@PLACES
def test_nothing_is_launched_between_the_two_passes(
    place: Place, dtypes: list[list[torch.dtype]], want: list[str]
) -> None:
    check_launches(place, dtypes, want)


@PLACES
def test_a_deferred_clip_launches_one_program_in_place_of_the_second_pass(place: Place) -> None:
    check_launches(place, [[torch.float32]], [*READ, "_defer_kernel"], defer=True)
    check_launches(place, [[torch.float32]] * 2, [*READ, *READ, *ADD, *JOIN, "_defer_kernel"], defer=True)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("dtypes", "want"),
    [
        ([[torch.float32]], [*READ, *REDUCE, *WRITE]),
        ([[torch.float32, torch.bfloat16]], [*READ, *READ, *ADD, *SCALES, *REDUCE, *WRITE, *WRITE]),
        ([[torch.float32], [torch.float32]], [*READ, *READ, *ADD, *SCALES, *REDUCE, *WRITE, *WRITE]),
    ],
    ids=["one dtype", "two dtypes", "two optimizers"],
)
@PLACES
def test_ranks_add_a_reduction_between_the_passes(
    place: Place, dtypes: list[list[torch.dtype]], want: list[str]
) -> None:
    check_launches(place, dtypes, want)


@pytest.mark.usefixtures("two_ranks")
@PLACES
def test_ranks_add_a_reduction_before_a_deferred_clip(place: Place) -> None:
    check_launches(place, [[torch.float32]], [*READ, *REDUCE, "_defer_kernel"], defer=True)
    two = [*READ, *READ, *ADD, *SCALES, *REDUCE, "_defer_kernel", *SETTLE]
    check_launches(place, [[torch.float32]] * 2, two, defer=True)


@pytest.mark.usefixtures("two_ranks")
@PLACES
def test_a_norm_that_is_refused_is_no_overflow(place: Place) -> None:
    """Squares overflow fp64, gradients do not: nothing is clipped, and the step may be taken."""
    optimizer = sgd([torch.full((5,), 1e200, dtype=torch.float64)], place.device)
    scaler = started(ShardedGradScaler, place.device, init_scale=2.0, backend=place.backend)
    with pytest.raises(RuntimeError, match="is non-finite"):
        scaler.clip_grad_norm_(optimizer, 0.5, error_if_nonfinite=True)
    assert flags(scaler, optimizer) == [0.0]
    assert grads(optimizer) == [5e199]


def check_launches(place: Place, dtypes: list[list[torch.dtype]], want: list[str], **options: Any) -> None:
    """Clip three times; the third is steady."""
    kind = ShardedGradScaler if dist.is_initialized() else GradScaler
    optimizers = [sgd([torch.ones(5, dtype=dtype) for dtype in each], place.device, fused=True) for each in dtypes]
    scaler = started(kind, place.device, init_scale=8.0, backend=place.backend)
    for last in (False, False, True):
        for optimizer in optimizers:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad.fill_(1.0)  # where it is: on a GPU a new address is copied to the device
        launches = Launches().of(lambda: scaler.clip_grad_norm_(optimizers, 0.5, **options))
        assert not last or launches == want
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
