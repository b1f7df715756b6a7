"""What the host keeps of a captured step: nothing that was only recorded may be taken for done. Needs no graph."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import Place, flags, places, sgd, started
from scaler_triton.overflow_marks import INF
from torch.utils._python_dispatch import TorchDispatchMode

from scaler_triton import GradScaler, batch_ops, settings
from scaler_triton.kernels import update_scale
from scaler_triton.kernels.table import GradTable

TRITON = pytest.mark.parametrize("place", [place for place in places() if place.backend == "triton"], ids=str)
SCALE = 8.0


@contextmanager
def as_if_captured() -> Iterator[None]:
    """Have the scaler believe that its launches are recorded; they run."""
    with ExitStack() as patches:
        for module in ("stats", "unscaling", "updating", "verdict"):
            patches.enter_context(mock.patch(f"scaler_triton.{module}.is_captured", return_value=True))
        yield


def new(place: Place, **options: Any) -> tuple[Any, Any]:
    """A scaler that has taken a step, and its optimizer, which keeps its gradients where they are."""
    scaler = started(GradScaler, place.device, init_scale=SCALE, growth_interval=1000, backend=place.backend, **options)
    optimizer = sgd([torch.full((3,), 8.0)], place.device, fused=True)
    step(scaler, optimizer)
    return scaler, optimizer


def step(scaler: Any, optimizer: Any, gradient: float = 8.0, new_scale: float | None = None) -> None:
    optimizer.param_groups[0]["params"][0].grad.fill_(gradient)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update(new_scale)


@TRITON
def test_a_captured_step_clears_its_flag_whatever_was_before(place: Place) -> None:
    scaler, optimizer = new(place)
    verdict = scaler._records.plans()[0].verdict
    assert verdict.cleared
    verdict.found_inf.fill_(1.0)  # as an eager step may leave it for a replay
    with as_if_captured():
        step(scaler, optimizer)
    assert scaler.get_scale() == SCALE


@TRITON
def test_what_a_captured_update_will_clear_is_not_clear_yet(place: Place) -> None:
    scaler, optimizer = new(place)
    with as_if_captured():
        step(scaler, optimizer)
    verdict = scaler._records.plans()[0].verdict
    verdict.found_inf.fill_(1.0)  # as nobody has replayed the update
    step(scaler, optimizer)
    assert not scaler.was_skipped(optimizer)
    assert scaler.get_scale() == SCALE


@TRITON
def test_what_a_captured_update_alone_will_clear_is_not_clear_yet(place: Place) -> None:
    scaler, optimizer = new(place)
    scaler.step(optimizer)
    with as_if_captured():
        scaler.update()
    scaler._records.plans()[0].verdict.found_inf.fill_(1.0)  # as nobody has replayed the update
    step(scaler, optimizer)
    assert not scaler.was_skipped(optimizer)
    assert scaler.get_scale() == SCALE


@TRITON
def test_an_update_outside_the_graph_clears_no_flag_for_good_that_replays_write(place: Place) -> None:
    scaler, optimizer = new(place)
    optimizer.param_groups[0]["params"][0].grad.fill_(8.0)
    with as_if_captured():
        scaler.step(optimizer)
    scaler.update()
    scaler._records.plans()[0].verdict.found_inf.fill_(1.0)  # as a replay of the step leaves it
    step(scaler, optimizer)
    assert not scaler.was_skipped(optimizer)
    assert scaler.get_scale() == SCALE


@TRITON
def test_a_replays_skip_is_told(place: Place) -> None:
    scaler, optimizer = new(place)
    with as_if_captured():
        step(scaler, optimizer, float("inf"))
        assert scaler.was_skipped(optimizer)
        step(scaler, optimizer)
        assert not scaler.was_skipped(optimizer)


@TRITON
@pytest.mark.parametrize(
    ("setter", "value"),
    [
        ("set_growth_factor", 3.0),
        ("set_backoff_factor", 0.25),
        ("set_growth_interval", 7),
        ("set_min_scale", 2.0),
        ("set_max_scale", 2.0**20),
        ("set_hysteresis", 2),
    ],
)
def test_setters_write_at_once_what_a_graph_reads(place: Place, setter: str, value: float) -> None:
    scaler, _ = new(place)
    (policy,) = scaler._device_policies.values()
    numbers, before = policy.numbers, policy.numbers.tolist()
    getattr(scaler, setter)(value)
    assert policy.numbers is numbers
    assert numbers.tolist() != before


@TRITON
def test_what_a_graph_marks_is_told_after_gradients_of_another_form(place: Place) -> None:
    scaler, optimizer = new(place)
    (layout,) = scaler._records.plans()[0].layouts
    with mock.patch.object(GradTable, "is_in_a_graph", True):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(6, device=place.device)[::2]
        with mock.patch.object(optimizer, "step"):
            step(scaler, optimizer)
        optimizer.param_groups[0]["params"][0].grad = torch.ones(3, device=place.device)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, device=place.device))]})
        step(scaler, optimizer)
    for table in layout.tables.values():
        table.bits.fill_(INF)  # as a replay does
    assert [plan.marks.of(0) for plan in scaler._records.plans()] == [{0: INF}]


@TRITON
def test_unscaling_and_checking_it_sends_addresses_once(place: Place) -> None:
    scaler, optimizer = new(place, check_unscaled=True)
    with mock.patch.object(GradTable, "set_addresses", autospec=True, side_effect=GradTable.set_addresses) as sent:
        scaler.unscale_(optimizer)
    (layout,) = scaler._records.plans()[0].layouts
    assert sent.call_count == len({id(table) for table in layout.tables.values()})  # tuned, there may be two
    assert flags(scaler, optimizer) == [0.0]


@TRITON
def test_the_numbers_stay_where_a_graph_reads_them(place: Place) -> None:
    scaler, optimizer = new(place)
    step(scaler, optimizer)
    (held,) = scaler._device_policies.values()
    where = held.numbers.data_ptr()
    scaler.set_growth_interval(7)
    step(scaler, optimizer)
    (held,) = scaler._device_policies.values()
    assert (held.numbers.data_ptr(), held.numbers[2].item()) == (where, 7)


@TRITON
def test_the_numbers_are_not_made_while_a_graph_is_captured(place: Place) -> None:
    scaler, optimizer = new(place)
    scaler._device_policies.clear()
    with (
        mock.patch.object(settings, "refuse_capture", side_effect=RuntimeError("captured")),
        pytest.raises(RuntimeError, match="captured"),
    ):
        step(scaler, optimizer)
    assert not scaler._device_policies


@TRITON
def test_flags_of_others_are_updated_by_the_scalers_own_numbers(place: Place) -> None:
    """A graph reads the numbers where they are: those of a shared cache may go, and no setter reaches them."""
    scaler, optimizer = new(place)
    scaler.set_backoff_factor(0.25)
    optimizer.param_groups[0]["params"][0].grad.fill_(8.0)
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    for device in found:
        found[device] = torch.ones((), device=device)  # not our tensor
    scaler.step(optimizer)
    launch = update_scale.launch_update_rows
    with mock.patch.object(batch_ops.kernels().update_scale, "launch_update_rows", side_effect=launch) as launched:
        scaler.update()
    (held,) = scaler._device_policies.values()
    assert launched.call_args.args[3] is held.numbers
    assert scaler.get_scale() == SCALE / 4


@TRITON
def test_a_scale_of_another_dtype_is_not_handed_to_the_kernel(place: Place) -> None:
    if place.device == "cuda":
        pytest.skip("torch's op takes an fp32 scale only")
    scaler, optimizer = new(place)
    scaler._scale = scaler._scale.double()
    with mock.patch.object(batch_ops.kernels().update_scale, "launch_update_rows", side_effect=AssertionError):
        step(scaler, optimizer, float("inf"))
    assert scaler.get_scale() == SCALE / 2


class NoCopies(TorchDispatchMode):
    """Refuses what a capture refuses of a number on the host: to copy it to the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("place", places(), ids=str)
def test_what_is_refused_in_a_capture_keeps_its_reason(place: Place) -> None:
    scaler, optimizer = new(place)

    def refused(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("two captures followed each other")  # as a table's addresses do

    failing = mock.patch.object(batch_ops, "unscale_batch_", refused)
    with failing, NoCopies(), pytest.raises(RuntimeError, match="two capt"):
        scaler.unscale_(optimizer)
    assert flags(scaler, optimizer) == [1.0]


@TRITON
def test_the_flag_that_a_replay_writes_never_becomes_another_optimizers(place: Place) -> None:
    scaler, optimizer = new(place)
    with as_if_captured():
        step(scaler, optimizer)
    row = scaler._records.plan(optimizer).verdict.row
    del optimizer
    gc.collect()
    later = [sgd([torch.full((3,), 8.0)], place.device) for _ in range(3)]
    for each in later:  # the first one's step makes the scaler forget the step before
        scaler.step(each)
    assert row not in [scaler._records.plan(each).verdict.row for each in later]
