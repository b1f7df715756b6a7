"""Torch's known defects, each as a small program that runs on two ranks with torch's scalers or with ours.

`--prove` runs them, and docs/agreement.md shows their table. A function's docstring says when the defect shows, its
decorator what torch does then, what ours does (by default all ranks skip the step) and what every rank must hold."""

import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from math import frexp, inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

from scaler_triton.cli.console import coloured, fitted, fitted_table
from scaler_triton.core.gradients import local_tensor
from scaler_triton.demo.launch import Answer, run_ranks
from scaler_triton.demo.train import load_library, put_inf
from scaler_triton.text import one_line, rank_names

START = 8.0  # the scale before the step: 4 after one backoff
NOT_RUN = 3  # the exit status where a case could not run
HEAD = ("  rank", "  scale", "optimizer  ", "its parameters, or its error  ")


class Outcome(NamedTuple):
    """What one rank holds after a case."""

    scale: float
    did: str  # "stepped", "skipped", or "no grads" if there was nothing to step with
    parameters: str  # its own, hashed: what they were, and what they are
    finite: bool = True  # whether they are free of NaN and Inf


class Watch:
    """A scaler and parameters, looked at now and again at the outcome."""

    def __init__(self, scaler: Any, parameters: Iterable[Tensor]) -> None:
        self._scaler, self._parameters = scaler, list(parameters)
        self._before = self._hash()

    def step(self, optimizer: Any) -> "Watch":
        """Step the optimizer, update the scale, and return the watch."""
        self._scaler.step(optimizer)
        self._scaler.update()
        return self

    def outcome(self) -> Outcome:
        """Return what became of them."""
        finite = all(bool(local_tensor(p).isfinite().all()) for p in self._parameters)
        broken = "" if finite else " (NaN or Inf)"
        if (after := self._hash()) != self._before:
            return Outcome(self._scaler.get_scale(), "stepped", f"{self._before} -> {after}{broken}", finite)
        did = "skipped" if any(p.grad is not None for p in self._parameters) else "no grads"
        return Outcome(self._scaler.get_scale(), did, f"{after} unchanged{broken}", finite)

    def _hash(self) -> str:
        parts = [local_tensor(p.detach()).cpu().flatten().view(torch.uint8).numpy().tobytes() for p in self._parameters]
        return sha256(b"".join(parts)).hexdigest()[:8]


Program = Callable[[int, Any], Watch]  # takes the rank, and a namespace with GradScaler and ShardedGradScaler


class Case(NamedTuple):
    """One defect."""

    name: str  # what `--prove` takes
    summary: str  # when it happens, in one line
    run: Program
    torch: str  # what torch does, in one line
    ours: str = "every rank skips the step"  # what we do, in one line
    stepped: bool = False  # whether every rank must have stepped in the end
    scale: float = START / 2  # which scale every rank must hold
    issue: int = 0  # the number of torch's own issue, if there is one
    on_gpu: bool = False
    last: tuple[int, int] | None = None  # the newest torch that is known to be wrong, if a later one may be right

    def may_be_mended(self) -> bool:
        """Return whether this torch is newer than those that are known to be wrong."""
        return self.last is not None and tuple(map(int, torch.__version__.split(".")[:2])) > self.last

    def wrong(self, answers: Sequence[Answer]) -> str:
        """Return what went wrong, in words; empty if all is right."""
        errors: dict[str, list[int]] = {}
        for answer in answers:
            if answer.error:
                errors.setdefault(answer.error.split(":")[0], []).append(answer.rank)
        if errors:
            return "; ".join(f"{rank_names(ranks)} {_failed(kind, ranks)}" for kind, ranks in errors.items())
        outcomes: list[Outcome] = [answer.value for answer in answers]
        scale, stepped = outcomes[0].scale, outcomes[0].did == "stepped"
        wrong = ["the ranks split"] if {(o.scale, o.did == "stepped") for o in outcomes} != {(scale, stepped)} else []
        if bad := [rank for rank, outcome in enumerate(outcomes) if not outcome.finite]:
            wrong.append(f"NaN or Inf in the weights of {rank_names(bad)}")
        if not wrong and scale != self.scale:
            wrong.append(f"the scale is {shown(scale)} instead of {shown(self.scale)}")
        if not wrong and stepped != self.stepped:
            wrong.append(f"the step was {'taken' if stepped else 'skipped'}")
        return "; ".join(wrong)


