"""Which parameter overflowed, on which rank: the report that is made of the marks of `marks.py`."""

from __future__ import annotations

import json
import math
import re
import sys
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scaler_triton.core import ranks
from scaler_triton.core.gradients import DDP_SPEC, is_distributed, is_dtensor, largest_by_kind, local_tensor
from scaler_triton.kernels.abi import INF, LAST_SKIP, NAN, SKIPPED
from scaler_triton.report.hooks import poisoned_hooks
from scaler_triton.report.marks import WORDS, generations_of, marks_of
from scaler_triton.text import count_of, error_line, one_line, ranges, rank_names, table

if TYPE_CHECKING:
    from scaler_triton.core.registry import Steps
    from scaler_triton.core.step import OptimizerStep
    from scaler_triton.core.update import Counters

_UNNAMED = re.compile(r"optimizer \d+, parameter \d+")
_MOST_ROWS, _MOST_MODULES = 20, 3
# What FSDP1, activation checkpointing and torch.compile add to the names of wrapped modules.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_NO_NAMES = "model must be a module or what its named_parameters() gives"

Model = nn.Module | Iterable[tuple[str, Tensor]] | None


@dataclass(frozen=True)
class BadGradient:
    """A gradient, or a rank's shard of one, that was not finite.

    Args:
        name: the parameter's, fully qualified if a model is known.
        kinds: "NaN", "Inf" or "NaN and Inf".
        numel: elements that this rank holds.
        rank: the one that held it, counted from 0.
        is_shared: whether the parameter is a DTensor or one of FSDP1, or is unknown by now: then the gradient may be a
            sum over ranks, which does not tell whose batch it was.
    """

    name: str
    kinds: str
    numel: int
    rank: int
    is_shared: bool = False


@dataclass(frozen=True)
class BadParameter:
    """A parameter, or a rank's shard of one, that was not finite itself when the report was made.

    Args:
        name: as of a `BadGradient`.
        kind: "NaN", else "Inf".
        rank: the one that holds it, counted from 0.
    """

    name: str
    kind: str
    rank: int


@dataclass(frozen=True)
class Spike:
    """A norm, of all ranks' gradients, for which a `StepGuard` skipped a step.

    Args:
        norm: the 2-norm.
        limit: what it was compared with.
    """

    norm: float
    limit: float

    def __str__(self) -> str:
        return f"spike: norm {self.norm:.3g}, limit {self.limit:.3g}"


