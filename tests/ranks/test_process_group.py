"""The process_group argument: whom it binds, what it refuses, how it is copied, and when it is looked up."""

import copy
import functools
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist

from ranks import cases
from ranks.cases import KINDS, METHODS, NAMES, Fault, Report, assert_agreed, new_optimizer, new_scaler, plain_param

pytestmark = pytest.mark.distributed


@functools.cache
def _pair(rank: int) -> dist.ProcessGroup:
    """The group of ranks 0 and 1, or of 2 and 3: the one this rank is in."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[rank // 2]


# What is refused.


def try_group(rank: int, kind: str, name: str, method: str, layout: str, stranger: bool) -> cases.Attempt:
    """One call with a process group that is wrong: the ranks' pairs are too small, or rank 1 is not in its group."""
    params = cases.LAYOUTS[layout]()
    scaler = new_scaler(kind, process_group=dist.new_group([0]) if stranger else _pair(rank))
    cases.give_grads(scaler, params, 0)
    return cases.attempt(scaler, method, new_optimizer(name, params))


def assert_refused(tried: cases.Attempt, word: str) -> None:
    """An error that names the argument and its value, with nothing sent and nothing written."""
    assert tried.error.startswith("ValueError: process_group")
    assert word in tried.error
    assert tried[1:] == (0, False, False, "READY")


@KINDS
@METHODS
@NAMES
def test_a_group_that_this_rank_is_not_in(two, kind, method, name):
    member, stranger = two.run(try_group, kind, name, method, "plain", True)
    assert_refused(stranger, "this rank, 1")
    assert member.error is None


@KINDS
@METHODS
@NAMES
@pytest.mark.parametrize("layout", ["hsdp", "line-shards", "fsdp-then-tp", "line-beside-plain"])
def test_a_group_that_misses_ranks_of_a_mesh(four, kind, method, name, layout):
    for rank, each in enumerate(four.run(try_group, kind, name, method, layout, False)):
        assert_refused(each, f"ranks {[0, 1] if rank < 2 else [2, 3]} without [")


# Whom a group binds.


def in_pairs(rank: int, kind: str, name: str, faults: Sequence[Fault], copied: str) -> tuple[Report, bool]:
    """Ranks agree within pairs only, with a scaler or a copy of it; whether the copy has the very same group."""
    scaler = new_scaler(kind, process_group=_pair(rank))
    if copied == "deepcopy":
        scaler = copy.deepcopy(scaler)
    if copied == "pickle":  # which refuses a group
        scaler.process_group = None
        scaler = pickle.loads(pickle.dumps(scaler))
        scaler.process_group = _pair(rank)
    optimizer = new_optimizer(name, params := [plain_param(3)])
    report = cases.train(rank, scaler, optimizer, cases.giving(scaler, params), faults)
    return report, scaler.process_group is _pair(rank)


@pytest.mark.parametrize("kind", ["grad", "sharded", "guard"])
@NAMES
@pytest.mark.parametrize("copied", ["", "deepcopy", "pickle"])
def test_a_group_binds_its_own_ranks_only(four, kind, name, copied):
    reports, same_groups = zip(*four.run(in_pairs, kind, name, [Fault(1, 3)], copied), strict=True)
    assert_agreed(reports[:2], [], kind=kind)
    assert_agreed(reports[2:], [1], kind=kind)
    windows = [[4], [4], [3], [3]] if kind == "guard" else [[]] * 4
    assert [[len(norms) for norms in report.windows] for report in reports] == windows
    assert all(same_groups)


def managed(rank: int, store: str, registered: bool, kind: str, name: str) -> tuple[Report, str]:
    """Ranks agree over a group of torchft's kind, registered with torch or not; the report of all."""
    group: Any = Managed(dist.ProcessGroupGloo(dist.FileStore(store, 2), rank, 2), rank)
    scaler = new_scaler(kind, process_group=group.registered() if registered else group)
    optimizer = new_optimizer(name, params := [plain_param(3)])
    report = cases.train(rank, scaler, optimizer, cases.giving(scaler, params), [Fault(1, 1)])
    return report, str(scaler.overflow_report(gather=True))