def _failed(kind: str, ranks: Sequence[int]) -> str:
    s = "s" if len(ranks) == 1 else ""
    return f"hang{s} in a collective" if kind == "RankTimeout" else f"raise{s} {kind}"


CASES: dict[str, Case] = {}


def case(torch: str, **rest: Any) -> Callable[[Program], Program]:
    """Enter a function into CASES, under its own name."""

    def enter(run: Program) -> Program:
        name = run.__name__.replace("_", "-")
        CASES[name] = Case(name, (run.__doc__ or "").rstrip("."), run, torch, **rest)
        return run

    return enter


@case("the ranks split for good: one skips the step and backs off, the others step")
def fsdp1_fused(rank: int, library: Any) -> Watch:
    """FSDP1, fused AdamW, ShardedGradScaler; one rank's gradient shard overflows."""
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    optimizer = AdamW(model.parameters(), fused=True)
    scaler = library.ShardedGradScaler("cpu", START)
    watch = Watch(scaler, model.parameters())
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if rank == 0:
        put_inf(model)
    return watch.step(optimizer)


@case("the step is taken: NaN or Inf in the weights")
def fused_clip(rank: int, library: Any) -> Watch:
    """FSDP1, fused SGD, `unscale_` and clipping; two ranks overflow in the same step."""
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    scaler = library.ShardedGradScaler("cpu", START)
    watch = Watch(scaler, model.parameters())
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    put_inf(model)
    scaler.unscale_(optimizer)
    model.clip_grad_norm_(1.0)
    return watch.step(optimizer)


