"""Plans: an optimizer's gradients as batches, what is kept between steps, and what is noticed when it changes."""

import gc
import random
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from operator import is_
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import parameters
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from scaler_triton.core import plan
from scaler_triton.core.check import Checks
from scaler_triton.core.plan import Batch, GradPlan, choose_backends, group, layout_key
from scaler_triton.core.step import OptimizerStep
from scaler_triton.core.update import Counters

CPU = torch.device("cpu")


class Planned(GradPlan):
    """A plan with its parameters, which an optimizer would hold."""

    def __init__(self, parameters: Any, requested: str) -> None:
        self.held = list(parameters)
        super().__init__(parameters, requested, home=CPU)


def made(*grads: Tensor | None) -> tuple[Planned, list[Any]]:
    """Return a plan, and its parameters with these gradients."""
    params = parameters(grads, "cpu")
    return Planned(params, "torch"), params


def found(batches: list[Batch]) -> list[Any]:
    """Return what batches hold: of each what passes go by, and the positions and addresses of its tensors."""
    return sorted(
        (
            (str(batch.layout.key), batch.layout.backend, batch.is_partial),
            [
                (position, tensor.data_ptr(), tensor.numel())
                for position, tensor in zip(batch.layout.positions, batch.tensors, strict=True)
                if tensor is not None
            ],
        )
        for batch in batches
    )


def outcome(of: Planned) -> Any:
    """Return what a plan collects, or why it does not."""
    try:
        return found(of.collect(of.held))
    except RuntimeError as error:
        return str(error)


def collected(of: Planned) -> list[int]:
    """Return the addresses of the gradients that a plan collects, in order."""
    return sorted(tensor.data_ptr() for batch in of.collect(of.held) for tensor in batch.present)


def addresses(params: list[Any]) -> list[int]:
    return sorted(p.grad.data_ptr() for p in params if p.grad is not None)


def sparse(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(torch.zeros(1, n, dtype=torch.int64), torch.ones(n, dtype=dtype), (4,))


class Own(Tensor):
    """A subclass that changes nothing."""


FORMS: dict[str, Callable[[], Tensor | None]] = {
    "dense": lambda: torch.ones(4, 4),
    "transposed": lambda: torch.ones(4, 4).t(),
    "gaps": lambda: torch.ones(4, 8)[:, ::2],
    "offset": lambda: torch.ones(17)[1:].view(4, 4),
    "wider": lambda: torch.ones(4, 4).double(),
    "flat": lambda: torch.ones(16),
    "subclass": lambda: torch.ones(4, 4).as_subclass(Own),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "expanded": lambda: torch.ones(1).expand(4, 4),
    "missing": lambda: None,
}


@pytest.fixture(params=["guards", "no guards"])
def guards(request: Any, monkeypatch: Any) -> bool:
    """Whether torch has its private guards."""
    if request.param == "no guards":
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    return bool(request.param == "guards")


def give(parameter: Any, grad: Tensor | None) -> None:
    """Set a gradient, whatever its shape and dtype are: the parameter becomes like it."""
    if grad is not None:
        parameter.grad = None
        parameter.data = torch.zeros(grad.shape, dtype=grad.dtype)
    parameter.grad = grad


@pytest.mark.parametrize("before", FORMS)
@pytest.mark.parametrize(("steps", "place", "count"), [(1, 1, 2), (2, 1, 2), (3, 1, 2), (3, 5, 80), (3, 75, 80)])
def test_a_new_form_is_noticed_whatever_was_known(
    before: str, steps: int, place: int, count: int, guards: bool
) -> None:
    for after in FORMS:
        planned, params = made(*[torch.ones(2)] * place, torch.ones(4, 4), *[torch.ones(2)] * (count - place - 1))
        for form in (*[before] * steps, after, before, after, after, before):
            give(params[place], FORMS[form]())
            assert outcome(planned) == outcome(Planned(params, "torch"))


@pytest.mark.parametrize("seed", range(4))
def test_forms_and_absences_that_change_together(seed: int, guards: bool) -> None:
    choose = random.Random(seed)
    planned, params = made(None, None, None)
    for _ in range(60):
        for parameter in params:
            give(parameter, FORMS[choose.choice(["dense", "transposed", "gaps", "wider", "missing"])]())
        assert outcome(planned) == outcome(Planned(params, "torch"))


def test_a_gradient_that_was_missing_when_another_changed_has_its_backend() -> None:
    planned, params = made(torch.ones(4, 4), torch.ones(4, 4))
    for forms in (("gaps", "gaps"), ("dense", "missing"), ("dense", "gaps")):
        for parameter, form in zip(params, forms, strict=True):
            give(parameter, FORMS[form]())
        assert {batch.layout.backend for batch in planned.collect(planned.held)} == {
            "torch"
        }  # kernels would write gaps


def test_gradients_that_come_and_go_rebuild_nothing() -> None:
    planned, params = made(*[None] * 64)
    before = planned.layouts
    choose = random.Random(0)
    for _ in range(50):
        for parameter in params:
            parameter.grad = torch.ones_like(parameter) if choose.random() < 0.3 else None
        assert collected(planned) == addresses(params)
    assert planned.layouts is before


def events(call: Callable[[], Any]) -> int:
    """Return how many functions a call enters, those in C included."""
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("grads", "most"),
    [
        ([torch.ones(3), torch.ones(4), torch.ones(5)], 7),
        ([torch.ones(3), None], 11),
        ([torch.ones(3), torch.ones(3).double()], 10),
    ],
    ids=["one layout", "missing ones", "two layouts"],
)
def test_a_steady_step_makes_few_calls_however_many_gradients_there_are(grads: list[Any], most: int) -> None:
    counts = []
    for times in (100, 300):
        planned, _ = made(*grads * times)
        for _ in range(3):
            planned.collect(planned.held)
        counts.append(events(partial(planned.collect, planned.held)))
        batches = planned.collect(planned.held)
        assert [batch.present is batch.tensors for batch in batches] == [None not in grads] * len(planned.layouts)
    assert counts[0] == counts[1] <= most


