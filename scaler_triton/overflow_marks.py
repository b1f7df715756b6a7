"""OverflowMarks: which gradients held NaN or Inf, as kernels and the CPU's path recorded it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scaler_triton.batch import Batch, Layout
from scaler_triton.cuda_graphs import refuse_capture
from scaler_triton.stats import SKIPPED

if TYPE_CHECKING:
    from scaler_triton.kernels.table import GradTable

NAN, INF = 1, 2
# The layout of a mark: the kinds in the low bits, the generation above.
_KIND_BITS, _KINDS = 2, NAN | INF
# How many generations the host keeps: the last skip's, and later ones.
_GENERATIONS = 4

# Parameters by index (below 0: none), and for each a row of marks, as in `GradTable.bits`.
_Marks = tuple[Sequence[int], Tensor]


class OverflowMarks:
    """Which of one optimizer's gradients held NaN or Inf, each with a generation: the number of skips before.

    Kernels write marks on the device, where they read the generation from the counters; good steps write nothing.
    Parameters are given by their index.

    Args:
        size: how many parameters there are.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._on_host: dict[int, dict[int, int]] = {}  # kinds found on the CPU, by generation and parameter
        self._counters: Tensor | None = None  # the scaler's, on the device
        self._generation: Tensor | None = None  # the skip count, a view of them: int32, one element
        self._layouts: Sequence[Layout] = ()
        self._archived: dict[torch.device, Tensor] = {}  # marks from the tables of replaced layouts
        self._replayed: list[_Marks] = []  # tables of such layouts that graphs still write
        self._unmarked: set[torch.device] = set()  # where kernels check gradients without a mark

    def track(self, layouts: Sequence[Layout]) -> None:
        """Use the tables of these layouts from now on; archive the marks in those before."""
        if self._layouts:
            for positions, bits in [*self._marked()]:
                self._archive(positions, bits)
        self._replayed = [*self._in_graphs()]
        self._layouts = layouts
        self._set_generation()

    def prepare(self, layout: Layout, counters: Tensor | None) -> None:
        """Prepare for a kernel that checks a batch.

        Args:
            layout: the batch's; that of sparse and Partial gradients is not tracked.
            counters: the scaler's, on the batch's device; None if they are on another.
        """
        if counters is not None and self._counters is not counters:
            self._counters = counters
            self._generation = counters.view(torch.int32)[::2][SKIPPED : SKIPPED + 1]  # the low words of int64
            self._set_generation()
        if layout.generation is None:
            self._unmarked.add(layout.key.device)

    def _set_generation(self) -> None:
        for layout in self._layouts:
            layout.generation = None  # kernels cannot read another GPU's memory
            if self._generation is not None and self._generation.device == layout.key.device:
                layout.generation = self._generation

    def mark_on_host(self, batch: Batch, generation: int) -> None:
        """Mark the gradients of a batch on the CPU that are not finite."""
        seen = self._on_host.setdefault(generation, {})
        if len(self._on_host) > _GENERATIONS:
            del self._on_host[min(self._on_host)]
        for position, tensor in zip(batch.layout.positions, batch.tensors, strict=True):
            if tensor is not None and (kinds := _kinds_in(tensor)):
                seen[position] = seen.get(position, 0) | kinds

    def of(self, generation: int) -> dict[int, int]:
        """Return the kinds that made steps of this generation skip, by parameter, waiting for the device."""
        kinds = {**self._on_host.get(generation, {})}
        for positions, bits in self._marked():
            for position, row in zip(positions, bits.tolist(), strict=True):
                for each in row:
                    if position >= 0 and each & _KINDS and each >> _KIND_BITS == generation:
                        kinds[position] = kinds.get(position, 0) | each & _KINDS
        return kinds

    def untold(self) -> Iterator[str]:
        """Yield descriptions of gradients that were checked without marks."""
        for layout in self._layouts:
            device = layout.key.device
            if "torch" in layout.backends.values() and (device.type != "cpu" or not layout.key.plain):
                yield f"gradients on {device} that torch's own op serves"
        for device in self._unmarked:
            if self._generation is not None and self._generation.device == device:
                yield f"sparse and Partial gradients on {device}"
            else:
                yield f"gradients on {device}, where the scale is not"

    def forget(self) -> None:
        """Clear all marks."""
        self._on_host = {}
        for _, bits in self._marked():
            bits.zero_()

    def copy_from(self, other: OverflowMarks, places: Mapping[int, int]) -> None:
        """Copy another plan's marks.

        Args:
            places: the index here of each parameter there that both have.
        """
        self._on_host = {
            generation: {places[position]: kinds for position, kinds in seen.items() if position in places}
            for generation, seen in other._on_host.items()
        }
        self._unmarked |= other._unmarked
        for positions, bits in _moved(other._marked(), places):
            self._archive(positions, bits)
        self._replayed += _moved(other._in_graphs(), places)

    def _marked(self) -> Iterator[_Marks]:
        """Yield all marks on devices."""
        for positions, table in self._tables():
            yield positions, table.bits
        for kept in self._archived.values():
            yield range(self._size), kept
        yield from self._replayed

    def _in_graphs(self) -> Iterator[_Marks]:
        """Yield those of `_marked` that graphs write at every replay."""
        yield from self._replayed
        yield from ((positions, table.bits) for positions, table in self._tables() if table.is_in_a_graph)

    def _tables(self) -> Iterator[tuple[Sequence[int], GradTable]]:
        for layout in self._layouts:
            for table in {id(table): table for table in layout.tables.values()}.values():
                yield layout.positions, table

    @torch.inference_mode(False)
    def _archive(self, positions: Sequence[int], bits: Tensor) -> None:
        """Keep a table's marks after the table was replaced."""
        refuse_capture(bits.device, "a step with gradients of a new form")
        if bits.device not in self._archived:
            self._archived[bits.device] = bits.new_zeros(self._size, bits.shape[1])
        kept, ours = self._archived[bits.device], [place for place, position in enumerate(positions) if position >= 0]
        target = torch.tensor([positions[place] for place in ours], device=bits.device, dtype=torch.int64)
        source = bits[torch.tensor(ours, device=bits.device, dtype=torch.int64)]
        held = kept[target]
        same_generation = (held ^ source) <= _KINDS
        kept[target] = torch.where(same_generation, held | source, torch.maximum(held, source))  # the later one


def _moved(marks: Iterable[_Marks], places: Mapping[int, int]) -> Iterator[_Marks]:
    """Yield marks with parameters renumbered by `places`; -1 for those that it lacks."""
    for positions, bits in marks:
        yield [places.get(position, -1) for position in positions], bits


def _kinds_in(tensor: Tensor) -> int:
    return (NAN if tensor.isnan().any() else 0) | (INF if tensor.isinf().any() else 0)
