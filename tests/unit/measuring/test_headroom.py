"""Headroom: what checks have measured, and the sentence it becomes."""

import math
from typing import Any

import pytest
import torch
from helpers import PLACES, Place, assert_all_same, sgd, started, take_step

from scaler_triton import GradScaler, ShardedGradScaler, StepGuard
from scaler_triton.kernels import abi
from scaler_triton.measuring.headroom import Headroom
from scaler_triton.measuring.measure import is_measuring

INF = math.inf


def measuring(place: Place, **options: Any) -> GradScaler:
    scaler: GradScaler = started(GradScaler, place.device, measure=True, backend=place.backend, **options)
    return scaler


# One process


@PLACES
@pytest.mark.parametrize("how", ["step", "unscale_", "clip", "fused", "_check_inf_per_device"])
def test_every_way_of_checking_measures(place: Place, how: str) -> None:
    scaler = measuring(place, init_scale=2.0**10)
    values = [torch.tensor([0.0, 2.0**-15, -3.0]), torch.tensor([[5.0, 0.0], [2.0**-14, 1.0]]).half(), torch.zeros(0)]
    scaler._ours.checks.allow_fp16 = True
    optimizer: Any = sgd(values, place.device)
    if how == "fused":
        optimizer = torch.optim.AdamW(optimizer.param_groups[0]["params"][:1], fused=True)
        values = values[:1]
    if how == "_check_inf_per_device":
        scaler._check_inf_per_device(optimizer)
    take_step(scaler, optimizer, how if how in ("unscale_", "clip") else "step")
    largest = 3.0 if how == "fused" else 5.0
    seen = sum(each.numel() for each in values)
    found = scaler.headroom()
    want = (largest / 2**10, math.log2(65504 / largest), (1 if how == "fused" else 2) / seen, 1 / seen, seen)
    assert (found.largest, found.bits, found.zeros, found.subnormal, found.seen) == want
    assert scaler.headroom() == scaler.headroom(wait=False) or place.device == "cuda"


@PLACES
def test_it_is_of_the_last_checks_over_all_optimizers(place: Place) -> None:
    scaler = measuring(place, init_scale=4.0)
    one, other = sgd([torch.tensor([8.0, 0.0])], place.device), sgd([torch.tensor([16.0])], place.device)
    assert str(scaler.headroom()) == "no gradients were measured yet"
    scaler.step(one)
    scaler.step(other)
    scaler.update()
    assert scaler.headroom() == Headroom(4.0, math.log2(65504 / 16), 1 / 3, 0.0, 3)
    other.param_groups[0]["params"][0].grad.fill_(1.0)
    scaler.step(other)
    scaler.update()
    assert scaler.headroom() == Headroom(2.0, math.log2(65504 / 8), 1 / 3, 0.0, 3)
    del one
    assert scaler.headroom() == Headroom(0.25, math.log2(65504), 0.0, 0.0, 1)


@PLACES
@pytest.mark.parametrize("divides", [False, True])
def test_looks_and_updates_change_nothing_of_what_the_dividing_check_measured(place: Place, divides: bool) -> None:
    scaler, held = measuring(place, init_scale=2.0**12), sgd([torch.tensor([8.0, 1.0])], place.device)
    scaler.unscale_(held)
    want = scaler.headroom()
    assert want.largest == 8.0 / 2**12
    for _ in range(2):
        scaler._check_inf_per_device(held)
        assert scaler.headroom() == want
        scaler.update()
    scaler.unscale_(held) if divides else scaler.step(held)
    assert (scaler.headroom() == want) is not divides  # it divides once more


def test_without_a_wait_it_is_of_all_optimizers_however_many() -> None:
    scaler = measuring(Place("cpu", "torch"), init_scale=1.0)
    held = [sgd([torch.tensor([float(number)])]) for number in range(1, abi.ROWS + 4)]
    for optimizer in held:
        scaler.step(optimizer)
    assert scaler.headroom(wait=False) == scaler.headroom()
    assert scaler.metrics()["scaler/largest"] == abi.ROWS + 3


@PLACES
def test_what_is_not_finite_is_seen_and_not_the_largest(place: Place) -> None:
    scaler = measuring(place, init_scale=4.0)
    held = sgd([torch.tensor([INF, 2.0, math.nan, 0.0])], place.device)
    scaler.step(held)
    assert scaler.headroom() == Headroom(0.5, math.log2(65504 / 2), 0.25, 0.0, 4)


@PLACES
@pytest.mark.parametrize("how", ["step", "unscale_", "clip"])
def test_measuring_changes_no_bit(place: Place, how: str) -> None:
    runs = []
    for measure in (False, True):
        scaler = started(GradScaler, place.device, init_scale=2.0**12, measure=measure, backend=place.backend)
        optimizer = sgd([torch.linspace(-9, 9, 5000), torch.linspace(0, 1e-6, 77).bfloat16()], place.device)
        for _ in range(3):
            take_step(scaler, optimizer, how)
        held = optimizer.param_groups[0]["params"]
        runs.append([*held, *(each.grad for each in held), scaler._scale])
    assert_all_same(*runs)


def test_without_measuring_it_raises() -> None:
    with pytest.raises(RuntimeError, match="headroom.. needs measure=True"):
        GradScaler("cpu").headroom()
    assert "scaler/bits" not in GradScaler("cpu").metrics()
    with pytest.raises(RuntimeError, match=r"a StepGuard measures nothing; use GradScaler\(measure=True\)"):
        StepGuard("cpu").headroom(wait=False)
    assert not is_measuring(StepGuard("cpu")._ours.checks)
    assert is_measuring(ShardedGradScaler("cpu", measure=True)._ours.checks)


def test_metrics_have_what_was_measured() -> None:
    scaler = started(GradScaler, "cpu", measure=True, init_scale=2.0)
    assert all(map(math.isfinite, scaler.metrics().values()))
    optimizer = sgd([torch.tensor([8.0, 0.0, 2.0**-20, 2.0**-15])])
    scaler.step(optimizer)
    scaler.update()
    found = scaler.metrics()
    names = ("largest", "bits", "zeros", "subnormal")
    assert [found[f"scaler/{name}"] for name in names] == [4.0, math.log2(65504 / 8), 0.25, 0.5]


SENTENCES = [
    (Headroom(1.0, 11.2, 0.031, 0.008, 124_000_000), "11 bits of headroom, 3.1 % of 124 M gradients are zero, 0.8 % "),
    (Headroom(1.0, 11.2, 0.031, 0.008, 5), "subnormal: a larger scale would help"),
    (Headroom(1.0, 11.2, 0.5, 0.0, 5), "50.0 % of 5 gradients are zero, 0.0 % subnormal: the scale fits"),
    (Headroom(1.0, 2.4, 0.0, 0.2, 5), "the scale fits"),
    (Headroom(1.0, 0.4, 0.0, 0.2, 5), "0 bits of headroom, 0.0 % of 5 gradients are zero, 20.0 % subnormal: an overf"),
    (
        Headroom(1.0, 1.2, 0.0, 0.2, 5),
        "1 bit of headroom, 0.0 % of 5 gradients are zero, 20.0 % subnormal: the scale fits",
    ),
    (Headroom(0.0, INF, 1.0, 0.0, 1), "all of 1 gradient are zero"),
    (Headroom(0.0, INF, 0.25, 0.0, 4), "25.0 % of 4 gradients are zero, no other is finite"),
]


@pytest.mark.parametrize(("headroom", "sentence"), SENTENCES)
def test_it_is_a_sentence(headroom: Headroom, sentence: str) -> None:
    assert sentence in str(headroom)
