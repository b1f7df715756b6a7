"""Spikes: which norms of gradients are so large that a guard skips their step, by the rule that `StepGuard` states.

The decision is made in fp64 and without a host wait, with the same bits by `kernels/spike.py`, by Python and NumPy on a
window in the CPU's memory, and by torch's ops elsewhere.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from scaler_triton.clipping.norm import Norm
from scaler_triton.core.dispatch import choose, is_captured, kernels, refuse_capture, sync_allowed
from scaler_triton.core.flag import Flag
from scaler_triton.core.memory import HostCopy
from scaler_triton.core.message import read_sums
from scaler_triton.core.torch_ops import host_memory, wide_dtype
from scaler_triton.kernels import abi
from scaler_triton.text import count_of

if TYPE_CHECKING:
    from scaler_triton.core.ranks import Ranks
    from scaler_triton.core.update import Counters


class Guard:
    """What makes a scaler a guard, whose gradients are not scaled: its numbers, and a checkpoint's windows.

    Args:
        sigma: how many standard deviations above the mean a norm may be; None: any norm that is finite is good.
        length: the number of norms in a window.
    """

    def __init__(self, sigma: float | None, length: int, norms: Iterable[Sequence[float]] = ()) -> None:
        self.sigma, self.length = sigma, length
        self._loaded = [*norms]  # for windows that are still to be made, in their order
        # By id; those that steps still hold, in the order in which they were made, which is that of a checkpoint.
        self._windows: weakref.WeakValueDictionary[int, Window] = weakref.WeakValueDictionary()

    def numbers(self) -> tuple[float | None, int, list[list[float]]]:
        """Return what makes an equal guard, with the norms of all windows; waits for the device."""
        held = [window.norms() for window in self._windows.values()]
        return self.sigma, self.length, [*held, *map(list, self._loaded)]

    def restore(self, norms: Sequence[Sequence[float]]) -> None:
        """Replace the norms of the windows, in the order in which their optimizers were first checked."""
        self._loaded = [*norms]
        for window in self._windows.values():
            window.restore(self._loaded.pop(0) if self._loaded else [])

    def windows(self) -> list[Window]:
        """Return the windows of the optimizers that were judged, in the order in which they were made."""
        return list(self._windows.values())

    def newest(self) -> dict[str, float]:
        """Return `norm` and `limit` of the last judged step, as far as they are on the host; numbered for several."""
        known = [last for window in self.windows() if (last := window.newest()) is not None]
        found: dict[str, float] = {}
        for number, (norm, limit) in enumerate(known):
            behind = f"_{number}" if len(known) > 1 else ""
            found |= {f"norm{behind}": norm, f"limit{behind}": limit}
        return found

    def described(self) -> list[str]:
        """Return what each window knows, those included whose optimizers have not stepped since a checkpoint."""
        loaded = [held(min(len(norms), self.length)) for norms in self._loaded]
        return [*(window.described() for window in self.windows()), *loaded] or [held(0)]

    def new_window(self, device: torch.device, requested: str) -> Window:
        """Return a new window on `device`."""
        made = Window(self.sigma or 0.0, self.length, device, requested)
        if self._loaded:
            made.restore(self._loaded.pop(0))
        self._windows[id(made)] = made
        return made


class Window:
    """The last finite norms of one optimizer's gradients, or of those that are clipped with it, on the scale's device.

    A spike enters as its limit: its own norm would lift the limit of the next `length` steps, and let their spikes
    pass. The norm of the current step enters only when the next one is judged, as this one may be judged again.
    """

    def __init__(self, sigma: float, length: int, device: torch.device, requested: str) -> None:
        refuse_capture(device, "a guard's first step")
        self.length, self._sigma = length, sigma
        self.fewest = max(2, length // 2)  # norms, by which one is judged
        with torch.inference_mode(False):  # later steps write it outside that mode
            self.memory = torch.zeros(abi.HEADER + length, dtype=wide_dtype(device), device=device)  # see `kernels.abi`
            self._places = torch.arange(1 << (length - 1).bit_length(), device=device)
        is_plain = type(self.memory) is Tensor  # not one of torch's fake tensors
        self.by_kernel = is_plain and choose(device, torch.float32, requested, task="guarding") == "triton"
        self._on_host: Any = None  # memory and places as NumPy's
        if is_plain and device.type == "cpu" and not self.by_kernel:
            self._on_host = self.memory.numpy(), self._places.numpy()
        self.copy = HostCopy()  # for `repr` and `metrics`
        self.is_judged = False  # whether a norm of the step that is under way was judged
        self.restore([])

    def judge(self, totals: Tensor, flag: Flag, counters: Counters) -> None:
        """Set the flag and OVERFLOWS if the norm is a spike or not finite; another one of the same step replaces it.

        Args:
            totals: fp64 [TOTALS], on this device: the ranks' sums of what `norm_batch` returns; written.
            flag: its status is written, by the sums if there were several ranks.
            counters: of the scaler; SPIKES is written.
        """
        first, self.is_judged = not self.is_judged, True
        device, ranks = self.memory.device, flag.summed_over or 0
        if self.by_kernel:
            arguments = totals, flag.status, self.memory, counters.on(device), self.length, ranks
            kernels().spike.launch_judge(*arguments, first=first)
            return
        if self._on_host is None:
            self._judge_by_ops(totals, flag.status, counters.on(device), first)
        else:
            self._judge_on_host(host_memory(totals), host_memory(flag.status), counters.on_host(), first)
        if ranks:
            read_sums(flag, totals)

    def _judge_on_host(self, totals: Any, status: Any, counters: Any, first: bool) -> None:
        memory, places = self._on_host
        count, before, was_spike, *_, sigma, _ = memory[: abi.HEADER].tolist()  # in the order of `kernels.abi`
        count = int(count)
        if first and before < math.inf:  # false of NaN
            memory[abi.HEADER + count % self.length] = before
            count += 1
        n, limit = min(count, self.length), math.nan
        if n >= self.fewest:
            with np.errstate(all="ignore"):  # large norms have infinite squares
                limit = float(_limit(np, memory[abi.HEADER :], places, count, n, sigma))
        norm = math.sqrt(totals[abi.SQUARES])
        is_spike = limit < norm < math.inf
        counters[abi.SPIKES] += is_spike - (0 if first else int(was_spike))
        last = limit if is_spike and limit > 0 else norm  # with 0 no norm but 0 would ever be good again
        memory[: abi.SPIKE_NORM] = count, last, is_spike
        if is_spike:
            memory[abi.SPIKE_NORM : abi.SIGMA] = norm, limit, counters[abi.SKIPPED]
        if is_spike or not norm < math.inf:
            totals[abi.OVERFLOWS] = max(totals[abi.OVERFLOWS], 1.0)
            status[abi.FLAG] = 1.0

    def _judge_by_ops(self, totals: Tensor, status: Tensor, counters: Tensor, first: bool) -> None:
        length, ring = self.length, self.memory[abi.HEADER :]
        header = self.memory[: abi.HEADER].unbind()
        count, before, was_spike, *last_spike, sigma, _ = header  # in the order of `kernels.abi`
        count = count.long()
        if first:
            enters, slot = before < math.inf, (count % length).reshape(1)  # false of NaN
            ring.index_copy_(0, slot, torch.where(enters, before, ring[slot]))
            count = count + enters
        n = count.clamp(max=length)
        limit = _limit(torch, ring, self._places, count, n, sigma)
        norm = torch.sqrt(totals[abi.SQUARES])
        is_finite = norm < math.inf
        is_spike = is_finite & (n >= self.fewest) & (norm > limit)
        counters[abi.SPIKES].add_(is_spike.long() if first else is_spike.long() - was_spike.long())
        last = torch.where(is_spike & (limit > 0), limit, norm)  # with 0 no norm but 0 would ever be good again
        spike = norm, limit, counters[abi.SKIPPED]
        kept = [torch.where(is_spike, new, old) for new, old in zip(spike, last_spike, strict=True)]
        self.memory[: abi.SIGMA] = torch.stack([count, last, is_spike, *kept])
        bad = is_spike | ~is_finite
        totals[abi.OVERFLOWS].clamp_(min=bad)
        status[abi.FLAG].masked_fill_(bad, 1.0)

    def newest(self) -> tuple[float, float] | None:
        """Return norm and limit of the step judged last, as they have arrived on the host; never wait on CUDA.

        The limit is infinite while there are too few norms. None: none has arrived, or no step was judged.
        """
        return self._judged(self.copy.newest(self.memory))

    def _judged(self, values: Any) -> tuple[float, float] | None:
        if values is None or values[abi.IS_SPIKE] == abi.NOT_JUDGED:
            return None
        if values[abi.IS_SPIKE]:
            return values[abi.SPIKE_NORM], values[abi.SPIKE_LIMIT]
        norms = values[abi.HEADER :][: int(values[abi.COUNT])]  # without the last one, which is still to enter
        limit = math.inf
        if len(norms) >= self.fewest:
            mean = fmean(norms)
            limit = mean + self._sigma * max(stdev(norms, mean), 1e-3 * mean)
        return values[abi.LAST], limit

    def norms(self) -> list[float]:
        """Return the norms that the next step is judged by, oldest first, waiting for the device."""
        values = self.memory.tolist()
        count, ring = int(values[abi.COUNT]), values[abi.HEADER :]
        oldest = max(0, count - self.length)
        norms = [ring[number % self.length] for number in range(oldest, count)]
        return [*norms, values[abi.LAST]][-self.length :] if math.isfinite(values[abi.LAST]) else norms

    def described(self) -> str:
        """Return norm and limit of the step judged last, as far as `copy` has them."""
        values = self.copy.latest
        judged = self._judged(values)
        if judged is None:
            return held(0 if values is None else min(int(values[abi.COUNT]), self.length))
        norm, limit = judged
        known = f"limit {limit:.4g}" if limit < math.inf else f"no limit before {self.fewest} norms"
        return f"norm {norm:.4g}, {known}"

    def restore(self, norms: Sequence[float]) -> None:
        """Replace the norms by the last of these that the window holds, and forget the last spike."""
        values = [0.0] * (abi.HEADER + self.length)
        values[abi.SIGMA], values[abi.SPIKE_GENERATION] = self._sigma, -1.0
        values[abi.LAST], values[abi.IS_SPIKE] = math.nan, abi.NOT_JUDGED
        kept = list(norms)[-self.length :]
        values[abi.COUNT], values[abi.HEADER : abi.HEADER + len(kept)] = float(len(kept)), kept
        with sync_allowed(self.memory.device):
            self.memory.copy_(torch.tensor(values, dtype=torch.float64, device="cpu"))

    def spike(self, generation: int) -> tuple[float, float] | None:
        """Return norm and limit of the spike of that generation, the number of skips before; None if there is none."""
        if is_captured(self.memory):
            return None
        values = self.memory[: abi.HEADER].tolist()
        return (values[abi.SPIKE_NORM], values[abi.SPIKE_LIMIT]) if values[abi.SPIKE_GENERATION] == generation else None


class Spike(Norm):
    """A norm that is judged once all ranks have agreed on it, by the window of the first optimizer.

    Args:
        window: that window.
        counters: of the guard.
        device, model, guess: as of a `Norm`.
    """

    def __init__(self, window: Window, counters: Counters, device: torch.device, *given: Any, **options: Any) -> None:
        super().__init__(device, *given, **options)
        self._window, self._counters = window, counters

    def judge(self, flags: Sequence[Flag], peers: Ranks | None) -> None:
        """Set the flags if the norm is a spike or not finite."""
        if peers is not None:
            self._window.judge(self.totals, flags[0], self._counters)
        elif checked := [flag for flag in flags if flag.devices()]:
            self._window.judge(self.totals, checked[0], self._counters)


def held(count: int) -> str:
    """Return in words that so many norms came from a checkpoint, and none has been judged by them."""
    return f"{count_of(count, 'norm')} loaded" if count else "no norm yet"


def _limit(lib: Any, ring: Any, place: Any, count: Any, n: Any, sigma: Any) -> Any:
    """Return the largest norm that is good, fp64, after the last `n` of `count` norms that entered a ring.

    Args:
        lib: NumPy or torch, of which `ring` and `place` are arrays.
        place: 0, 1, 2 and so on, at least as many as the ring has places, and a power of 2.
    """
    is_held = place < n
    norms = lib.where(is_held, ring[(place + (count - n)) % len(ring)], 0.0)  # oldest first
    mean = _sum(norms) / n
    apart = lib.where(is_held, norms - mean, 0.0)
    # torch's root on the CPU, where it serves fake tensors only, is one bit off for one number in a hundred.
    deviation = lib.sqrt(_sum(apart * apart) / (n - 1))
    return mean + sigma * lib.maximum(deviation, 1e-3 * mean)


def _sum(values: Any) -> Any:
    """Return the sum of a power of 2 of numbers: of neighbours, then of neighbours among these sums, and so on."""
    while len(values) > 1:
        values = values[::2] + values[1::2]
    return values[0]
