"""Where we differ from torch: the complete list, by number, each beside what torch does (docs/differences.md).

A row runs with torch's class and with ours, and says what each leaves. The rest are tests with a number in their name.
Elsewhere are 10 and 17, in tests/ranks/test_patching.py and test_dtensor.py, and 22, in tests/unit/test_patching.py.
"""

import copy
import gc
import math
import os
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import EXTRAS, PLACES, Place, Wrapper, flags, grads, params_of, sgd, started, values
from test_foreign_code import Run
from torch import Tensor

from scaler_triton import GradScaler, ShardedGradScaler, StepGuard
from scaler_triton.policy import KEY

TINY = 2.0**-126
SCALE = 4.0
DIVIDED, DIVIDED_TWICE, SCALED = [-1.0], [-0.25], [-4.0]  # what steps make of a gradient of 8 at SCALE

EACH = pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
Row = Callable[..., Any]
ROWS: dict[str, tuple[Row, Any, Any]] = {}


def differs(number: int, *, ours: Any, torchs: Any, **arguments: Any) -> Callable[[Row], Row]:
    """Add a row, with what the function returns; for an error, a pattern that its type and text must match."""

    def add(row: Row) -> Row:
        name = "-".join([str(number), row.__name__, *map(str, arguments.values())])
        ROWS[name] = partial(row, **arguments), ours, torchs
        return row

    return add


def assert_ends(row: Row, run: Run, expected: Any) -> None:
    try:
        left = row(run)
    except Exception as error:
        left = f"{type(error).__name__}: {error}"
    if isinstance(expected, re.Pattern):
        assert expected.match(left)
    else:
        assert left == expected


@differs(1, ours=[0.0], torchs=DIVIDED)
def a_flag_that_was_summed_over_ranks(run: Run) -> Any:
    """Fused kernels skip at exactly 1."""
    optimizer, scaler = run.sgd(fused=True), run.started()
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    for device in found:
        found[device] = run.full(2.0, (1,))
    scaler.step(optimizer)
    return values(optimizer)


def test_2_unknown_devices_are_refused_and_known_ones_normalised() -> None:
    for device in ("banana", 3.5):
        with pytest.raises(ValueError, match=f"^device must name a torch device, got {device!r}$"):
            GradScaler(device)
    for device in ("cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)):
        scaler = started(GradScaler, device)
        scaler.update(torch.tensor([2.0]))
        assert scaler._device == "cpu"
        assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler, StepGuard])
@pytest.mark.parametrize("device", ["cuda:0", torch.device("cuda"), torch.device("cuda", 1)], ids=str)
def test_2_of_a_cuda_device_only_its_type_counts(monkeypatch: pytest.MonkeyPatch, cls: type, device: Any) -> None:
    """Whether there is CUDA is asked for as torch asks, so that a test may answer for both."""
    common = torch.cuda.amp.common
    monkeypatch.setattr(common, "amp_definitely_not_available", lambda: True)
    text = "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling."
    if cls is StepGuard:
        text = r"StepGuard is disabled: CUDA is not available. Name the device type, as in StepGuard\('cpu'\)"
    with pytest.warns(UserWarning, match=f"^{text}$") as warned:
        assert not cls(device).is_enabled()
    assert [each.filename for each in warned] == [__file__]
    monkeypatch.setattr(common, "amp_definitely_not_available", lambda: False)
    scaler = cls(device)
    assert scaler.is_enabled()
    assert scaler._device == "cuda"


@differs(4, ours=[TINY, 0.0], torchs=[TINY / 4, "nan"])
def zero_gradients_after_three_overflows_at_the_smallest_scales(run: Run) -> Any:
    scaler = run.scaler(init_scale=2 * TINY)
    scaler.scale(run.full(1.0, ()))
    for value in (math.inf, math.inf, math.inf, 0.0):
        optimizer = run.sgd(value)
        scaler.step(optimizer)
        scaler.update()
    left = values(optimizer)[0]
    return [scaler.get_scale(), "nan" if math.isnan(left) else left]


@pytest.mark.filterwarnings("ignore:.ST09. 50 steps of AdamW in a row were skipped")
@pytest.mark.parametrize("skips", [143, 144])
def test_4_the_first_good_step_after_skips_in_a_row(skips: int) -> None:
    """At the default scale of 2^16; after 143 of them both are right."""
    left = []
    for cls in (None, torch.amp.GradScaler, GradScaler):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer, scaler = torch.optim.AdamW([parameter]), started(cls or GradScaler, "cpu", enabled=cls is not None)
        for step in range(skips + 1) if cls else [skips]:
            optimizer.zero_grad()
            scaler.scale(parameter.sum() / 2).backward()
            if step < skips:
                params_of(optimizer)[0].grad.fill_(math.inf)
            scaler.step(optimizer)
            scaler.update()
        left.append((parameter.tolist(), scaler.get_scale()))
    (right, _), torchs, ours = left
    assert right[0] == pytest.approx(1 - 1e-3, abs=1e-4)
    assert ours == (right, TINY)
    assert repr(torchs) == repr((right, TINY / 2) if skips < 144 else ([math.nan] * 3, TINY / 4))


