"""`clip_grad_norm_`: torch's unscale_ and clipping with one pass less, for several optimizers or some parameters."""

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import KERNELS, PLACES, Place, assert_all_same, assert_same, flags, grads, parameters, sgd, started, values
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from scaler_triton import GradScaler, ShardedGradScaler, StepGuard
from scaler_triton.core.step import FAILED, READY, UNSCALED

# Whether one pass clips, or several: with another norm, or for some parameters only.
WAYS = pytest.mark.parametrize("way", ["at once", "norm", "parameters"])
SCALE = 8.0
CPU = Place("cpu", "torch")


def scaler_on(place: Place = CPU, **options: Any) -> Any:
    return started(GradScaler, place.device, **{"init_scale": SCALE, "backend": place.backend, **options})


def held(*optimizers: Any) -> list[Any]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def options_of(way: str, *optimizers: Any) -> dict[str, Any]:
    norms = {"norm": {"norm_type": 1.0}, "largest": {"norm_type": math.inf}}
    return {**norms, "parameters": {"parameters": held(*optimizers)}}.get(way, {})


def some_gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator) * 3).to(dtype) for shape in ((7,), (), (3, 5), (0,), (130,))]


def phases(scaler: Any, *optimizers: Any) -> list[Any]:
    return [scaler._ours.steps.open(optimizer).phase for optimizer in optimizers]


# The norm and the gradients


@PLACES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.5, 1e6, 0.0])
def test_norm_and_gradients_are_torchs(place: Place, dtype: torch.dtype, max_norm: float) -> None:
    start = some_gradients(dtype)
    optimizer, scaler = sgd(start, place.device), scaler_on(place)
    norm = scaler.clip_grad_norm_(optimizer, max_norm)
    assert (norm.dtype, norm.shape, norm.device.type) == (torch.float32, (), place.device)
    true = math.sqrt(sum((gradient.double() / SCALE).square().sum().item() for gradient in start))
    assert norm.item() == pytest.approx(true, rel=1e-6)
    coefficient = (max_norm / (norm.cpu() + 1e-6)).clamp(max=1.0)
    torch._amp_foreach_non_finite_check_and_unscale_(start, torch.zeros(()), torch.tensor(1 / SCALE))
    torch._foreach_mul_(start, coefficient.double() if dtype is torch.float64 else coefficient)
    assert_all_same((parameter.grad for parameter in held(optimizer)), start)
    assert phases(scaler, optimizer) == [UNSCALED]
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.was_skipped(optimizer)


