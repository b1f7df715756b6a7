"""How many launches `clip_grad_norm_` takes: one pass that reads, one that writes, nothing of torch's between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import Place, places, sgd, started
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from scaler_triton import GradScaler

# torch's own ops are launches themselves.
PLACES = pytest.mark.parametrize("place", [place for place in places() if place.backend == "triton"], ids=str)


class Launches(TorchDispatchMode):
    """Notes what is launched: kernels of ours by their names, and ops of torch that are more than a look."""

    LOOKS = ("aten::empty", "aten::select", "aten::slice", "aten::view", "aten::unsqueeze", "aten::detach")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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


def check_launches(place: Place, dtypes: list[list[torch.dtype]], want: list[str], **options: Any) -> None:
    """Clip three times; the third is steady."""
    optimizers = [sgd([torch.ones(5, dtype=dtype) for dtype in each], place.device, fused=True) for each in dtypes]
    scaler = started(GradScaler, place.device, init_scale=8.0, backend=place.backend)
    for last in (False, False, True):
        for optimizer in optimizers:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad.fill_(1.0)  # where it is: on a GPU a new address is copied to the device
        launches = Launches().of(lambda: scaler.clip_grad_norm_(optimizers, 0.5, **options))
        assert not last or launches == want
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
