"""Where we differ from torch: the complete list, by number, each beside what torch does (docs/differences.md)."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Place, flags, places, sgd, started, values

from scaler_triton import GradScaler, ShardedGradScaler

TINY, HUGE = 2.0**-126, torch.finfo(torch.float32).max

ROOT = Path(__file__).parents[1]


def numbers_told() -> list[str]:
    return re.findall(r"^(\d+)\. ", (ROOT / "docs" / "differences.md").read_text(), re.MULTILINE)


def test_the_readme_tells_how_many_there_are() -> None:
    numbers = numbers_told()
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    assert f"the {len(numbers)} numbered" in (ROOT / "README.md").read_text()


# What shows a number where no test in this file has it in its name.
ELSEWHERE = {
    1: "distributed/test_dtensor.py::test_a_square_mesh_over_a_part_of_the_world_reduces_along_both_sides",
    10: "distributed/test_models.py::test_grad_scaler_on_fsdp1_warns_once_naming_the_fix",
    11: "test_contract.py::test_a_new_optimizer_at_an_old_id_starts_ready_and_the_old_flag_counts",
    14: "test_steps.py::test_first_step_skipped_leaves_no_garbage_in_fused_momentum",
    15: "test_wrappers.py::test_a_wrapper_and_the_optimizer_inside_share_one_state",
    16: "test_gradients.py::test_sparse_fp16_duplicates_are_summed_in_fp32",
    17: "distributed/test_dtensor.py::test_partial_gradients_whose_sum_overflows_spare_the_weights",
    18: "test_unstepped.py::test_18_a_postponed_step_divides_once",
    21: "test_lending.py::test_a_fused_optimizer_with_parameters_on_the_cpu_gets_copies_that_were_waited_for",
    22: "test_patching.py::test_what_is_replaced_on_torchs_class_reaches_ours_under_a_patch",
    23: "test_failed_steps.py::test_23_the_next_batch_is_unscaled_and_checked",
}


def test_every_number_has_a_test() -> None:
    here = {int(number) for number in re.findall(r"^def test_(\d+)_", Path(__file__).read_text(), re.MULTILINE)}
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), place
    assert here.isdisjoint(ELSEWHERE)
    assert sorted([*here, *ELSEWHERE]) == list(range(1, int(numbers_told()[-1]) + 1))


BAD_SCALES = [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-39, 1e39]
BAD_NUMBERS: list[tuple[str, Any]] = [
    *(("init_scale", value) for value in BAD_SCALES),
    *(("growth_factor", value) for value in (math.nan, math.inf)),
    *(("backoff_factor", value) for value in (math.nan, 0.0, -1.0)),
    *(("growth_interval", value) for value in (0, -1, 2**63)),
]


@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
@pytest.mark.parametrize(("name", "value"), BAD_NUMBERS)
def test_2_constructor_refuses_what_cannot_work(cls: type, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be .* got {value!r}".replace("+", r"\+")):
        cls("cpu", **{name: value})


@pytest.mark.parametrize("cls", [GradScaler, torch.amp.GradScaler])
def test_2_constructor_keeps_torchs_asserts(cls: type) -> None:
    with pytest.raises(AssertionError, match=r"^The growth factor must be > 1\.0\.$"):
        cls("cpu", growth_factor=1.0)
    with pytest.raises(AssertionError, match=r"^The backoff factor must be < 1\.0\.$"):
        cls("cpu", backoff_factor=1.0)


@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
@pytest.mark.parametrize("name", ["init_scale", "growth_factor", "backoff_factor", "growth_interval"])
@pytest.mark.parametrize("value", ["2", None])
def test_2_constructor_names_what_is_no_number(cls: type, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be an? (number|int), got {value!r}$"):
        cls("cpu", **{name: value})


@pytest.mark.parametrize("state", [None, "state", 3, []])
def test_2_a_checkpoint_is_a_dict(state: Any) -> None:
    scaler = GradScaler("cpu")
    before = scaler.state_dict()
    with pytest.raises(TypeError, match=f"^state_dict must be a dict, got {state!r}$".replace("[", r"\[")):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    ("setter", "bad", "legal"),
    [
        ("growth_factor", [math.nan, 0.5, math.inf], [1.0, 3.0]),
        ("backoff_factor", [math.nan, 0.0, 1.5], [1.0, 0.1]),
        ("growth_interval", [0, -3], [1, 10**12]),
    ],
)
def test_2_setters_refuse_and_keep(setter: str, bad: list[Any], legal: list[Any]) -> None:
    scaler = GradScaler("cpu")
    for value in bad:
        before = scaler.state_dict()
        with pytest.raises(ValueError, match=f"must be .* got {value!r}"):
            getattr(scaler, f"set_{setter}")(value)
        assert scaler.state_dict() == before
    for value in legal:
        getattr(scaler, f"set_{setter}")(value)
        assert getattr(scaler, f"get_{setter}")() == value


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("scale", math.nan, ValueError),
        ("scale", 0.0, ValueError),
        ("scale", "65536", TypeError),
        ("scale", None, TypeError),
        ("growth_factor", 0.5, ValueError),
        ("backoff_factor", 2.0, ValueError),
        ("growth_interval", 0, ValueError),
        ("growth_interval", 2.5, TypeError),
        ("_growth_tracker", -1, ValueError),
        ("_growth_tracker", 2**31, ValueError),
    ],
)
@pytest.mark.parametrize("make", [lambda: GradScaler("cpu"), lambda: started(GradScaler, "cpu")])
def test_2_checkpoint_with_a_wrong_field_changes_nothing(
    make: Callable[[], Any], field: str, value: Any, error: type[Exception]
) -> None:
    scaler = make()
    before = scaler.state_dict()
    with pytest.raises(error, match=f"^{field} must be .* got {value!r}"):
        scaler.load_state_dict({**GradScaler("cpu", init_scale=2.0, growth_interval=7).state_dict(), field: value})
    assert scaler.state_dict() == before


@pytest.mark.parametrize("field", ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"])
def test_2_checkpoint_without_a_field_is_torchs_keyerror_before_anything_changes(field: str) -> None:
    saved = GradScaler("cpu", init_scale=2.0).state_dict()
    del saved[field]
    for cls in (torch.amp.GradScaler, GradScaler):
        scaler = started(cls, "cpu")
        before = scaler.state_dict()
        with pytest.raises(KeyError, match=f"^'{field}'$"):
            scaler.load_state_dict(saved)
        if cls is GradScaler:
            assert scaler.state_dict() == before


def test_2_empty_checkpoint_is_torchs_error() -> None:
    for cls in (torch.amp.GradScaler, GradScaler):
        with pytest.raises(RuntimeError, match="^The source state dict is empty, possibly because"):
            cls("cpu").load_state_dict({})


@pytest.mark.parametrize("place", places(), ids=str)
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


def grown(cls: type, place: Place, **kwargs: Any) -> Any:
    scaler = started(cls, place.device, init_scale=2.0, growth_interval=6, **kwargs)
    for step in range(5):
        if step == 4:
            scaler.set_growth_interval(2)  # below the tracker
        scaler.step(sgd([torch.tensor([1.0])], place.device))
        scaler.update()
    return scaler


@pytest.mark.parametrize("place", places(), ids=str)
def test_3_lowered_interval_still_grows(place: Place) -> None:
    assert grown(torch.amp.GradScaler, place).get_scale() == 2.0  # for good
    scaler = grown(GradScaler, place, backend=place.backend)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (4.0, 0)


@pytest.mark.parametrize("place", places(), ids=str)
@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
def test_4_scale_stays_where_its_inverse_is_finite(cls: type, place: Place, monkeypatch: Any) -> None:
    monkeypatch.setattr(ShardedGradScaler, "_is_sharded", False)
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


def test_7_explicit_group_does_not_survive_pickling_unnoticed() -> None:
    """Sharing and the default group are tests/distributed."""
    from scaler_triton.collectives import GroupRanks

    scaler = started(ShardedGradScaler, "cpu")
    scaler.process_group = GroupRanks((0, 3))  # what pickling puts there
    copied = pickle.loads(pickle.dumps(scaler))
    assert copy.deepcopy(copied).process_group == GroupRanks((0, 3))
    copied.scale(torch.ones(()))
    optimizer = sgd([torch.tensor([4.0])])
    with pytest.raises(ValueError, match=r"process_group is unset: .* ranks \[0, 3\].* set scaler\.process_group"):
        copied.step(optimizer)
    assert optimizer.param_groups[0]["params"][0].grad.item() == 4.0
    with pytest.raises(ValueError, match=r"process_group is unset: .* ranks \[0, 3\]"):
        copied.overflow_report(gather=True)
    assert not copied.overflow_report().bad


@pytest.mark.parametrize("fused", [False, True])
def test_8_a_closure_is_refused_by_position_too(fused: bool) -> None:
    optimizer = sgd([torch.tensor([4.0])], fused=fused)
    scaler = started(GradScaler, "cpu")
    for args, kwargs in (((lambda: 1.0,), {}), ((), {"closure": lambda: 1.0})):
        with pytest.raises(RuntimeError, match="^Closure use is not currently supported if GradScaler is enabled.$"):
            scaler.step(optimizer, *args, **kwargs)
    scaler.step(optimizer, None)
    assert optimizer.param_groups[0]["params"][0].item() < 0


@pytest.mark.gpu
def test_9_bf16_gradients_on_the_gpu() -> None:
    for backend in ("triton", "torch"):
        optimizer = sgd([torch.tensor([3.0, math.inf]).bfloat16()], "cuda")
        scaler = started(GradScaler, "cuda", init_scale=2.0, backend=backend)
        scaler.unscale_(optimizer)
        assert optimizer.param_groups[0]["params"][0].grad[0].item() == 1.5
        assert flags(scaler, optimizer) == [1.0]


# Number 9's other half, fp64 in double, is test_gradients.test_fp64_beyond_fp32_is_finite.


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
