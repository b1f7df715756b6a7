"""Where we differ from torch: the complete list, by number, each beside what torch does (docs/differences.md)."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import Place, flags, grads, places, sgd, started, values
from test_foreign_code import Wrapper
from torch import Tensor
from torch.amp.grad_scaler import OptState

from scaler_triton import GradScaler, ShardedGradScaler

TINY, HUGE = 2.0**-126, torch.finfo(torch.float32).max
SCALE = 4.0
DIVIDED, DIVIDED_TWICE, SCALED = [-1.0], [-0.25], [-4.0]  # what steps make of a gradient of 8 at SCALE

ROOT = Path(__file__).parents[2]
PLACES = pytest.mark.parametrize("place", places(), ids=str)
KINDS = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
BOTH = [torch.amp.GradScaler, GradScaler]
# Tests in other folders that show a number without having it in their name.
ELSEWHERE = {
    10: "test_grad_scaler_on_fsdp1_warns_once_and_is_right_with_a_process_group",
    17: "test_partial_gradients_whose_sum_overflows_spare_the_weights",
    22: "test_what_is_replaced_on_torchs_class_reaches_ours_under_a_patch",
}


def numbers_told() -> list[int]:
    page = (ROOT / "docs" / "differences.md").read_text()
    return [int(number) for number in re.findall(r"^(\d+)\. ", page, re.MULTILINE)]


def test_the_readme_says_how_many_there_are() -> None:
    numbers = numbers_told()
    assert numbers == sorted(set(numbers))
    assert f"the {len(numbers)} numbered" in (ROOT / "README.md").read_text()


def test_every_number_has_a_test() -> None:
    names = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    assert set(ELSEWHERE.values()) <= names
    shown = {int(found[1]) for name in names if (found := re.match(r"test_(\d\d?)_", name))}
    assert sorted(shown | set(ELSEWHERE)) == numbers_told()


def started_at(cls: Any, place: Place | None = None, **options: Any) -> Any:
    """Return a started scaler at SCALE that does not grow."""
    if place is not None and cls is not torch.amp.GradScaler:
        options["backend"] = place.backend
    options = {"init_scale": SCALE, "growth_interval": 100, **options}
    return started(cls, "cpu" if place is None else place.device, **options)


def optimizer_of(fused: bool = False, value: float = 8.0, place: Place | None = None) -> torch.optim.SGD:
    """Return SGD with learning rate 0.5 over one parameter at 0, its gradient `value`."""
    return sgd([torch.full((1,), value)], "cpu" if place is None else place.device, fused=fused)


def only(optimizer: Any) -> Tensor:
    (parameter,) = optimizer.param_groups[0]["params"]
    return parameter


@PLACES
@pytest.mark.parametrize("sharded", [False, True])
def test_1_a_fused_optimizer_gets_a_flag_of_0_or_1_without_dims(place: Place, sharded: bool) -> None:
    """torch passes the sum over devices, as a rank's flags may be, and fused kernels skip at exactly 1."""
    ended = []
    for cls in BOTH:
        optimizer, scaler = optimizer_of(fused=True, place=place), started_at(cls, place)
        scaler.unscale_(optimizer)
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for device in found:
            found[device] = torch.full((1,) if sharded else (), 2.0, device=device)
        scaler.step(optimizer)
        ended.append(values(optimizer))
    assert ended[0] != [0.0]
    assert ended[1] == [0.0]


BAD_SCALES: list[Any] = [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-39, 1e39]


@pytest.mark.parametrize("cls", BOTH)
def test_2_the_constructor_keeps_torchs_asserts(cls: type) -> None:
    with pytest.raises(AssertionError, match=r"^The growth factor must be > 1\.0\.$"):
        cls("cpu", growth_factor=1.0)
    with pytest.raises(AssertionError, match=r"^The backoff factor must be < 1\.0\.$"):
        cls("cpu", backoff_factor=1.0)


@PLACES
def test_2_static_scale_by_setters(place: Place) -> None:
    scaler = started(GradScaler, place.device, init_scale=8.0, growth_interval=1, backend=place.backend)
    scaler.set_growth_factor(1.0)
    scaler.set_backoff_factor(1.0)
    for value in (1.0, math.inf):
        scaler.step(sgd([torch.tensor([value])], place.device))
        scaler.update()
        assert scaler.get_scale() == 8.0


