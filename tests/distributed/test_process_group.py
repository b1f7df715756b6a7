"""The process_group argument: whom it binds, what it refuses, how it is copied, and when it is looked up."""

import dtensor_cases
import group_cases
import pytest
import rank_local_cases
import torch
from cases import Fault, new_optimizer, new_scaler, plain_param
from checks import assert_agreed, scale_model

from scaler_triton.demo.ranks import RankPool

pytestmark = pytest.mark.distributed

ALONE = {
    "sharded": (rank_local_cases.rank_local, "sharded", ["adamw"], [Fault(1, 0)]),
    "grad": (dtensor_cases.laid_out, "grad", "line-shards", "adamw-fused", [Fault(1, 0)]),
}


@pytest.mark.parametrize("kind", ALONE)
def test_a_group_of_one_rank_needs_no_reduction(kind):
    with RankPool(1) as pool:
        (result,) = pool.run(*ALONE[kind])
    assert result.error is None, result.traceback
    assert_agreed([result.value], [1], collectives=0)


KINDS = pytest.mark.parametrize("kind", ["grad", "sharded"])
METHODS = pytest.mark.parametrize("method", ["unscale_", "step"])
NAMES = pytest.mark.parametrize("name", ["adamw", "adamw-fused"])


def assert_refused(attempt, *words):
    """A ValueError that names the argument and its value, with nothing sent and nothing written."""
    assert attempt.error is not None
    assert attempt.error.startswith("ValueError: process_group")
    for word in words:
        assert word in attempt.error
    assert attempt.collectives == 0
    assert not attempt.grads_changed
    assert not attempt.params_changed
    assert attempt.stage == "READY"


@KINDS
@METHODS
@NAMES
def test_a_group_that_this_rank_is_not_in(two, kind, method, name):
    member, stranger = two.run(group_cases.group_without_me, kind, name, method)
    assert_refused(stranger, "this rank, 1")
    assert member.error is None


@KINDS
@METHODS
@NAMES
@pytest.mark.parametrize(("mesh", "word"), [(True, "DeviceMesh"), (False, "list")])
def test_what_is_no_group(two, kind, method, name, mesh, word):
    for attempt in two.run(group_cases.no_group, kind, name, method, mesh):
        assert attempt.error == f"TypeError: process_group must be a torch.distributed.ProcessGroup, got {word}"
        assert (attempt.collectives, attempt.grads_changed, attempt.params_changed) == (0, False, False)
        assert attempt.stage == "READY"


@KINDS
@METHODS
@NAMES
@pytest.mark.parametrize("layout", ["hsdp", "line-shards", "fsdp-then-tp", "line-beside-plain"])
def test_a_group_that_misses_ranks_of_a_mesh(four, kind, method, name, layout):
    attempts = four.run(group_cases.group_too_small, kind, name, layout, method)
    for rank, attempt in enumerate(attempts):
        assert_refused(attempt, f"ranks {[0, 1] if rank < 2 else [2, 3]} without [")