@dataclass(frozen=True)
class OverflowReport:
    """What `overflow_report` found about the last skip.

    Args:
        update: the number of that update, counted from 1; None if none was skipped, or its update is still to come.
        bad: the gradients, by rank, each rank's in the order of its parameters.
        gathered: whether the report covers all ranks, not only this one of several.
        not_covered: descriptions of gradients that leave no marks, and of ranks whose report failed.
        pending: whether the update of the skip is still to come.
        spikes: what a `StepGuard` skipped finite gradients for.
        checked: how many gradients the optimizers with a bad one have, on the ranks with a bad one; 0: unknown.
        ranks: how many ranks have reported.
        bad_parameters: those that the optimizers hold and that are not finite now, by rank.
        causes: what else makes steps overflow, each with what to do.
    """

    update: int | None
    bad: tuple[BadGradient, ...]
    gathered: bool
    not_covered: tuple[str, ...] = ()
    pending: bool = False
    spikes: tuple[Spike, ...] = ()
    checked: int = 0
    ranks: int = 1
    bad_parameters: tuple[BadParameter, ...] = ()
    causes: tuple[str, ...] = ()

    @property
    def conclusion(self) -> str:
        """One line that says what follows from the report, and no more than that; empty if nothing does."""
        if self.bad_parameters:
            names = [*dict.fromkeys(one_line(each.name) for each in self.bad_parameters)]
            kinds = " or ".join(sorted({each.kind for each in self.bad_parameters}, reverse=True))
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            verb = "themselves hold" if more else "itself holds"
            return f"{names[0]}{more} {verb} {kinds}: go back to a checkpoint."
        if self.causes:
            return f"{' '.join(self.causes)}."
        return " ".join(filter(None, (self._what(), self._whose()))) if self.bad and self.checked else ""

    def _what(self) -> str:
        """Say which gradients are bad, if that tells something."""
        kinds = {each.kinds for each in self.bad}
        covered = " that are covered" if self.not_covered else ""
        if self._are_all_bad():
            where = f" of {rank_names(self._ranks_with_bad())}" if self.ranks > 1 or not self.gathered else ""
            found = f"All {self.checked} gradients{covered}{where} are {' or '.join(_sorted_kinds(kinds))}"
            if kinds == {WORDS[NAN]}:
                return f"{found}: so was the loss, or the first gradient that backward made from it."
            return f"{found}: no single layer is at fault, backward overflowed where it began or everywhere."
        if any(_UNNAMED.fullmatch(each.name) for each in self.bad):
            return f"{len(self.bad)} of {self.checked} gradients{covered}: overflow_report(model) names them."
        place = _place({one_line(each.name) for each in self.bad})
        if not place:
            return ""
        only = "Only" if self.gathered else "On this rank only"
        fault = "NaN" if kinds == {WORDS[NAN]} else "overflow"
        return f"{only} {place}{',' if covered else ''}{covered.replace(' that', ' of those that')}: {fault} there."

    def _whose(self) -> str:
        """Say whose batch it was, if that is known, or why it is not."""
        if not self.gathered:
            return ""
        if self.ranks == 1:
            is_nan = {each.kinds for each in self.bad} == {WORDS[NAN]}
            return "Look at the batch." if is_nan and self._are_all_bad() else ""
        on = self._ranks_with_bad()
        if len(on) == self.ranks:
            return "On all ranks: if these are sums over ranks, it may have been the batch of any."
        if any(each.is_shared for each in self.bad):
            return f"Only on {rank_names(on)}, but these are sums over ranks: it may have been the batch of any."
        if self.not_covered:
            return ""
        whose = "its batch, or what only it holds" if len(on) == 1 else "their batches, or what only they hold"
        return f"Only {rank_names(on)}: look at {whose}."

    def _are_all_bad(self) -> bool:
        return len(self.bad) == self.checked > 1

    def _ranks_with_bad(self) -> list[int]:
        return sorted({each.rank for each in self.bad})

    def __str__(self) -> str:
        when = "The last skip" if self.update is None else f"The last skip, at update {self.update}"
        known = [self.conclusion] if self.conclusion else []
        if self.update is None and not self.pending:
            lines = ["No step was skipped."]
        elif self.spikes and not self.bad:
            lines = [f"{when}: {', '.join(map(str, self.spikes))}.", *known]
        elif not self.bad:
            nobody = "any rank." if self.gathered else "this rank; ask with gather=True."
            lines = [f"{when}: nothing known on {nobody}", *known]
        else:
            where = rank_names(self._ranks_with_bad())
            where = where if self.gathered else f"{where}, the only one asked"
            lines = [f"{when}: {count_of(len(self.bad), 'bad gradient')} on {where}.", *known, *self._table()]
            lines += [f"Another optimizer: {spike}." for spike in self.spikes]
        return "\n".join([*lines, *(f"Not covered: {text}." for text in self.not_covered)])

    def _table(self) -> list[str]:
        """Return the table's lines: one for what several ranks hold alike, by kind, and a count of the rest."""
        held_by: dict[tuple[str, str, int], list[int]] = {}
        for each in self.bad:
            held_by.setdefault((each.kinds, one_line(each.name), each.numel), []).append(each.rank)
        found = [key for kind in _sorted_kinds({key[0] for key in held_by}) for key in held_by if key[0] == kind]
        rows = [(ranges(held_by[key]), key[1], key[0], str(key[2])) for key in found[:_MOST_ROWS]]
        lines = table([("rank", "parameter", "holds", "numel"), *rows], "><<>")
        rest = Counter({kind: 0 for kind, *_ in found})
        for key in found[_MOST_ROWS:]:
            rest[key[0]] += len(held_by[key])
        kinds = ", ".join(f"{count} {kind}" for kind, count in rest.items() if count)
        return [*lines, f"... and {rest.total()} more: {kinds}."] if kinds else lines


def _sorted_kinds(kinds: Collection[str]) -> list[str]:
    """Return kinds in the order of tables."""
    order = [*WORDS.values()]
    return sorted(kinds, key=lambda kind: (order.index(kind) if kind in order else len(order), kind))