def test_2_unknown_devices_are_refused_and_known_ones_normalised() -> None:
    for device in ("banana", 3.5):
        with pytest.raises(ValueError, match=f"^device must name a torch device, got {device!r}$"):
            GradScaler(device)
    for device in ("cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)):
        scaler = started(GradScaler, device)
        scaler.update(torch.tensor([2.0]))
        assert scaler._device == "cpu"
        assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
@pytest.mark.parametrize("device", ["cuda:0", torch.device("cuda"), torch.device("cuda", 1)], ids=str)
def test_2_of_a_cuda_device_only_its_type_counts(monkeypatch: pytest.MonkeyPatch, cls: type, device: Any) -> None:
    """Whether there is CUDA is asked for as torch asks, so that a test may answer for both."""
    common = torch.cuda.amp.common
    monkeypatch.setattr(common, "amp_definitely_not_available", lambda: True)
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert not cls(device).is_enabled()
    monkeypatch.setattr(common, "amp_definitely_not_available", lambda: False)
    scaler = cls(device)
    assert scaler.is_enabled()
    assert scaler._device == "cuda"


@PLACES
@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
def test_4_scale_stays_where_its_inverse_is_finite(cls: type, place: Place, two_ranks: None) -> None:
    scaler = started(cls, place.device, init_scale=2 * TINY, growth_interval=1, backend=place.backend)
    for _ in range(3):
        scaler.step(sgd([torch.tensor([math.inf])], place.device))
        scaler.update()
    assert scaler.get_scale() == TINY
    scaler.update(HUGE)
    scaler.step(sgd([torch.tensor([1.0])], place.device))
    scaler.update()
    assert scaler.get_scale() == HUGE
    scaler._scale.fill_(math.inf)
    scaler.step(sgd([torch.tensor([math.inf])], place.device))
    scaler.update()
    assert scaler.get_scale() == HUGE


def test_4_torch_reaches_zero_and_makes_nan_of_zero_gradients() -> None:
    scaler = started(torch.amp.GradScaler, "cpu", init_scale=1e-45)
    for value in (math.inf, 0.0):
        optimizer = sgd([torch.tensor([value])])
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.param_groups[0]["params"][0].isnan().all()


def test_5_update_takes_an_int_and_checks_a_tensor() -> None:
    scaler = started(GradScaler, "cpu")
    scaler.update(1024)
    assert scaler.get_scale() == 1024.0
    scaler.update(torch.tensor([8.0], dtype=torch.float64))
    assert scaler.get_scale() == 8.0
    for bad in (*BAD_SCALES, torch.tensor(math.nan), torch.tensor([0.0])):
        with pytest.raises(ValueError, match="^new_scale must be .* got"):
            scaler.update(bad)
    for wrong, text in (("8", "'8'"), (True, "True")):
        with pytest.raises(TypeError, match=f"^new_scale must be a number, got {text}$"):
            scaler.update(wrong)
    with pytest.raises(AttributeError):
        started(torch.amp.GradScaler, "cpu").update(True)
    for wrong in (torch.ones(2), torch.ones(1, requires_grad=True), torch.ones(1, device="meta")):
        for cls in (torch.amp.GradScaler, GradScaler):
            with pytest.raises(AssertionError, match="^new_scale should be a float or a 1-element torch.cuda.Float"):
                started(cls, "cpu").update(wrong)
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
def test_6_getters_work_when_disabled_and_lazy_init_repeats(cls: type) -> None:
    scaler = cls("cpu", growth_factor=3.0, backoff_factor=0.25, growth_interval=9, enabled=False)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.25, 9)
    assert scaler._get_scale_async() is None
    assert scaler.process_group is None
    enabled = cls("cpu", init_scale=4.0)
    for device in ("cpu", torch.device("cpu")):
        enabled._lazy_init_scale_growth_tracker(device)
    assert enabled.get_scale() == 4.0


@pytest.fixture
def explicit_group() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone that is not the default one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group([0])
    dist.destroy_process_group()