@differs(5, ours=1024.0, torchs=re.compile("AttributeError: 'int' object has no attribute 'device'"))
def an_int_as_the_scale(run: Run) -> Any:
    scaler = run.started()
    scaler.update(1024)
    return scaler.get_scale()


@differs(5, ours=8.0, torchs=re.compile("RuntimeError: output with shape"), value=8.0, shape=(1, 1))
@differs(5, ours=re.compile("ValueError: new_scale must be .* got"), torchs=0.0, value=0.0, shape=())
def a_tensor_as_the_scale(run: Run, value: float, shape: tuple[int, ...]) -> Any:
    scaler = run.started()
    scaler.update(run.full(value, shape))
    return scaler.get_scale()


@differs(6, ours=(3.0, 0.25, 9), torchs=re.compile("AttributeError: .* no attribute '_growth_factor'"))
def getters_of_a_disabled_scaler(run: Run) -> Any:
    scaler = run.base("cpu", growth_factor=3.0, backoff_factor=0.25, growth_interval=9, enabled=False)
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()


@EACH
def test_6_lazy_initialisation_takes_a_string_and_may_be_repeated(cls: type) -> None:
    """As Accelerate does."""
    scaler: Any = cls("cpu", init_scale=8.0)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 32.0, "_growth_tracker": 3.0})
    for tracker in (3, 4):
        for device in ("cpu", torch.device("cpu")):
            scaler._lazy_init_scale_growth_tracker(device)
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, tracker)
        scaler._growth_tracker += 1


@EACH
def test_7_a_scaler_with_a_group_of_its_own_is_copied_with_it_and_not_pickled(cls: Any, two_ranks: None) -> None:
    group = dist.new_group([0])
    scaler = started(cls, "cpu", process_group=group)
    assert copy.deepcopy(scaler).process_group is copy.copy(scaler).process_group is group
    with pytest.raises(TypeError, match="process_group of its own cannot be pickled"):
        pickle.dumps(scaler)
    scaler.process_group = dist.group.WORLD
    assert pickle.loads(pickle.dumps(scaler)).process_group is None


@pytest.mark.gpu
def test_9_bf16_gradients_on_the_gpu() -> None:
    for backend in ("triton", "torch"):
        optimizer = sgd([torch.tensor([3.0, math.inf]).bfloat16()], "cuda")
        scaler = started(GradScaler, "cuda", init_scale=2.0, backend=backend)
        scaler.unscale_(optimizer)
        assert grads(optimizer) == [1.5]
        assert flags(scaler, optimizer) == [1.0]


# Number 9's other half, fp64 in double: the kind "fp64" of tests/unit/test_gradients.py.


@differs(11, ours=[0.0], torchs=re.compile(r"RuntimeError: unscale_\(\) has already been called"))
def an_optimizer_at_the_id_of_a_freed_one(run: Run) -> Any:
    optimizer, scaler, seen = run.sgd(math.inf), run.started(), set()
    while id(optimizer) not in seen:  # until one comes again
        seen.add(id(optimizer))
        scaler.unscale_(optimizer)
        del optimizer
        gc.collect(0)
        optimizer = run.sgd()
    scaler.unscale_(optimizer)
    return flags(scaler, optimizer)


@differs(12, ours=SCALED, torchs=re.compile("AttributeError: 'int' object has no attribute"))
def gradients_of_a_fused_optimizer_that_came_only_after_unscaling(run: Run) -> Any:
    """It is torch's order of calls, in which gradients are unscaled by then: these are taken as they are."""
    optimizer, scaler = run.sgd(None, fused=True), run.started()
    scaler.unscale_(optimizer)
    params_of(optimizer)[0].grad = run.full(8.0)
    scaler.step(optimizer)
    return values(optimizer)


def test_13_extras_are_off_by_default_and_state_has_one_more_key_once_one_is_on() -> None:
    theirs = {*torch.amp.GradScaler("cpu").state_dict()}
    assert {*GradScaler("cpu", min_scale=TINY, max_scale=torch.finfo(torch.float32).max).state_dict()} == theirs
    assert GradScaler("cpu").process_group is None
    for name, value in EXTRAS.items():
        assert {*GradScaler("cpu", **{name: value}).state_dict()} == {*theirs, KEY}


@PLACES
def test_14_a_first_step_skipped_leaves_no_garbage_in_fused_momentum(place: Place) -> None:
    parameter = torch.nn.Parameter(torch.ones(1000, device=place.device))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5, fused=True)
    scaler = started(GradScaler, place.device, init_scale=2.0, backend=place.backend)
    for gradient in (math.inf, 4.0):
        parameter.grad = torch.full_like(parameter, gradient)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1.0
    assert torch.equal(parameter.detach().cpu(), torch.full((1000,), 1.0 - 4.0))