def _place(names: Collection[str]) -> str:
    """Return the smallest part of a model with these parameters, such as "layers.0-5"; empty if it has no name."""
    paths = [name.split(".") for name in sorted(names)]
    if len(paths) == 1:
        return ".".join(paths[0])
    above = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    below = sorted({path[len(above)] for path in paths if len(path) > len(above)})
    if below and all(map(str.isdecimal, below)):
        which = ranges(map(int, below))
        return f"{'.'.join(above)}.{which}" if above else f"modules {which}"
    if above:
        return f"module {above[0]}" if len(above) == 1 and above[0].isdecimal() else ".".join(above)
    return ", ".join(below) if len(below) <= _MOST_MODULES else ""


class Models:
    """The module that parameters were named by last."""

    def __init__(self) -> None:
        self.last: weakref.ref[nn.Module] | None = None


def overflow_report(
    steps: Steps, counters: Counters, models: Models, model: Model, process_group: Any, home: torch.device, gather: bool
) -> OverflowReport:
    """Return this rank's report, or with `gather` that of all ranks, all of which must call this.

    A rank whose own report raises joins the others first, and their reports contain the error.
    """
    group = ranks.gathering_group(process_group) if gather else None
    rank = ranks.own_rank(process_group)
    try:
        report = _own_report(steps.all(), counters.read(), home, _known_model(steps, models, model), rank)
        if report.pending or report.update:
            report = replace(report, causes=tuple(poisoned_hooks(_last_module(models))))
    except Exception as error:
        if group is not None:
            with suppress(TimeoutError):  # this rank came alone
                _gather(OverflowReport(None, (), False, (f"rank {rank} raised {error_line(error)}",)), group, home)
        raise
    if group is not None:
        report = _gather(report, group, home)
    return replace(report, gathered=gather or not ranks.several_ranks())


def _own_report(
    steps: Sequence[OptimizerStep], counters: Sequence[int], home: torch.device, model: Model, rank: int
) -> OverflowReport:
    # Whether the update that will skip a step is still to come.
    pending = any(flag.item() for step in steps for flag in step["found_inf_per_device"].values())
    update = None if pending else counters[LAST_SKIP] or None
    generation = counters[SKIPPED] if pending else counters[SKIPPED] - 1
    names = names_by_id(model)
    planned: list[Any] = [step for step in steps if step.plan is not None]
    marked = [marks_of(step.plan) for step in planned]
    generations = generations_of(marked, generation)
    bad: list[BadGradient] = []
    spikes: list[Spike] = []
    bad_parameters: list[BadParameter] = []
    checked = 0
    for number, (step, marks, those) in enumerate(zip(planned, marked, generations, strict=True)):
        kinds = marks.of(those)
        held = _held_by(step)
        named = [
            names.get(id(held.get(index)), f"optimizer {number}, parameter {index}")
            for index in range(len(step.plan.ids))
        ]
        for index in sorted(kinds):
            parameter = held.get(index)
            numel = 0 if parameter is None else local_tensor(parameter).numel()
            is_shared = parameter is None or is_distributed(parameter)
            bad.append(BadGradient(named[index], WORDS[kinds[index]], numel, rank, is_shared))
        if kinds:
            checked += len({index for layout in step.plan.layouts for index in layout.positions} | kinds.keys())
        if pending or update:
            bad_parameters += [BadParameter(named[index], kind, rank) for index, kind in _not_finite(held).items()]
        window = step.notes.get("window")
        found = [] if window is None else map(window.spike, sorted(those))
        spikes += [Spike(*each) for each in found if each is not None]
    uncovered = {text for step in planned if pending or update for text in marks_of(step.plan).not_covered(home)}
    return OverflowReport(
        update, tuple(bad), False, tuple(sorted(uncovered)), pending, tuple(spikes), checked, 1, tuple(bad_parameters)
    )


def _known_model(steps: Steps, models: Models, model: Model) -> Model:
    """Return the given model, or the module that was given last: to a report, or else to a clip under FSDP1."""
    if isinstance(model, nn.Module):
        models.last = weakref.ref(model)
    if model is not None:
        return model
    kept = [step.plan.notes.get("replicas") for step in steps.all() if step.plan is not None]
    given = [models.last, *(each[0][1] for each in kept if each is not None)]
    return next((found for each in given if each is not None and (found := each()) is not None), None)