@PLACES
@pytest.mark.parametrize("norm_type", [math.inf, 1.0, 3.0, "inf", 3])
def test_other_norms_are_torchs(place: Place, norm_type: Any) -> None:
    start = [gradient for gradient in some_gradients() if gradient.numel()]  # torch has no inf-norm of nothing
    optimizer, expected = sgd(start, place.device), parameters([grad / SCALE for grad in start], place.device)
    norm = scaler_on(place).clip_grad_norm_(optimizer, 0.5, norm_type)
    torchs = nn.utils.clip_grad_norm_(expected, 0.5, float(norm_type))
    assert norm.item() == pytest.approx(torchs.item(), rel=1e-5)
    ours, theirs = ([parameter.grad for parameter in each] for each in (held(optimizer), expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0.0)


@PLACES
@pytest.mark.parametrize("norm_type", [2.0, 1.0])
@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
@pytest.mark.usefixtures("two_ranks")
def test_a_norm_that_overflows_alone_is_refused_without_a_flag(place: Place, norm_type: float, cls: Any) -> None:
    """Nothing is clipped, and the step may be taken."""
    optimizer = sgd([torch.full((100,), 1e38)], place.device)
    scaler = started(cls, place.device, init_scale=1.0, backend=place.backend)
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        scaler.clip_grad_norm_(optimizer, 1.0, norm_type, error_if_nonfinite=True)
    assert torch.equal(held(optimizer)[0].grad.cpu(), torch.full((100,), 1e38))
    assert (flags(scaler, optimizer), phases(scaler, optimizer)) == ([0.0], [UNSCALED])


@PLACES
@WAYS
@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sparse_duplicates_are_summed_first_those_of_fp16_in_fp32(place: Place, way: str, dtype: torch.dtype) -> None:
    with torch.sparse.check_sparse_tensor_invariants(False):
        given = torch.tensor([6e4, 6e4, -6e4, 8.0], dtype=dtype)
        gradient = torch.sparse_coo_tensor(torch.tensor([[1, 1, 1, 0]]), given, (3,))
    optimizer = sgd([gradient], place.device)
    scaler = started(ShardedGradScaler, place.device, init_scale=SCALE, backend=place.backend)
    norm = scaler.clip_grad_norm_(optimizer, 1e6, **options_of(way, optimizer))
    halved = 7501 / 2 if way == "norm" else 7500 / math.sqrt(2)  # on two ranks it counts half
    assert norm.item() == pytest.approx(halved, rel=1e-6)
    assert held(optimizer)[0].grad.to_dense().tolist() == [1.0, 7500.0, 0.0]
    assert flags(scaler, optimizer) == [0.0]


def test_a_norm_does_not_depend_on_where_gradients_lie() -> None:
    """Ranks that hold copies, as under DDP, would drift apart."""
    for dtype, numel in itertools.product([torch.float32, torch.bfloat16], [7, 57, 1000]):
        given, norms = torch.randn(12, numel, generator=torch.Generator().manual_seed(0)).to(dtype), set()
        for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
            memory, optimizer = torch.zeros(3, 4, numel, dtype=dtype), sgd(list(given))
            for index, parameter in enumerate(held(optimizer)):
                parameter.grad = memory[order[index // 4], index % 4].copy_(given[index])
            norms.add(scaler_on(init_scale=1.0).clip_grad_norm_(optimizer, 1.0).item())
        assert len(norms) == 1


@PLACES
@pytest.mark.parametrize("way", ["at once", "norm", "largest", "parameters"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("reverse", [False, True])
def test_beside_an_overflow_gradients_are_unscaled_not_clipped_and_skipped(
    place: Place, way: str, value: float, reverse: bool
) -> None:
    """The norm says nothing then, so the others could only step unclipped."""
    good, bad = sgd([torch.full((3,), 24.0)], place.device), sgd([torch.tensor([value])], place.device)
    optimizers, scaler = [bad, good] if reverse else [good, bad], scaler_on(place)
    norm = scaler.clip_grad_norm_(optimizers, 1.0, **options_of(way, *optimizers))
    assert (norm.item(), grads(good)) == (pytest.approx(value, nan_ok=True), [3.0])
    for optimizer in optimizers:
        assert flags(scaler, optimizer) == [1.0]
        assert [flag.item() for flag in scaler._check_inf_per_device(optimizer).values()] == [1.0]
        scaler.step(optimizer)
        assert (scaler.was_skipped(optimizer), values(optimizer)) == (True, [0.0])


def test_flags_that_others_put_there_give_way_to_copies_of_the_shared_one() -> None:
    optimizers, scaler = [sgd([torch.ones(3)]), sgd([torch.full((5,), math.inf)])], scaler_on()
    written, cpu = [torch.tensor(0.0), torch.tensor(1.0)], torch.device("cpu")
    for optimizer, flag in zip(optimizers, written, strict=True):
        scaler.unscale_(optimizer)
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {cpu: flag}
    scaler.clip_grad_norm_(optimizers, 1.0, parameters=[])
    assert [flags(scaler, optimizer) for optimizer in optimizers] == [[1.0], [1.0]]
    assert [flag.item() for flag in written] == [0.0, 1.0]
    scaler._found_inf_per_device(optimizers[0])[cpu].fill_(0.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert [scaler.was_skipped(optimizer) for optimizer in optimizers] == [False, True]


# Order, arguments


def test_calls_out_of_order_are_told_what_to_do_instead() -> None:
    """Torch's words for them stand in the table of test_step.py."""
    optimizer, scaler = sgd([torch.full((3,), 24.0)]), scaler_on()
    with pytest.raises(AssertionError, match="Attempted clip_grad_norm_ but _scale is None"):
        GradScaler("cpu").clip_grad_norm_(optimizer, 1.0)
    scaler.unscale_(optimizer)
    for norm_type in (2.0, 1.0):
        with pytest.raises(RuntimeError, match="clip_grad_norm_ already unscales: call only one of them per step"):
            scaler.clip_grad_norm_(optimizer, 1.0, norm_type)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"^unscale_\(\) is being called after step\(\).$"):
        scaler.unscale_(optimizer)
    for norm_type in (2.0, 1.0):
        with pytest.raises(
            RuntimeError, match=r"being called after step\(\). It is clip_grad_norm_ that unscales here:"
        ):
            scaler.clip_grad_norm_(optimizer, 1.0, norm_type)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"max_norm": -1.0}, ValueError, "^max_norm must be a number >= 0, got -1.0$"),
        ({"max_norm": math.nan}, ValueError, "^max_norm must be a number >= 0, got nan$"),
        ({"max_norm": -(10**400)}, ValueError, "^max_norm must be a number >= 0, got -1000"),
        ({"max_norm": "1"}, TypeError, "^max_norm must be a number, got '1'$"),
        ({"norm_type": 0.0}, ValueError, "^norm_type must be > 0, got 0.0"),
        ({"norm_type": -1}, ValueError, "^norm_type must be > 0, got -1"),
        ({"norm_type": "two"}, TypeError, "^norm_type must be a number, got 'two'$"),
        ({"model": "net"}, TypeError, "^model must be a module, got str$"),
        ({"parameters": [("weight", torch.ones(3))]}, TypeError, "^parameters must be tensors, got tuple$"),
        ({"parameters": 2.0}, TypeError, "^parameters must be tensors, got float$"),
        ({"parameters": nn.ReLU()}, TypeError, r"parameters must be tensors, such as those of ReLU.parameters\(\)$"),
        ({"optimizers": []}, ValueError, "^optimizers must be one or more, none of them twice, got 0$"),
        ({"optimizers": None}, TypeError, "^optimizers must be an optimizer or several of them, got NoneType$"),
        ({"optimizers": [torch.ones(3)]}, TypeError, "got Tensor; to clip some parameters only, pass parameters=$"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_changes(
    wrong: dict[str, Any], error: type[Exception], text: str, enabled: bool
) -> None:
    optimizer, scaler = sgd([torch.full((3,), 24.0)]), scaler_on(enabled=enabled)
    with pytest.raises(error, match=text):
        scaler.clip_grad_norm_(**{"optimizers": optimizer, "max_norm": 1.0, **wrong})
    assert (grads(optimizer), dict(scaler._ours.steps)) == ([24.0], {})


@WAYS
@pytest.mark.parametrize("fused", [False, True])
def test_once_clipped_an_optimizers_last_step_is_forgotten(way: str, fused: bool) -> None:
    scaler, optimizer = scaler_on(), sgd([torch.ones(1)], fused=fused)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.was_skipped(optimizer) is False
    scaler.clip_grad_norm_(optimizer, 1.0, **options_of(way, optimizer))
    with pytest.raises(ValueError, match="^was_skipped: this SGD was not stepped yet, or was unscaled again"):
        scaler.was_skipped(optimizer)


def test_an_optimizer_is_clipped_once() -> None:
    optimizer = sgd([torch.full((3,), 24.0)])
    wrapper = SimpleNamespace(optimizer=optimizer, param_groups=optimizer.param_groups)
    for twice in ([optimizer, optimizer], [optimizer, wrapper]):
        with pytest.raises(ValueError, match="^optimizers must be one or more, none of them twice, got 2$"):
            scaler_on().clip_grad_norm_(twice, 1.0)


@pytest.mark.parametrize("number", [torch.tensor(1.0), torch.ones(1, requires_grad=True), Fraction(1), 1, True])
def test_a_bound_may_be_any_number(number: Any) -> None:
    optimizer = sgd([torch.full((4,), 16.0)])
    assert scaler_on().clip_grad_norm_(optimizer, number).item() == 4.0
    assert grads(optimizer) == pytest.approx([0.5], rel=1e-5)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ([torch.ones(1, requires_grad=True)], "No optimizer holds any of `parameters`, no gradient clipping"),
        ((each for each in ()), "`parameters` is an empty generator, no gradient clipping will occur"),
        ([], None),
        ([torch.ones(1)], None),  # a frozen one
    ],
)
def test_parameters_that_clip_nothing_are_warned_of(parameters: Any, text: str | None) -> None:
    scaler, optimizer = scaler_on(), sgd([torch.ones(1)])
    with pytest.warns(UserWarning, match=text) if text else nullcontext([]) as warned:  # others would fail the test
        assert scaler.clip_grad_norm_(optimizer, 1.0, parameters=parameters).item() == 0.0
    assert [each.filename for each in warned] == [__file__] * bool(text)


# A disabled scaler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("options", "chosen"), [({}, False), ({}, True), ({"norm_type": math.inf}, True)])
def test_a_disabled_scaler_clips_as_torch(dtype: torch.dtype, options: dict[str, Any], chosen: bool) -> None:
    ours, theirs = (sgd([torch.ones(3, dtype=dtype), torch.full((4,), 2.0, dtype=dtype)]) for _ in range(2))
    some = {"parameters": held(ours)[1]} if chosen else {}
    norm = GradScaler("cpu", enabled=False).clip_grad_norm_(ours, 1.0, **options, **some)
    assert_same(norm, nn.utils.clip_grad_norm_(held(theirs)[chosen:], 1.0, **options))
    assert_all_same((each.grad for each in held(ours)), (each.grad for each in held(theirs)))


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [3.0, math.inf])
def test_a_disabled_scalers_norm_is_that_of_all_ranks(norm_type: float, value: float) -> None:
    """Of two, one of which is not there, plain gradients count half."""
    optimizer = sgd([torch.full((2,), value)])
    scaler = ShardedGradScaler("cpu", enabled=False)
    if value == math.inf:
        with pytest.raises(RuntimeError, match=f"The total norm of order {norm_type} .* is non-finite"):
            scaler.clip_grad_norm_(optimizer, 1.0, norm_type, error_if_nonfinite=True)
        assert grads(optimizer) == [math.inf]
        return
    assert scaler.clip_grad_norm_(optimizer, 1.0, norm_type).item() == pytest.approx(value)
    assert grads(optimizer) == pytest.approx([1.0], rel=1e-5)


@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("made", [lambda: started(GradScaler, "cpu"), lambda: StepGuard("cpu", spike_sigma=3.0)])
def test_of_optimizers_clipped_together_one_without_gradients_has_nothing_to_skip(
    made: Any, order: int, norm_type: float, looked_at: bool
) -> None:
    scaler, bad, empty = made(), sgd([torch.tensor([math.inf])], fused=True), sgd([None], fused=True)
    scaler.clip_grad_norm_([bad, empty][::order], 1.0, norm_type)
    if looked_at:
        assert scaler._per_optimizer_states
    for each in (bad, empty):
        scaler.step(each)
    assert (scaler.was_skipped(bad), scaler.was_skipped(empty)) == (True, False)


# Failures


EXPANDED = torch.ones(1).expand(2)  # a gradient that is refused when it is looked at


def test_of_several_optimizers_all_gradients_are_validated_before_one_is_written() -> None:
    optimizers, scaler = [sgd([torch.ones(2)]), sgd([EXPANDED])], scaler_on()
    for norm_type in (2.0, math.inf):
        with pytest.raises(RuntimeError, match="more than one element"):
            scaler.clip_grad_norm_(optimizers, 1.0, norm_type)
        assert grads(optimizers[0]) == [1.0]


WRITING = [("at once", "norm.clip_batch_"), ("norm", "clip._clip_by_terms_"), ("norm", "torch_ops.coefficient")]


@pytest.mark.parametrize(("way", "where"), [*WRITING, ("parameters", "torch_ops.coefficient")])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_a_write_that_failed_the_steps_are_skipped(way: str, where: str, error: type[BaseException]) -> None:
    optimizers, scaler = [sgd([torch.ones(3)]), sgd([torch.ones(5)])], scaler_on()
    broken = mock.patch(f"scaler_triton.clipping.{where}", side_effect=error("no memory"))
    with broken, pytest.raises(error, match="^no memory$"):
        scaler.clip_grad_norm_(optimizers, 1.0, **options_of(way, *optimizers))
    assert phases(scaler, *optimizers) == [FAILED, FAILED]
    for optimizer in optimizers:
        assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
        with pytest.raises(RuntimeError, match=r"^unscale_\(\) has already been called"):
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        assert scaler.was_skipped(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2


# Ranks, of which the others are not there


@pytest.fixture
def reduced(two_ranks: None, monkeypatch: Any) -> list[Any]:
    """What the reductions of this rank carry, in order."""
    seen: list[Any] = []

    def noted(values: Tensor, op: Any, group: Any) -> None:
        seen.append([op == dist.ReduceOp.SUM, *values.tolist()])

    monkeypatch.setattr(dist, "all_reduce", noted)
    return seen


@pytest.mark.parametrize(
    ("way", "want"),
    [
        # squares / 2, flag, failures, scale, 1 / scale; or the norm's term, whether it is NaN, flag
        ("at once", [[True, 9.0, 0.0, 0.0, 8.0, 0.125]]),
        ("norm", [[False, 0.0, 0.0, 8.0, -8.0], [True, 3.0, 0.0, 0.0]]),
        ("parameters", [[False, 0.0, 0.0, 8.0, -8.0], [True, 9.0, 0.0, 0.0]]),
    ],
)
def test_one_reduction_is_the_norms_each_gradient_counted_once(way: str, want: Any, reduced: list[Any]) -> None:
    optimizer = sgd([torch.full((2,), 24.0)])
    scaler = started(ShardedGradScaler, "cpu", init_scale=SCALE)
    scaler.clip_grad_norm_(optimizer, 1.0, **options_of(way, optimizer))
    assert reduced == [pytest.approx(each) for each in want]


@pytest.mark.parametrize(
    ("options", "want"),
    [
        # NaN for the norm, the flag, and where that is reduced with it the failure; or the norm's term, NaN, failure.
        ({}, [True, math.nan, 1.0, 1.0, 0.0, 0.0]),
        ({"norm_type": 1.0}, [True, 0.0, 1.0, 2.0**20]),
        ({"norm_type": math.inf}, [False, 0.0, 1.0, 2.0**20]),
    ],
)
def test_a_rank_that_fails_makes_the_norm_of_all_nan(options: Any, want: Any, reduced: list[Any]) -> None:
    optimizer = sgd([EXPANDED])
    scaler = started(ShardedGradScaler, "cpu", init_scale=SCALE)
    with pytest.raises(RuntimeError, match="more than one element"):
        scaler.clip_grad_norm_(optimizer, 1.0, **options)
    assert reduced[-1] == pytest.approx(want, nan_ok=True)
    assert len(reduced) == 1 + bool(options)  # a check of its own came before


@pytest.mark.parametrize("way", ["at once", "norm"])
@pytest.mark.parametrize(
    ("model", "text"), [(None, "^model must be .* parameter 1 is .* NoneType$"), (nn.ReLU(), "^model must be .* ReLU$")]
)
def test_without_fsdp1s_module_the_norm_is_refused(way: str, model: Any, text: str, reduced: list[Any]) -> None:
    optimizer = sgd([torch.ones(2), torch.ones(2)])
    held(optimizer)[1]._fsdp_flattened = True
    scaler = started(ShardedGradScaler, "cpu")
    with pytest.raises(ValueError, match=text):
        scaler.clip_grad_norm_(optimizer, 1.0, model=model, **options_of(way))
    assert (phases(scaler, optimizer), reduced) == ([READY], [])


def test_what_a_guards_check_has_guessed_of_fsdp1_is_no_norm_to_clip_by(reduced: list[Any]) -> None:
    guard, optimizer = StepGuard("cpu", spike_sigma=3.0), sgd([torch.ones(2)])
    held(optimizer)[0]._fsdp_flattened = True
    guard.step(optimizer)
    with pytest.raises(ValueError, match="^model must be .* parameter 0 is .* NoneType$"):
        guard.clip_grad_norm_(optimizer, 1.0)


@WAYS
def test_a_gradient_may_be_sharded_in_another_way_than_its_parameter(way: str, reduced: list[Any]) -> None:
    """A copy of four elements on each of two ranks counts as much as a shard of two on each."""
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False))
    scaler, optimizer = scaler_on(), torch.optim.SGD([parameter], lr=1.0)
    for numel, placement in ((2, Shard(0)), (4, Replicate()), (2, Shard(0))):
        parameter.grad = DTensor.from_local(torch.full((numel,), SCALE), mesh, [placement], run_check=False)
        scaler.clip_grad_norm_(optimizer, 1e6, **options_of(way, optimizer))
        assert reduced[-1][1] == pytest.approx(2.0)
        scaler._ours.steps.reset()