class Managed(dist.ProcessGroup):
    """A group of processes of which torch keeps no list; torch may count this one alone in it."""

    def __init__(self, inner: Any, rank: int) -> None:
        super().__init__(rank, 2)
        self._inner = inner

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self._inner.allreduce(tensors, options)

    def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:
        return self._inner.allgather(outputs, inputs, options)

    def registered(self) -> Any:
        """As torchft's `ManagedProcessGroup.register` does it."""
        name = f"managed{len(dist.Backend.backend_list)}"
        dist.Backend.register_backend(name, lambda *args: self, devices=[cases.DEVICE])
        return dist.new_group([dist.get_rank()], backend=name, use_local_synchronization=True)


@KINDS
@NAMES
@pytest.mark.parametrize("registered", [False, True])
def test_a_group_that_torch_keeps_no_list_of_is_used_as_it_is(two, tmp_path, registered, kind, name):
    """Its collectives pass by torch's dispatcher, where they are counted."""
    outcomes = two.run(managed, str(tmp_path / "store"), registered, kind, name)
    assert_agreed([report for report, _ in outcomes], [1], collectives=0)
    assert all("1 bad gradient on rank 1" in text for _, text in outcomes)


def another_group_later(rank: int, kind: str, how: str) -> list[tuple[list[bool], float]]:
    """Two steps in which rank 0 overflows, the second with a group of two ranks: who skipped, and the scale."""
    scaler, params = new_scaler(kind, process_group=dist.group.WORLD), [plain_param(3), plain_param(3)]
    optimizers, ends = [new_optimizer("sgd", [param]) for param in params], []
    for step in range(2):
        cases.give_grads(scaler, params, step)
        cases.plant([Fault(step, 0)], rank, step, params)
        if how == "clipped":
            scaler.clip_grad_norm_(optimizers, 1.0)
        for optimizer in optimizers:
            if how == "unscaled":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
        ends.append(([scaler.was_skipped(optimizer) for optimizer in optimizers], scaler.get_scale()))
        scaler.process_group = _pair(rank)
    return ends


@KINDS
@pytest.mark.parametrize("how", ["unscaled", "clipped"])
def test_another_group_binds_from_the_next_step_on(four, kind, how):
    skipped = [True, how == "clipped"]  # clipped together, they are skipped together
    bound, free = [(skipped, 4.0), (skipped, 2.0)], [(skipped, 4.0), ([False, False], 4.0)]
    assert four.run(another_group_later, kind, how) == [bound, bound, free, free]


def reborn_group(rank: int, store: str, kind: str, name: str) -> list[Report]:
    """Train, destroy the default group, train a guard without one, make another, and go on; rank 1 overflows then."""
    scaler, params = new_scaler(kind), [plain_param(3)]
    optimizer, world_size = new_optimizer(name, params), dist.get_world_size()
    train = functools.partial(cases.train, rank, scaler, optimizer, cases.giving(scaler, params), steps=2)
    reports = [train()]
    dist.destroy_process_group()
    for cached in (cases.mesh, _pair):
        cached.cache_clear()
    if kind == "guard":
        reports.append(train([Fault(0, 1)]))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    return [*reports, train([Fault(0, 1)])]


@NAMES
@pytest.mark.parametrize("kind", ["sharded", "guard"])
def test_the_default_group_is_looked_up_when_used(two, tmp_path, kind, name):
    for rank, (first, *alone, last) in enumerate(two.run(reborn_group, str(tmp_path / "store"), kind, name)):
        assert (first.stepped, last.stepped) == ([True, True], [False, True])
        assert first.collectives == last.collectives == [1, 1]
        assert [float.fromhex(scale) for scale in last.scales] == [1.0 if kind == "guard" else 8.0] * 2
        for report in alone:
            assert (report.stepped, report.collectives) == ([rank == 0, True], [0, 0])