@case("`step` raises RuntimeError, always", ours="every rank steps", stepped=True, scale=START, issue=140514)
def fused_adam_unscale(rank: int, library: Any) -> Watch:
    """fused AdamW, ShardedGradScaler, `unscale_` before the step; nothing overflows."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = AdamW([weight], fused=True)
    scaler = library.ShardedGradScaler("cpu", START)
    watch = Watch(scaler, [weight])
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_([weight], 1.0)
    return watch.step(optimizer)


@case("the ranks split: one skips, the other steps")
def tp_first_replicated(rank: int, library: Any) -> Watch:
    """GradScaler on DTensors: the first parameter is replicated, the shard of another overflows on one rank."""
    norm = dtensor_with_grad(Replicate(), START)
    weight = dtensor_with_grad(Shard(0), inf if rank == 1 else START)
    return plain_step(library, [norm, weight])


@case("`step` raises RuntimeError about mixed tensors", ours="every rank skips the bad step")
def dtensor_beside_plain(rank: int, library: Any) -> Watch:
    """GradScaler, sharded and plain parameters in one optimizer (FSDP2's `ignored_params`)."""
    sharded = dtensor_with_grad(Shard(0), inf if rank == 1 else START)
    plain = nn.Parameter(torch.ones(4))
    plain.grad = torch.full((4,), START)
    return plain_step(library, [sharded, plain])


@case("the ranks split: their scales differ from here on")
def rank_without_grads(rank: int, library: Any) -> Watch:
    """fused AdamW, ShardedGradScaler; one rank got no gradients, those of another overflow."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = AdamW([weight], fused=True)
    scaler = library.ShardedGradScaler("cpu", START)
    watch = Watch(scaler, [weight])
    scaler.scale(torch.ones(()))
    if rank == 1:
        weight.grad = torch.full((4,), inf)
    return watch.step(optimizer)


@case("one rank raises AssertionError, the other hangs in a collective")
def rank_without_grads_dtensor(rank: int, library: Any) -> Watch:
    """GradScaler on sharded experts; those of one rank got no gradients, those of another overflow."""
    experts = dtensor_with_grad(Shard(0), inf)
    if rank == 0:
        experts.grad = None
    return plain_step(library, [experts])


@case(
    "the scale becomes inf and every later step is skipped",
    ours="the scale stays at the largest power of two, training goes on",
    stepped=True,
    scale=2.0**127,
)
def scale_to_inf(rank: int, library: Any) -> Watch:
    """ShardedGradScaler on the CPU; the scale grows for as long as nothing overflows."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = SGD([weight], lr=0.1)
    scaler = library.ShardedGradScaler("cpu", 2.0**127, growth_interval=1)
    for _ in range(2):
        watch = Watch(scaler, [weight])
        optimizer.zero_grad()
        scaler.scale((weight * 2.0**-10).sum()).backward()
        watch.step(optimizer)
    return watch


@case(
    "the scale never grows again until a step is skipped",
    ours="the scale grows at the next good step",
    stepped=True,
    scale=4 * START,  # three good steps later it grows again
)
def tracker_past_interval(rank: int, library: Any) -> Watch:
    """GradScaler; `set_growth_interval` to fewer good steps than were already counted."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = SGD([weight], lr=0.1)
    scaler = library.GradScaler("cpu", START, growth_interval=10)
    watch = Watch(scaler, [weight])
    for step in range(9):
        if step == 5:
            scaler.set_growth_interval(3)
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        watch.step(optimizer)
    return watch


@case(
    "the next step neither unscales nor checks: NaN or Inf in the weights",
    ours="the next step checks its gradients, and is skipped",
)
def failed_step(rank: int, library: Any) -> Watch:
    """GradScaler; `optimizer.step` runs out of memory, the loop drops that batch, the next one overflows."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = SGD([weight], lr=0.1)
    scaler = library.GradScaler("cpu", START)
    watch = Watch(scaler, [weight])
    scaler.scale(weight.sum()).backward()
    hook = optimizer.register_step_pre_hook(run_out_of_memory)
    with suppress(torch.OutOfMemoryError):
        scaler.step(optimizer)
    hook.remove()
    optimizer.zero_grad()
    scaler.scale((weight * inf).sum()).backward()
    return watch.step(optimizer)


@case("`update` raises RuntimeError", ours="both step on every rank", stepped=True, scale=START)
def fused_then_plain(rank: int, library: Any) -> Watch:
    """ShardedGradScaler; a fused optimizer steps before a plain one."""
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    fused, plain = AdamW([first], fused=True), SGD([second], lr=0.1)
    scaler = library.ShardedGradScaler("cpu", START)
    watch = Watch(scaler, [first, second])
    scaler.scale((first * second).sum()).backward()
    scaler.step(fused)
    return watch.step(plain)


@case(
    "up to torch 2.15 `step` raises NotImplementedError",
    ours="every rank steps",
    stepped=True,
    scale=START,
    issue=127176,
    on_gpu=True,
    last=(2, 15),
)
def bf16_grads(rank: int, library: Any) -> Watch:
    """GradScaler, adapters in bf16 under fp16 autocast, as TRL makes them of a 4-bit model's; needs a GPU."""
    adapter = nn.Linear(4, 4, device="cuda", dtype=torch.bfloat16)
    scaler = library.GradScaler("cuda", START)
    watch = Watch(scaler, adapter.parameters())
    with torch.autocast("cuda", torch.float16):
        loss = adapter(torch.ones(2, 4, device="cuda")).sum()
    scaler.scale(loss.float()).backward()
    return watch.step(SGD(adapter.parameters(), lr=1.0))


def dtensor_with_grad(placement: Placement, first: float) -> nn.Parameter:
    """Return a parameter of four elements on this rank, and its gradient, whose first element is given."""
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [placement]))
    parameter.grad = DTensor.from_local(torch.tensor([first, START, START, START]), mesh, [placement])
    return parameter