def _last_module(models: Models) -> nn.Module | None:
    return None if models.last is None else models.last()


def _not_finite(held: Mapping[int, Tensor]) -> dict[int, str]:
    """Wait for the device, and return which of these parameters are not finite, and what they hold."""
    found: dict[int, str] = {}
    for indices, largest in largest_by_kind(held).values():
        for index, number in zip(indices, largest.tolist(), strict=True):
            if not math.isfinite(number):
                found[index] = WORDS[NAN if math.isnan(number) else INF]
    return dict(sorted(found.items()))


def _held_by(step: OptimizerStep) -> dict[int, Tensor]:
    """Return the parameters of a step's plan that its optimizer still holds, by their numbers."""
    owner = step.owner()
    held = [each for group in owner.param_groups for each in group["params"]] if owner is not None else ()
    ids = [] if step.plan is None else step.plan.ids
    return {index: each for index, (each, known) in enumerate(zip(held, ids, strict=False)) if id(each) == known}


def _gather(own: OverflowReport, group: Any, home: torch.device) -> OverflowReport:
    """Return the report with the findings of every rank of `group`, all of which must call this."""
    whole = asdict(own)
    mine = json.dumps(
        {name: whole[name] for name in ("bad", "bad_parameters", "not_covered", "checked", "causes")}
    ).encode()
    every = [json.loads(data) for data in ranks.gather_bytes("overflow_report(gather=True)", mine, group, home)]
    return replace(
        own,
        bad=tuple(BadGradient(**each) for one in every for each in one["bad"]),
        bad_parameters=tuple(BadParameter(**each) for one in every for each in one["bad_parameters"]),
        not_covered=tuple(sorted({text for one in every for text in one["not_covered"]})),
        checked=sum(one["checked"] for one in every),
        causes=tuple(sorted({text for one in every for text in one.get("causes", ())})),
        ranks=len(every),
    )


def names_by_id(model: Model) -> dict[int, str]:
    """Return parameters' names by their ids, without the parts that wrappers add; TypeError if `model` is no Model."""
    named = named_parameters(model) if isinstance(model, nn.Module) else () if model is None else model
    if not isinstance(named, Iterable):
        raise TypeError(f"{_NO_NAMES}, got {type(named).__name__}")
    names = {}
    for pair in named:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise TypeError(f"{_NO_NAMES}, got {type(pair).__name__} for a name and a tensor")
        name, parameter = pair
        if not isinstance(name, str):  # such as a number from `enumerate`
            raise TypeError(f"{_NO_NAMES}, got {type(name).__name__} for a name")
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        names[id(parameter)] = name
    return names


def named_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's parameters by name: those that optimizers hold, also while modules hold others.

    From forward until the end of backward, FSDP2's modules may hold unsharded parameters instead; from the first
    forward on, those of DDP over tensor parallel hold DTensors over its parameters' memory.
    """
    shards = _fsdp2_shards(model) if "torch.distributed.fsdp" in sys.modules else {}
    for name, parameter in model.named_parameters():
        yield name, shards.get(id(parameter), parameter)
    by_ddp = [each for module in model.modules() for each in getattr(module, "_module_parameters", ())]
    at = {each.data_ptr(): each for each in by_ddp if hasattr(each, DDP_SPEC)}
    for path, module in model.named_modules() if at else ():
        for name, held in vars(module).items():
            if is_dtensor(held) and local_tensor(held).data_ptr() in at:
                yield f"{path}.{name}", at[local_tensor(held).data_ptr()]


def _fsdp2_shards(model: nn.Module) -> dict[int, Tensor]:
    """Return FSDP2's sharded parameters by the ids of the modules' current ones; empty if this torch lacks the API."""
    try:
        from torch.distributed._composable_state import _get_module_state

        shards: dict[int, Tensor] = {}
        for module in model.modules():
            state: Any = _get_module_state(module)
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for param in chain.from_iterable(group.fsdp_params for group in groups if group is not None):
                place = param._module_info
                shards[id(getattr(place.module, place.param_name))] = param.sharded_param
        return shards
    except (ImportError, AttributeError):
        return {}