def test_nothing_keeps_a_gradient_alive() -> None:
    planned, params = made(torch.ones(4), torch.ones(9)[::2], torch.ones(3).double(), torch.eye(4).to_sparse())
    for _ in range(3):
        planned.collect(planned.held)
    references = [weakref.ref(parameter.grad) for parameter in params]
    for parameter in params:
        parameter.grad = None
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_frozen_and_lazy_parameters_have_no_slot_until_they_have_a_gradient() -> None:
    params: list[Any] = [*parameters([None, None], "cpu"), torch.nn.UninitializedParameter()]
    params[1].requires_grad_(False)
    planned = Planned(params, "torch")
    assert [layout.numels for layout in planned.layouts] == [[3]]
    params[2].materialize((3,))
    for parameter in params[1:]:
        parameter.grad = torch.ones(3)
        assert collected(planned) == addresses(params)
    assert [layout.numels for layout in planned.layouts] == [[3, 3, 3]]


def test_a_sparse_fp16_gradient_with_duplicates_is_replaced_by_its_sum_once_all_are_checked() -> None:
    planned, params = made(sparse(3, torch.float16).coalesce(), sparse(3, torch.float16), torch.ones(4))
    params[2].grad = torch.ones(1).expand(4)
    before = [parameter.grad for parameter in params]
    with pytest.raises(RuntimeError, match="more than one element"):
        planned.collect(planned.held)
    assert [parameter.grad is grad for parameter, grad in zip(params, before, strict=True)] == [True, True, True]
    params[2].grad = None
    batches = planned.collect(planned.held)
    assert [parameter.grad is grad for parameter, grad in zip(params, before, strict=True)] == [True, False, False]
    assert [tensor.tolist() for batch in batches for tensor in batch.present] == [[3.0], [3.0]]


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("missing", [False, True])
def test_fp16_is_refused_however_well_it_is_known_and_before_other_errors(steps: int, missing: bool) -> None:
    planned, params = made(torch.ones(3).half(), torch.ones(3), torch.ones(3))
    if missing:
        params[2].grad = None
    for _ in range(steps):
        planned.collect(planned.held)
    params[1].grad = torch.ones(1).expand(3)
    for _ in range(2):  # then with a legal neighbour
        with pytest.raises(ValueError, match=r"^Attempting to unscale FP16 gradients\.$"):
            planned.collect(planned.held, allow_fp16=False)
        params[1].grad = torch.ones(3)
    params[0].grad = None
    assert len(planned.collect(planned.held, allow_fp16=False)) == 1


