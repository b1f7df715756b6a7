"""The demo with its ranks: the proofs, the training in every mode, and processes that fail, hang or are interrupted."""

import operator
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import STRICT

from scaler_triton.demo import show
from scaler_triton.demo.launch import Answer, run_ranks
from scaler_triton.demo.model import ModelSize
from scaler_triton.demo.proofs import CASES, prove, run_case
from scaler_triton.demo.train import Config, Trace, train_alone, train_rank

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
TORCH_IS_WRONG = {
    "fsdp1-fused": "the ranks split",
    "fused-clip": "NaN or Inf in the weights of ranks 0-1",
    "fused-adam-unscale": "ranks 0-1 raise RuntimeError",
    "tp-first-replicated": "the ranks split",
    "dtensor-beside-plain": "ranks 0-1 raise RuntimeError",
    "rank-without-grads": "the ranks split",
    "rank-without-grads-dtensor": "rank 0 raises AssertionError; rank 1 hangs in a collective",
    "scale-to-inf": "the scale is inf instead of 2^127",
    "tracker-past-interval": "the scale is 8 instead of 32",
    "failed-step": "NaN or Inf in the weights of ranks 0-1",
    "fused-then-plain": "ranks 0-1 raise RuntimeError",
    "bf16-grads": "ranks 0-1 raise NotImplementedError",
}
SMALL = ModelSize(layers=2, width=16, heads=2, context=16)


@pytest.fixture(scope="module", autouse=True)
def warnings_are_errors() -> Iterator[None]:
    """Have a warning be an error in the ranks, but for a fork beside a library's threads and torch's own of FSDP1."""
    allowed = "ignore:This process:DeprecationWarning", "ignore:The AccumulateGrad node's stream:UserWarning"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONWARNINGS", ",".join([*STRICT[1::2], *allowed]))
        yield


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.gpu] * CASES[name].on_gpu) for name in CASES])
def test_torch_is_wrong_as_stated_and_we_are_right(name: str) -> None:
    assert CASES[name].wrong(run_ranks(run_case, name, "ours")) == ""
    mended = {""} if CASES[name].may_be_mended() else set()
    assert CASES[name].wrong(run_ranks(run_case, name, "torch")) in {TORCH_IS_WRONG[name], *mended}


def test_a_proof_prints_what_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert prove([CASES["fsdp1-fused"]]) == 0

    def masked(text: str) -> str:  # torch's version and the parameters' hashes differ between machines
        return re.sub(r"\b[0-9a-f]{8}\b|(?<=\ntorch )\S+", "*", text)

    assert masked(capsys.readouterr().out).strip() in masked((ROOT / "README.md").read_text())


def failures(config: Config) -> list[str]:
    """Train on ranks and in a single process, and return the checks that fail."""
    reference = trained(train_alone, replace(config, mode="fsdp2", scaler="ours"), 1)[0]
    return [text for ok, text in show.judge(trained(train_rank, config, config.ranks), reference) if not ok]


@cache
def trained(how: Callable[[int, Config], Trace], config: Config, ranks: int) -> list[Trace]:
    answers = run_ranks(how, config, ranks=ranks)
    assert not any(answer.error for answer in answers), answers
    return [answer.value for answer in answers]


@pytest.mark.parametrize(
    ("mode", "optimizer"), [("ddp", "sgd"), ("fsdp1", "adamw"), ("fsdp1", "adamw-fused"), ("fsdp2", "adamw-fused")]
)
def test_our_ranks_agree_and_match_one_process(mode: str, optimizer: str) -> None:
    assert failures(Config("ours", mode, optimizer, 24, size=SMALL)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
@pytest.mark.parametrize("mode", ["single", "ddp", "fsdp1", "fsdp2"])
def test_ranks_agree_on_the_gpu(mode: str, optimizer: str) -> None:
    config, _ = show.place(Config("ours", mode, optimizer, 12))
    assert config.device_type == "cuda"
    if "PRETENDED_GPU" in os.environ and "fsdp" in mode:
        pytest.skip("gloo, which stands in for NCCL there, has no collectives for FSDP")
    assert failures(config) == []


@pytest.mark.slow
def test_our_demo_succeeds_in_under_a_minute(tmp_path: Path) -> None:
    """As a user without a GPU runs it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("OMP_NUM_THREADS", None)
    environment.pop("PYTHONWARNINGS", None)
    command, begin = [sys.executable, "-m", "scaler_triton", "demo"], time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    crowded = os.getloadavg()[0] / (os.cpu_count() or 1)  # others may use the machine, too
    assert time.monotonic() - begin < 60 * min(max(crowded, 1.0), 4.0)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "OK: every check holds with ours; with torch's scaler 4 of 6 fail"
    assert "FAILED  the scales of the ranks split after step 10; after the last update: 65536, 16384" in lines
    assert [line.split()[0] for line in lines if " ONLY " in line and line.endswith(" yes")] == ["10", "25", "39"]
    assert done.stderr.startswith("starting two ranks ...\n")
    if find_spec("tqdm"):
        ended = {line.split(":")[0] for line in done.stderr.splitlines() if "| 48/48 [" in line}
        assert len(ended) == 3, done.stderr  # a bar may draw its last state twice
    if find_spec("matplotlib"):
        assert (tmp_path / "demo.png").stat().st_size > 10_000


@pytest.mark.parametrize("seconds", [0.2, 4.0])
def test_an_interrupt_ends_the_ranks_without_a_word(seconds: float) -> None:
    # A job in the background of a script ignores interrupts, and so would its children.
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    words = [sys.executable, "-m", "scaler_triton", "demo", "--prove", "rank-without-grads-dtensor"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(words, **options, preexec_fn=heed) as demo:
        demo.stdout.readline()  # the ranks are started right after it
        time.sleep(seconds)
        os.killpg(demo.pid, signal.SIGINT)
        _, errors = demo.communicate(timeout=90)  # ranks that are still importing torch end after that
    assert (demo.returncode, errors) == (130, "")


def test_ranks_answer_in_order_or_say_what_they_raised_or_that_they_died() -> None:
    assert run_ranks(operator.add, 5, ranks=3) == [Answer(rank, rank + 5) for rank in range(3)]
    raised = "ZeroDivisionError: integer modulo by zero"
    assert [answer.error for answer in run_ranks(operator.mod, 0)] == [raised, raised]
    first, second = (answer.error for answer in run_ranks(os._exit))
    assert second == "RankDied: exit code 1"
    assert first == "RankDied: exit code 0" or "Connection closed by peer" in first  # it was still connecting
