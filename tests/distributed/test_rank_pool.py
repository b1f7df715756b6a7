"""The pool of ranks: it answers in order, tells errors, never hangs, and recovers from what breaks it."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pool_cases as cases
import pytest

from scaler_triton.demo import ranks
from scaler_triton.demo.ranks import RankPool, RankTimeout
from scaler_triton.demo.spawning import quiet_start

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def pool():
    """A pool of its own: these tests break it on purpose."""
    with RankPool(2, group_timeout=3.0) as opened:
        yield opened


def pids(pool):
    """The processes that answer now."""
    return [result.value["pid"] for result in pool.run(cases.describe)]


def test_ranks_answer_in_order_in_one_group(pool):
    answers = [result.value for result in pool.run(cases.describe)]
    assert [answer["rank"] for answer in answers] == [0, 1]
    assert [answer["group"] for answer in answers] == [(0, 2), (1, 2)]
    assert len({answer["pid"] for answer in answers} | {os.getpid()}) == 3


def test_ranks_are_single_threaded_local_and_free_of_pytest(pool):
    for result in pool.run(cases.describe):
        assert (result.value["threads"], result.value["omp"]) == (1, "1")
        assert result.value["interface"].startswith("lo")
        assert not result.value["pytest"]
    assert os.environ.get("GLOO_SOCKET_IFNAME") is None


def test_ranks_are_reused_and_reseeded(pool):
    first, second = pool.run(cases.describe), pool.run(cases.describe)
    assert [r.value["pid"] for r in first] == [r.value["pid"] for r in second]
    assert len({tuple(r.value["random"]) for r in first + second}) == 1


def test_an_error_is_told_and_the_ranks_replaced(pool):
    before = pids(pool)
    good, bad = pool.run(cases.raise_on, 1)
    assert good.ok
    assert good.value == 0
    assert bad.error == "KeyError: 'lost'"
    assert "raise_on" in bad.traceback
    assert not set(before) & set(pids(pool))


def test_a_hang_ends_in_time_and_says_where(pool):
    start = time.monotonic()
    with pytest.raises(RankTimeout, match="hang_on") as caught:
        pool.run(cases.hang_on, 1, timeout=1.0)
    assert time.monotonic() - start < 3.0
    assert caught.value.results[1].error == "RankTimeout: no answer within 1.0 s"
    assert [result.value for result in pool.run(cases.sum_of_ranks)] == [1.0, 1.0]


def test_a_dead_rank_is_told_and_its_peers_do_not_wait(pool):
    survivor, dead = pool.run(cases.die_on, 1, timeout=20.0)
    assert dead.error == "RankDied: exit code 3"
    assert not survivor.ok
    assert [result.value for result in pool.run(cases.sum_of_ranks)] == [1.0, 1.0]


def test_a_collective_left_open_fails_its_own_case(pool):
    results = pool.run(cases.leave_open, 0)
    assert any(result.error is not None and "OutOfStep" in result.error for result in results)
    assert [result.value for result in pool.run(cases.sum_of_ranks)] == [1.0, 1.0]


def test_a_value_that_cannot_travel_is_an_error(pool):
    assert all(not result.ok for result in pool.run(cases.unpicklable))


def test_close_ends_the_processes_and_the_folder(pool):
    (pid, _), folder = pids(pool), pool._folder.name
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not os.path.exists(folder)


def test_idle_ranks_leave_by_themselves():
    with RankPool(2) as opened:
        pids(opened)
        processes = [rank.process for rank in opened._ranks]
        start = time.monotonic()
    assert time.monotonic() - start < 3.0
    assert [process.exitcode for process in processes] == [0, 0]


def test_a_busy_rank_is_ended_by_force_and_in_time(monkeypatch):
    monkeypatch.setattr(ranks, "CLOSE_TIMEOUT", 0.3)
    with RankPool(2) as opened:
        pids(opened)
        processes = [rank.process for rank in opened._ranks]
        opened._ranks[1].connection.send_bytes(pickle.dumps((cases.sleep, ())))
        start = time.monotonic()
    assert 0.3 <= time.monotonic() - start < 3.0
    assert processes[1].exitcode == -signal.SIGKILL


def test_ranks_that_cannot_start_say_why_and_leave_no_trace(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    opened = RankPool(2, backend="pigeons")
    with pytest.raises(RuntimeError, match=r"rank 0 did not start: .*pigeons"):
        opened.run(cases.describe)
    assert (opened._ranks, opened._folder) == ([], None)
    assert os.environ["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(("names", "network"), [(["eth0", "lo0"], "lo0"), (["eth0"], None)])
def test_ranks_keep_to_loopback_where_there_is_one(tmp_path, monkeypatch, names, network):
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names)))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with quiet_start(tmp_path / "log"):
        assert os.environ.get("GLOO_SOCKET_IFNAME") == network
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_an_interrupt_while_ranks_are_spawned_is_not_lost(tmp_path):
    before, stderr = signal.signal(signal.SIGINT, signal.default_int_handler), os.fstat(2)
    try:
        with pytest.raises(KeyboardInterrupt), quiet_start(tmp_path / "log"):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert os.path.samestat(os.fstat(2), stderr)


def test_ranks_that_are_not_all_there_are_replaced(pool, monkeypatch):
    first = pids(pool)[0]
    pool.close()
    spawn = pool._spawn

    def interrupted(index, folder):
        if index:
            raise KeyboardInterrupt
        return spawn(index, folder)

    monkeypatch.setattr(pool, "_spawn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.run(cases.describe)
    monkeypatch.undo()
    (left,) = pool._ranks
    assert len(set(pids(pool)) - {first, left.process.pid}) == 2
    assert not left.process.is_alive()


def test_a_function_that_ranks_cannot_find_is_an_error_there(pool, monkeypatch):
    module = types.ModuleType("of_the_parent_alone")
    exec("def answer(rank): return rank", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for result in pool.run(module.answer):
        assert result.error == "ModuleNotFoundError: No module named 'of_the_parent_alone'"


def test_ranks_that_do_not_meet_in_time_are_out_of_step(monkeypatch):
    monkeypatch.setattr(ranks, "CHECK_TIMEOUT", 1.0)
    with RankPool(2, group_timeout=20.0) as opened:
        pids(opened)
        start = time.monotonic()
        results = opened.run(cases.leave_open, 0)
        assert time.monotonic() - start < 5.0
    assert any(result.error is not None and "RankTimeout" in result.error for result in results)


# Starts two ranks, tells their numbers, and has them wait in a call.
PARENT = """
import pool_cases
from scaler_triton.demo.ranks import RankPool
with RankPool(2) as pool:
    print(*(result.value["pid"] for result in pool.run(pool_cases.describe)), flush=True)
    pool.run(pool_cases.sleep)
"""


def test_ranks_end_with_their_parent():
    """However it ends, and whatever they are doing."""
    paths = [str(Path(cases.__file__).parent), str(Path(cases.__file__).parents[2])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        started = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    deadline = time.monotonic() + 10.0
    while any(map(alive, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(started) == 2
    assert not any(map(alive, started))


def alive(pid):
    """Tell whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_world_of_nobody_is_refused():
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        RankPool(0)


def test_the_counter_sees_plain_and_functional_collectives(two):
    for plain, functional, none in two.run(cases.count_kinds):
        assert plain == ["c10d::allreduce_"]
        assert functional == ["_c10d_functional::all_reduce"]
        assert none == []