def test_a_parameter_that_is_no_tensor_is_refused_in_torchs_words() -> None:
    with pytest.raises(AssertionError, match=r"^expected param to be torch.Tensor, got int$"):
        Planned([*parameters([None], "cpu"), 3], "torch")  # type: ignore[list-item]


def test_flags_are_needed_on_devices_that_can_be_read() -> None:
    nowhere = torch.nn.Parameter(torch.ones(3, device="meta"))
    assert Planned([nowhere, *parameters([None], "cpu")], "torch").devices == [torch.device("cpu")]
    assert Planned([], "torch").devices == Planned([], "torch").collect([]) == []


def keeps(planned: GradPlan, held: list[Any], home: torch.device = CPU) -> bool:
    """Return whether a step goes on with its plan once its optimizer holds these parameters, and the scale is there."""
    step = OptimizerStep()
    step.plan = planned
    checks, optimizer = Checks(Counters(), sharded=False), SimpleNamespace(param_groups=[{"params": held}])
    return checks.plan(step, optimizer, home)[0] is planned


def test_a_plan_is_for_the_parameters_it_was_made_for() -> None:
    planned, params = made(torch.ones(3), torch.ones(3))
    others = parameters([torch.ones(3)], "cpu")
    assert keeps(planned, list(params))
    assert not keeps(planned, list(params), torch.device("meta"))
    for held in (params[:1], [*params, *others], [params[0], *others], params[::-1]):
        assert not keeps(planned, held)
    torch.utils.swap_tensors(params[0], torch.nn.Parameter(torch.ones(3, device="meta")))
    assert not keeps(planned, params)


@pytest.mark.parametrize("count", [2, 80])
def test_a_gradient_that_two_parameters_share_is_found_in_every_step(count: int, monkeypatch: Any) -> None:
    planned, params = made(*[torch.ones(2)] * count)
    for step in range(4):
        params[-1].grad = params[-2].grad = torch.ones(2)
        if step == 2:
            monkeypatch.setattr(plan, "list_matcher", None)  # must not be called again
        assert collected(planned) == addresses(params)


# DTensors


def placed(local: Tensor, placement: Any) -> Any:
    return DTensor.from_local(local, init_device_mesh("cpu", (2,)), [placement], run_check=False)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("private", [True, False])
def test_a_dtensors_shard_is_collected_in_every_step(private: bool, monkeypatch: Any) -> None:
    if not private:  # a torch without the names that are looked up
        monkeypatch.setattr(plan.gradients, "SPEC", "no_such_name")
        monkeypatch.setattr(plan, "_spec_of", lambda grad: grad.no_such_name)
        monkeypatch.setattr(plan, "_NO_OVERRIDE", None)
    parameter = torch.nn.Parameter(placed(torch.zeros(3), Shard(0)))
    planned = Planned([parameter], "torch")
    assert planned.is_distributed
    for _ in range(4):
        parameter.grad = placed(torch.ones(3), Shard(0))
        (batch,) = planned.collect(planned.held)
        assert type(batch.present[0]) is Tensor
        assert batch.present[0].data_ptr() == parameter.grad.to_local().data_ptr()
    parameter.grad = None
    assert planned.collect(planned.held) == []


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("overrides", [True, False])
def test_a_type_beside_dtensors_is_asked_for_its_override_if_it_has_one(overrides: bool) -> None:
    class Asked(Own):
        @classmethod
        def __torch_function__(cls, function: Any, *rest: Any) -> Any:
            return own if function == Tensor.grad.__get__ else super().__torch_function__(function, *rest)

    own, other = torch.ones(3), torch.ones(3).as_subclass(Asked if overrides else Tensor)  # type: ignore[arg-type]
    planned = Planned([torch.nn.Parameter(placed(torch.zeros(3), Shard(0))), other], "torch")
    assert planned._reading is (nullcontext if overrides else torch._C.DisableTorchFunctionSubclass)
    assert collected(planned) == [own.data_ptr()] * overrides


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("beside", [[], [torch.ones(2)]])
@pytest.mark.usefixtures("two_ranks")
def test_a_partial_gradient_is_checked_times_its_terms_whatever_came_before(steps: int, beside: list[Tensor]) -> None:
    parameter = torch.nn.Parameter(placed(torch.zeros(3), Replicate()))
    planned = Planned([parameter, *parameters(beside, "cpu")], "torch")
    for _ in range(steps):
        parameter.grad = placed(torch.ones(3), Replicate())
        assert not any(batch.is_partial for batch in planned.collect(planned.held))
    parameter.grad = partial = placed(torch.ones(3), Partial())
    batches = planned.collect(planned.held)
    (batch,) = (batch for batch in batches if batch.is_partial)
    assert batch.present[0].tolist() == [2.0] * 3
    assert parameter.grad is partial
    parameter.grad = placed(torch.ones(3), Replicate())
    assert not any(batch.is_partial for batch in planned.collect(planned.held))