@METHODS
@NAMES
def test_meshes_that_do_not_tell_need_a_group(four, method, name):
    for rank, attempt in enumerate(four.run(group_cases.roots_over_different_ranks, "grad", name, method)):
        assert_refused(attempt, "process_group is needed", str([[0, 1], [2, 3]][rank // 2]), f"[{rank % 2}, ")
    for attempt in four.run(group_cases.roots_over_different_ranks, "world", name, method):
        assert (attempt.error, attempt.collectives) == (None, 1)


@KINDS
@NAMES
@pytest.mark.parametrize("copied", ["", "deepcopy", "pickle"])
def test_a_group_binds_its_own_ranks_only(four, kind, name, copied):
    results = four.run(group_cases.agree_in_pairs, kind, name, [Fault(1, 3)], copied)
    reports = [report for report, _ in results]
    assert_agreed(reports[:2], [])
    assert_agreed(reports[2:], [1])
    assert all(same_group for _, same_group in results)


@KINDS
@NAMES
@pytest.mark.parametrize(("made", "counted"), [("backend", 0), ("group", 1), ("registered", 0)])
def test_a_group_that_torch_keeps_no_list_of_is_used_as_it_is(two, tmp_path, made, counted, kind, name):
    """As torchft makes them. Two of them pass by torch's dispatcher, where collectives are counted."""
    outcomes = two.run(group_cases.unlisted, made, str(tmp_path / "store"), kind, name, [Fault(1, 1)])
    assert_agreed([report for report, _ in outcomes], [1], collectives=counted)
    for _, text in outcomes:
        assert "1 bad gradient on rank 1" in text


@KINDS
@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("how", ["unscaled", "clipped"])
def test_another_group_binds_from_the_next_step_on(four, kind, optimizers, how):
    others = [how == "clipped"] * (optimizers - 1)  # clipped together, they are skipped together
    reports = four.run(group_cases.another_group_later, kind, optimizers, how)
    for first, _ in reports:
        assert first == ([True, *others], 4.0)
    for _, second in reports[:2]:
        assert second == ([True, *others], 2.0)
    for _, second in reports[2:]:
        assert second == ([False] * optimizers, 4.0)


@KINDS
def test_a_deepcopy_shares_the_group_and_nothing_else(four, kind):
    """Difference 7 from torch."""
    for shared, scales in four.run(group_cases.deepcopied_in_mid_run, kind):
        assert shared
        assert scales == [8.0, 4.0]


@KINDS
@METHODS
def test_a_pickled_group_is_refused_until_set(four, kind, method):
    """Difference 7 from torch."""
    for rank, attempt in enumerate(four.run(group_cases.unpickled, kind, method)):
        assert_refused(attempt, "[0, 1]" if rank < 2 else "[2, 3]", "set scaler.process_group")


@KINDS
def test_a_destroyed_group_can_be_pickled_and_is_refused_until_set(two, kind):
    for left, error in two.run(group_cases.pickled_too_late, kind):
        assert left.ranks == ()
        assert error.startswith("ValueError: process_group is unset")


@pytest.mark.parametrize(("kind", "explicit"), [("sharded", False), ("sharded", True), ("grad", True)])
def test_a_pickled_default_group_stays_the_default(two, kind, explicit):
    """Difference 7 from torch."""
    reports = two.run(group_cases.unpickled_default, kind, explicit, [Fault(1, 1)])
    if kind == "sharded":
        assert_agreed(reports, [1])
    else:  # None tells a GradScaler to look at the parameters: plain ones bind nobody.
        assert [report.collectives for report in reports] == [[(0,)] * 4] * 2


@NAMES
def test_the_default_group_is_looked_up_when_used(two, tmp_path, name):
    case = group_cases.reborn_group
    for first, second in two.run(case, str(tmp_path / "store"), "sharded", name):
        assert first.scales == scale_model([], 2)[0]
        assert [float.fromhex(scale) for scale in second.scales] == [8.0, 8.0]
        assert second.stepped == [(False,), (True,)]
        assert first.collectives == second.collectives == [(1,), (1,)]


@METHODS
def test_without_a_default_group_torchs_error_and_untouched_gradients(method):
    assert not torch.distributed.is_initialized()
    scaler, param = new_scaler("sharded"), plain_param(3)
    optimizer = new_optimizer("sgd", [param])
    param.grad = scaler.scale(torch.ones(3))
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        getattr(scaler, method)(optimizer)
    assert param.grad.tolist() == [8.0] * 3


class StandIn:
    """A group as tests make them up: one rank, numbered 3."""

    def rank(self):
        return 3

    def size(self):
        return 1

    def allreduce(self, *args):
        raise AssertionError("one rank has nobody to ask")


@KINDS
@METHODS
def test_a_stand_in_needs_no_default_group(kind, method):
    assert not torch.distributed.is_initialized()
    scaler, param = new_scaler(kind, process_group=StandIn()), plain_param(3)
    optimizer = new_optimizer("sgd", [param])
    param.grad = scaler.scale(torch.tensor([1.0, torch.inf, 1.0]))
    getattr(scaler, method)(optimizer)
    assert [bad.rank for bad in scaler.overflow_report().bad] == [3]