LOOKS = {f"aten::{name}" for name in ("empty", "select", "slice", "view", "unsqueeze", "detach", "expand")}
READ, WRITE = ["_sum_squares_kernel", "_finish_kernel"], ["_clip_kernel"]
ADD, JOIN = ["aten::stack", "aten::sum"], ["aten::ne"] * 2  # two flags become one
REDUCE = ["c10d::allreduce_"]
BETWEEN = [
    # The dtypes of each optimizer; what one process launches between its passes, and one of several ranks.
    ([[torch.float32]], [], REDUCE),
    # Where no kernel adds the scales on its way, an op does.
    ([[torch.float32, torch.bfloat16]], ADD, [*ADD, "aten::pow", *REDUCE]),
    ([[torch.float32], [torch.float32]], [*ADD, *JOIN], [*ADD, "aten::pow", *REDUCE]),
]


def launched_by(call: Callable[[], Any]) -> list[str]:
    """Return what a call launches: kernels of ours by their names, and ops of torch that are more than a look."""
    from scaler_triton.kernels.launch import Launch

    seen, start = [], Launch.__call__

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.name().partition(".")[0]
            seen.extend([] if name in LOOKS else [name])
            return func(*args, **(kwargs or {}))

    def noting(launch: Any, *args: Any) -> None:
        seen.append(launch._kernel.fn.__name__)
        with _disable_current_modes():  # the interpreter is no launch
            start(launch, *args)

    with mock.patch.object(Launch, "__call__", noting), Ops():
        call()
    return seen


@pytest.mark.usefixtures("two_ranks")
@KERNELS
@pytest.mark.parametrize("cls", [GradScaler, ShardedGradScaler])
@pytest.mark.parametrize(("dtypes", "alone", "together"), BETWEEN)
def test_between_the_pass_that_reads_and_the_one_that_writes_only_ranks_add_up(
    place: Place, cls: Any, dtypes: list[list[torch.dtype]], alone: list[str], together: list[str]
) -> None:
    optimizers = [sgd([torch.ones(5, dtype=dtype) for dtype in each], place.device, fused=True) for each in dtypes]
    scaler, batches = started(cls, place.device, init_scale=8.0, backend=place.backend), sum(map(len, dtypes))
    for _ in range(5):  # the last is steady
        for parameter in held(*optimizers):
            parameter.grad.fill_(1.0)  # where it is: on a GPU a new address is copied to the device
        launched = launched_by(lambda: scaler.clip_grad_norm_(optimizers, 0.5))
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    read = [name for each in dtypes for name in READ * len(each)]
    assert launched == read + (alone if cls is GradScaler else together) + WRITE * batches