@pytest.mark.usefixtures("two_ranks")
def test_known_dtensors_are_not_inspected_again_beside_plain_ones_or_where_some_are_missing(monkeypatch: Any) -> None:
    held = [torch.nn.Parameter(each) for each in (*(placed(torch.zeros(3), Shard(0)) for _ in "ab"), torch.zeros(3))]
    planned = Planned(held, "torch")

    def collected(*missing: int) -> list[int]:
        for index, each in enumerate(held):
            each.grad = None if index in missing else torch.ones(3) if index == 2 else placed(torch.ones(3), Shard(0))
        (batch,) = planned.collect(planned.held)
        wants = [None if each.grad is None else getattr(each.grad, "_local_tensor", each.grad) for each in held]
        assert all(map(is_, batch.tensors, wants))
        return [index for index, each in enumerate(batch.tensors) if each is None]

    assert collected() == []
    monkeypatch.setattr(planned, "_inspect", None)  # must not be called
    assert [collected(), collected(0), collected(2), collected(0, 1)] == [[], [0], [2], [0, 1]]
    monkeypatch.setattr(planned, "_matchers", None)  # one call finds all as before
    assert collected() == []


# Batches


@pytest.mark.usefixtures("two_ranks")
def test_a_dtensor_that_is_swapped_for_one_placed_elsewhere_makes_a_new_plan() -> None:
    def parameter(placement: Any) -> torch.nn.Parameter:
        return torch.nn.Parameter(placed(torch.zeros(3), placement))

    (plain,), moved = parameters([torch.ones(3)], "cpu"), parameter(Shard(0))
    for held in ([moved], [plain, moved]):
        planned = Planned(held, "torch")
        torch.utils.swap_tensors(moved, parameter(Shard(0)))
        assert keeps(planned, held)
        torch.utils.swap_tensors(moved, parameter(Replicate()))
        assert not keeps(planned, held)
        torch.utils.swap_tensors(moved, parameter(Shard(0)))


def test_tensors_are_grouped_by_what_they_share_in_order() -> None:
    tensors = [torch.ones(3), torch.ones(2).double(), torch.ones(9)[::3], torch.ones(4, 2).t(), torch.ones(0)]
    tensors.append(torch.ones(3).as_subclass(Own))
    batches = group(dict(enumerate(tensors, 10)))
    assert [batch.layout.positions for batch in batches] == [[10, 13, 14], [11], [12], [15]]
    assert [batch.layout.numels for batch in batches] == [[3, 8, 0], [2], [3], [3]]
    assert [(b.layout.key.dense, b.layout.key.plain) for b in batches] == [(1, 1), (1, 1), (0, 1), (0, 0)]
    assert all(batch.present is batch.tensors for batch in batches)
    assert layout_key(tensors[0]) == batches[0].layout.key


def test_a_backend_is_chosen_once_for_each_layout_and_torchs_for_subclasses_and_gaps(monkeypatch: Any) -> None:
    asked, broken = [], []

    def choose(device: Any, dtype: Any, requested: str, task: str = "unscaling") -> str:
        asked.append((dtype, requested, task))
        return "torch" if task in broken else "triton"

    monkeypatch.setattr(plan, "choose", choose)
    tensors = [torch.ones(3), torch.ones(3).as_subclass(Own), torch.ones(9)[::3]]
    batches = group(dict(enumerate(tensors)))
    for _ in range(2):
        choose_backends(batches, "triton")
    assert [batch.layout.backend for batch in batches] == ["triton", "torch", "torch"]
    assert asked == [(torch.float32, "triton", "unscaling")]
    broken.append("measuring")  # then a layout is left to torch's ops altogether
    batches = group(dict(enumerate(tensors)))
    choose_backends(batches, "triton", "measuring")
    assert [batch.layout.backend for batch in batches] == ["torch"] * 3
    assert asked[1:] == [(torch.float32, "triton", "measuring")]