@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
def test_7_a_pickled_group_is_asked_for_at_the_first_use(cls: Any, explicit_group: dist.ProcessGroup) -> None:
    scaler = started(cls, "cpu", process_group=explicit_group)
    assert copy.deepcopy(scaler).process_group is explicit_group
    copied, optimizer = pickle.loads(pickle.dumps(scaler)), sgd([torch.tensor([4.0])])
    copied.scale(torch.ones(()))
    for call in (lambda: copied.step(optimizer), lambda: copied.overflow_report(gather=True)):
        with pytest.raises(ValueError, match=r"process_group is unset: .* ranks \[0\].* set scaler\.process_group"):
            call()
    assert grads(optimizer) == [4.0]
    assert not copied.overflow_report().bad
    copied.process_group = explicit_group
    copied.step(optimizer)
    assert values(optimizer) != [0.0]


@pytest.mark.gpu
def test_9_bf16_gradients_on_the_gpu() -> None:
    for backend in ("triton", "torch"):
        optimizer = sgd([torch.tensor([3.0, math.inf]).bfloat16()], "cuda")
        scaler = started(GradScaler, "cuda", init_scale=2.0, backend=backend)
        scaler.unscale_(optimizer)
        assert optimizer.param_groups[0]["params"][0].grad[0].item() == 1.5
        assert flags(scaler, optimizer) == [1.0]


# Number 9's other half, fp64 in double, is test_gradients.test_fp64_beyond_fp32_is_finite.