@differs(15, ours=DIVIDED, torchs=DIVIDED_TWICE)
def a_wrapper_that_is_stepped_after_the_optimizer_within_was_unscaled(run: Run) -> Any:
    optimizer, scaler = run.sgd(), run.started()
    scaler.unscale_(optimizer)
    scaler.step(Wrapper(optimizer))
    return values(optimizer)


@differs(15, ours=(DIVIDED, False, False), torchs=(SCALED, False, False))
def a_wrapper_of_a_fused_optimizer(run: Run) -> Any:
    """The scale must reach the optimizer within."""
    optimizer, scaler = run.sgd(fused=True), run.started()
    scaler.step(Wrapper(optimizer))
    return values(optimizer), hasattr(optimizer, "grad_scale"), hasattr(optimizer, "found_inf")


@differs(16, ours=torch.tensor(1 + 3 * 2.0**-11).half().item(), torchs=1.0)
def small_fp16_duplicates_in_a_sparse_gradient(run: Run) -> Any:
    small = torch.tensor([1.0, 2.0**-11, 2.0**-11, 2.0**-11]).half()
    grad = torch.sparse_coo_tensor(torch.zeros(1, 4, dtype=torch.int64), small, (3,), check_invariants=False)
    optimizer = sgd([grad], run.device)
    run.started()._check_inf_per_device(optimizer)
    return params_of(optimizer)[0].grad._values().item()


# 18: a step that was unscaled, but not taken before the update, until the next loss is scaled.


@differs(18, ours=DIVIDED * 2, torchs=DIVIDED + DIVIDED_TWICE, fused=False)
@differs(18, ours=DIVIDED * 2, torchs=DIVIDED + DIVIDED_TWICE, fused=True)
def a_step_after_the_update(run: Run, fused: bool) -> Any:
    early, late, scaler = run.sgd(), run.sgd(fused=fused), run.started()
    scaler.unscale_(late)
    scaler.step(early)
    scaler.update()
    scaler.step(late)
    return values(early) + values(late)


@differs(19, ours=[1.0, 0.0, 0.0], torchs=[1.0, 1.0, 0.0])
def a_flag_that_was_kept(run: Run) -> Any:
    """Its tensor is used again."""
    optimizer, scaler = run.sgd(math.inf), run.started()
    scaler.unscale_(optimizer)
    (flag,) = scaler._found_inf_per_device(optimizer).values()
    found = [flag.item()]
    scaler.step(optimizer)
    scaler.update()
    params_of(optimizer)[0].grad = run.full(1.0)
    scaler.unscale_(optimizer)
    return [*found, flag.item(), *flags(scaler, optimizer)]


def unscaled(run: Run, gradient: Tensor) -> str:
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    run.started().unscale_(torch.optim.SGD([parameter], lr=1.0))
    return "taken"


@differs(
    20,
    ours=re.compile("NotImplementedError: .*parameter 0 has dtype torch.complex64"),
    torchs=re.compile("NotImplementedError: .*not implemented for 'ComplexFloat'"),
)
def a_complex_gradient(run: Run) -> Any:
    return unscaled(run, run.full(1.0, dtype=torch.complex64))


@differs(20, ours=re.compile(".*parameter 0 is on device meta"), torchs="taken")
def a_gradient_on_meta(run: Run) -> Any:
    return unscaled(run, torch.ones(2, device="meta"))


# 23: a step that began and did not return.


def fail(scaler: Any, optimizer: Any) -> None:
    with mock.patch.object(optimizer, "step", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)


@differs(23, ours=(DIVIDED, SCALE), torchs=(SCALED, SCALE), gradient=8.0)
@differs(23, ours=([0.0], SCALE / 2), torchs=([-math.inf], SCALE), gradient=math.inf)
def a_batch_after_a_step_that_failed(run: Run, gradient: float) -> Any:
    optimizer, scaler = run.sgd(), run.started()
    fail(scaler, optimizer)
    scaler.scale(run.full(1.0, ()))
    params_of(optimizer)[0].grad.fill_(gradient)
    scaler.step(optimizer)
    scaler.update()
    return values(optimizer), scaler.get_scale()


def test_23_a_scale_that_an_interrupt_left_on_a_fused_optimizer_is_not_the_users() -> None:
    optimizer, scaler = sgd([torch.tensor([8.0])], fused=True), started(GradScaler, "cpu", init_scale=SCALE)
    fail(scaler, optimizer)
    optimizer.grad_scale = scaler._get_scale_async()  # type: ignore[attr-defined]
    scaler.scale(torch.ones(()))
    params_of(optimizer)[0].grad = torch.tensor([8.0])
    scaler.step(optimizer)
    assert values(optimizer) == DIVIDED


@PLACES
@pytest.mark.parametrize("name", ROWS)
def test_a_row_ends_as_it_says_with_each_class(name: str, place: Place) -> None:
    row, ours, torchs = ROWS[name]
    if name.startswith("16-") and place.device == "cuda" and "PRETENDED_GPU" not in os.environ:
        torchs = ours  # a real GPU sums in fp32
    assert_ends(row, Run(torch.amp.GradScaler, place), torchs)
    assert_ends(row, Run(GradScaler, place), ours)