def plain_step(library: Any, parameters: list[nn.Parameter]) -> Watch:
    """Take one step of a GradScaler and a plain SGD on gradients that are already there."""
    optimizer = SGD(parameters, lr=0.1)
    scaler = library.GradScaler("cpu", START)
    watch = Watch(scaler, parameters)
    scaler.scale(torch.ones(()))
    return watch.step(optimizer)


def run_out_of_memory(*args: object) -> None:
    """Fail as an optimizer does that finds no memory for its state."""
    raise torch.OutOfMemoryError


def shown(scale: float) -> str:
    """Return a scale as people write it: 2^127, not 1.70141e+38."""
    mantissa, exponent = frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 and exponent > 20 else f"{scale:g}"


def list_cases(columns: int | None = None) -> str:
    """Return the names and summaries, a line each, or several of at most `columns` characters."""
    names = max(map(len, CASES))
    wrapper = textwrap.TextWrapper(columns or sys.maxsize, subsequent_indent=" " * (names + 2))
    return "\n".join(wrapper.fill(f"{case.name:{names}}  {case.summary}") for case in CASES.values())


def prove(cases: Sequence[Case]) -> int:
    """Run cases with both libraries; return 0 if torch is wrong and we are right, else 1; NOT_RUN if none could run.

    A torch may be right that is newer than those that are known to be wrong.
    """
    missing = [] if torch.cuda.is_available() else [case.name for case in cases if case.on_gpu]
    cases, unexpected, mended = [case for case in cases if case.name not in missing], [], []
    found = [("case", "torch", "ours")]
    for case in cases:
        right = f"every rank {'steps' if case.stepped else 'skips the step'} and holds scale {shown(case.scale)}"
        print(fitted(f"{case.name}: {case.summary}\nright is: {right}\n", sys.stdout), flush=True)
        said = {}
        for library in ("torch", "ours"):
            answers = run_ranks(run_case, case.name, library)
            wrong = case.wrong(answers)
            said[library] = f"WRONG: {wrong}" if wrong else "RIGHT"
            print(load_library(library)[0])
            print(fitted_table([HEAD, *map(_row, answers)], ">><<", sys.stdout))
            print(coloured(f"{said[library]}\n", not wrong, sys.stdout), flush=True)
            if library == "torch" and not wrong and case.may_be_mended():
                mended.append(case.name)
            elif bool(wrong) is (library == "ours"):
                text = f"scaler_triton is wrong: {wrong}" if wrong else "torch is no longer wrong"
                unexpected.append(f"UNEXPECTED: {case.name}: {text}")
        found.append((case.name, said["torch"], said["ours"]))
    if len(cases) > 1:
        print(fitted_table(found, "<<<", sys.stdout), end="\n\n")
    rest = len(cases) - len(mended)
    where = f" in all {rest} {'other ' if mended else ''}cases" if rest > 1 else ""
    if rest or unexpected:
        text = "\n".join(unexpected) or f"As expected{where}: torch wrong, ours right."
        print(coloured(text, not unexpected, sys.stdout))
    if mended:
        print(f"MENDED: {', '.join(mended)}: this torch is right, too")
    if missing:
        print(f"NOT RUN: {', '.join(missing)}: needs a GPU, and torch finds none")
    return NOT_RUN if not cases else 1 if unexpected else 0


def run_case(rank: int, name: str, library: str) -> Outcome:
    """Run one rank of a case."""
    return CASES[name].run(rank, load_library(library)[1]).outcome()


def _row(answer: Answer) -> list[str]:
    if answer.error:
        return [str(answer.rank), "-", "error", one_line(answer.error.splitlines()[0], 90)]
    return [str(answer.rank), shown(answer.value.scale), answer.value.did, answer.value.parameters]