@pytest.mark.parametrize("cls", BOTH)
def test_11_an_optimizer_at_the_id_of_a_freed_one_starts_afresh(cls: type) -> None:
    """torch says that it was unscaled already. The flag of the freed one counts in both."""
    scaler, optimizer = started_at(cls), optimizer_of(value=math.inf)
    seen: set[int] = set()
    while id(optimizer) not in seen and len(seen) < 1000:  # until an id comes again
        seen.add(id(optimizer))
        scaler.unscale_(optimizer)
        del optimizer
        gc.collect(0)
        optimizer = optimizer_of()
    assert id(optimizer) in seen
    if cls is GradScaler:
        scaler.unscale_(optimizer)
        assert flags(scaler, optimizer) == [0.0]
    else:
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("cls", [GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("fused", [False, True])
def test_12_without_a_reduction_no_gradients_raise_as_torch(cls: type, fused: bool) -> None:
    optimizer = sgd([None], fused=fused)
    scaler = started(cls, "cpu")
    if fused:
        scaler.step(optimizer)
        with pytest.raises(AssertionError, match=r"^No inf checks were recorded prior to update\.$"):
            scaler.update()
    else:
        with pytest.raises(AssertionError, match=r"^No inf checks were recorded for this optimizer\.$"):
            scaler.step(optimizer)


def test_12_a_fused_optimizer_whose_gradients_came_only_after_unscale_steps() -> None:
    """It is torch's order of calls, in which gradients are unscaled by then: these are taken as they are."""
    for cls in (GradScaler, torch.amp.GradScaler):
        optimizer, scaler = sgd([None], fused=True), started(cls, "cpu", init_scale=4.0)
        (parameter,) = optimizer.param_groups[0]["params"]
        scaler.unscale_(optimizer)
        parameter.grad = torch.full_like(parameter, 8.0)
        if cls is GradScaler:
            scaler.step(optimizer)
            assert values(optimizer) == [-4.0]
        else:
            with pytest.raises(AttributeError):
                scaler.step(optimizer)


def test_13_extras_are_off_by_default() -> None:
    assert set(GradScaler("cpu").state_dict()) == set(torch.amp.GradScaler("cpu").state_dict())
    assert GradScaler("cpu").process_group is None


@PLACES
def test_14_a_first_step_skipped_leaves_no_garbage_in_fused_momentum(place: Place) -> None:
    parameter = torch.nn.Parameter(torch.ones(1000, device=place.device))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, fused=True)
    scaler = started_at(GradScaler, place, init_scale=2.0)
    for gradient in (math.inf, 4.0):
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.grad_scale = torch.ones((), device=place.device)  # type: ignore[attr-defined]
        scaler.step(optimizer)
        assert not hasattr(optimizer, "grad_scale")  # the user's, for one step
        scaler.update()
    assert torch.equal(parameter.detach().cpu(), torch.full((1000,), 1.0 - 4.0 / 1.0))


def test_16_sparse_fp16_duplicates_are_summed_in_fp32() -> None:
    """torch's GradScaler loses the small ones."""
    small = torch.tensor([1.0, 2.0**-11, 2.0**-11, 2.0**-11]).half()
    grad = torch.sparse_coo_tensor(torch.zeros(1, 4, dtype=torch.int64), small, (3,), check_invariants=False)
    sums = []
    for cls in (GradScaler, torch.amp.GradScaler):
        optimizer = sgd([grad])
        started(cls, "cpu")._check_inf_per_device(optimizer)
        sums.append(only(optimizer).grad._values().item())  # type: ignore[union-attr]
    assert sums == [torch.tensor(1 + 3 * 2.0**-11).half().item(), 1.0]


# 18: a step that was unscaled, but not taken before the update, until the next loss is scaled.


def carried(scaler: Any, late: Any, early: Any = None) -> None:
    """Unscale both, step the early one alone, and update."""
    scaler.unscale_(late)
    if early is not None:
        scaler.step(early)
    scaler.update()


@PLACES
@KINDS
@pytest.mark.parametrize("cls", BOTH)
def test_18_a_step_after_the_update_divides_once(cls: Any, fused: bool, place: Place) -> None:
    early, late = optimizer_of(place=place), optimizer_of(fused, place=place)
    scaler = started_at(cls, place)
    carried(scaler, late, early)
    assert scaler._per_optimizer_states[id(late)]["stage"] is OptState.READY  # as a fresh state of torch's
    assert scaler._found_inf_per_device(late) == {}
    scaler.step(late)
    scaler.update()
    assert values(early) == DIVIDED
    assert values(late) == (DIVIDED if cls is GradScaler else DIVIDED_TWICE)


def from_a_collective(parameter: Any) -> None:
    """Write the kept gradient as a broadcast does, which no version counter shows."""
    parameter.grad.data.fill_(8.0)


def from_backward(parameter: Any) -> None:
    parameter.grad.zero_().add_(8.0)


def anew(parameter: Any) -> None:
    parameter.grad = torch.full_like(parameter, 8.0)


@PLACES
@KINDS
@pytest.mark.parametrize("came", [from_a_collective, from_backward, anew])
@pytest.mark.parametrize("when", ["after the loss", "before the loss"])
def test_18_after_the_next_loss_gradients_are_scaled_ones(
    came: Callable[[Any], None], when: str, fused: bool, place: Place
) -> None:
    """A batch was given up; those of the next one may come by any way. All this is as in torch."""
    for cls in BOTH:
        optimizer, scaler = optimizer_of(fused, math.inf, place), started_at(cls, place, init_scale=2 * SCALE)
        carried(scaler, optimizer)
        if when == "before the loss":
            came(only(optimizer))
        scaler.scale(torch.ones((), device=place.device))
        if when == "after the loss":
            came(only(optimizer))
        scaler.step(optimizer)
        scaler.update()
        assert (values(optimizer), scaler.get_scale()) == (DIVIDED, SCALE)


def test_18_without_gradients_nothing_is_carried() -> None:
    optimizer, scaler = sgd([None]), started_at(GradScaler)
    scaler.unscale_(optimizer)
    scaler.update(SCALE)
    only(optimizer).grad = torch.full((3,), 8.0)
    scaler.step(optimizer)
    assert values(optimizer) == DIVIDED


def test_18_nothing_is_kept_alive_and_optimizers_that_are_equal_are_two() -> None:
    class Equal(torch.optim.SGD):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    early, late = (Equal([only(optimizer_of())], lr=0.5) for _ in range(2))
    for optimizer in (early, late):
        only(optimizer).grad = torch.full((1,), 8.0)
    scaler = started_at(GradScaler)
    carried(scaler, late, early)
    gradient, parameter = weakref.ref(only(late).grad), only(late)
    scaler.step(late)
    assert values(late) == DIVIDED
    scaler.update()
    parameter.grad = None
    gc.collect()
    assert gradient() is None


def test_19_a_flag_is_its_steps_and_its_tensor_used_again() -> None:
    for cls, later in ((GradScaler, 0.0), (torch.amp.GradScaler, 1.0)):
        optimizer, scaler = sgd([torch.tensor([math.inf])]), started(cls, "cpu")
        scaler.unscale_(optimizer)
        (flag,) = scaler._found_inf_per_device(optimizer).values()
        assert flag.item() == 1.0
        scaler.update()
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad = torch.ones(1)
        scaler.unscale_(optimizer)
        assert flag.item() == later
        assert flags(scaler, optimizer) == [0.0]


def test_20_a_gradient_of_no_use_is_named() -> None:
    def attempt(cls: Any, gradient: torch.Tensor) -> BaseException | None:
        parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        try:
            started(cls, "cpu").unscale_(torch.optim.SGD([parameter], lr=1.0))
        except Exception as error:
            return error
        return None

    gradient = torch.ones(2, dtype=torch.complex64)
    ours, theirs = attempt(GradScaler, gradient), attempt(torch.amp.GradScaler, gradient)
    assert type(ours) is type(theirs) is NotImplementedError
    assert "parameter 0 has dtype torch.complex64" in str(ours)
    assert "not implemented for 'ComplexFloat'" in str(theirs)
    assert attempt(torch.amp.GradScaler, torch.ones(2, device="meta")) is None
    assert "parameter 0 is on device meta" in str(attempt(GradScaler, torch.ones(2, device="meta")))


# 23: a step that began and did not return.


def fail(scaler: Any, optimizer: Any, error: type[BaseException] = KeyboardInterrupt) -> None:
    with mock.patch.object(optimizer, "step", side_effect=error), pytest.raises(error):
        scaler.step(optimizer)


def next_batch(scaler: Any, optimizer: Any, value: float = 8.0, came: Callable[[Any], None] = anew) -> None:
    parameter = only(optimizer)
    scaler.scale(torch.ones((), device=parameter.device))
    came(parameter)
    parameter.grad.mul_(value / 8.0)  # type: ignore[union-attr]


@PLACES
@KINDS
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("came", [from_a_collective, anew])
@pytest.mark.parametrize("value", [8.0, math.inf])
def test_23_the_next_batch_is_unscaled_and_checked(
    value: float, came: Callable[[Any], None], explicit: bool, fused: bool, place: Place
) -> None:
    optimizer, scaler = optimizer_of(fused, place=place), started_at(GradScaler, place)
    if explicit:
        scaler.unscale_(optimizer)
    fail(scaler, optimizer)
    next_batch(scaler, optimizer, value, came)
    scaler.unscale_(optimizer)  # may be called, as may `clip_grad_norm_`
    scaler.step(optimizer)
    scaler.update()
    assert values(optimizer) == (DIVIDED if value == 8.0 else [0.0])
    assert scaler.get_scale() == (SCALE if value == 8.0 else SCALE / 2)


def test_23_torch_steps_with_scaled_gradients() -> None:
    optimizer, scaler = optimizer_of(), started_at(torch.amp.GradScaler)
    fail(scaler, optimizer)
    next_batch(scaler, optimizer)
    scaler.step(optimizer)
    assert values(optimizer) == SCALED


def test_23_one_optimizer_that_failed_leaves_another_alone() -> None:
    """A GAN's: the second is unscaled, and steps after the first one's next batch. A loss alone ends no step."""
    first, second, scaler = optimizer_of(), optimizer_of(), started_at(GradScaler)
    scaler.unscale_(second)
    fail(scaler, Wrapper(first))
    next_batch(scaler, first)
    for optimizer in (first, second):
        scaler.step(optimizer)
        assert values(optimizer) == DIVIDED


def test_23_a_scale_that_an_interrupt_left_on_a_fused_optimizer_is_not_the_users() -> None:
    optimizer, scaler = optimizer_of(fused=True), started_at(GradScaler)
    fail(scaler, optimizer)
    optimizer.grad_scale = scaler._get_scale_async()  # type: ignore[attr-defined]
    next_batch(scaler, optimizer)
    scaler.step(optimizer)
    assert values(optimizer) == DIVIDED
