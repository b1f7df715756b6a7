"""What the kernel tests share: where they run, guarded tensors, torch's answers, bitwise comparison.

The same tests run natively on a GPU, and under Triton's interpreter on CPU tensors where there is none; every
launch made through `launched` says which of the two it was.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from helpers import assert_same
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from scaler_triton.kernels import abi
from scaler_triton.kernels.config import CANDIDATES, DEFAULT, LaunchConfig
from scaler_triton.kernels.launch import INTERPRETED, Launch
from scaler_triton.kernels.table import GradTable

# A target of `aot_matrix`: the kernels run as compiled for it, on the simulator.
SIMULATED = os.environ.get("SCALER_TRITON_SIMULATE")
NATIVE = not INTERPRETED and SIMULATED is None
DEVICE = torch.device("cuda:0" if NATIVE else "cpu")
# What only a GPU can get wrong, and not each time, is tried with many tensors, and often; not under a tool, where each
# is a slow allocation.
MANY = 500 if NATIVE else 8
TRIES = 20 if NATIVE and "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ else 1
KERNEL_CLASS = InterpretedFunction if INTERPRETED else JITFunction

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# A chunk of a few hundred elements: many chunks and steps in tensors that the interpreter walks quickly.
SMALL = LaunchConfig(num_warps=1, vectors=1, unroll=2)
# What a program may be like. To compile all of that takes a minute: `make simulate` does.
THOROUGH = os.environ.get("CONFIGS") == "all"
CONFIGS = CANDIDATES if THOROUGH else [DEFAULT]
GUARD = 16
OFFSETS = [0, 1, 3, 8]  # of a tensor's start from a 16-byte boundary, in elements
NAN, INF = float("nan"), float("inf")

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def launched(*names: str) -> Iterator[None]:
    """Asserts that exactly these kernels are launched, by the backend that this process should use."""
    with mock.patch.object(Launch, "__call__", autospec=True, side_effect=Launch.__call__) as started:
        yield
    launches = [call.args[0] for call in started.call_args_list]
    assert [launch._kernel.fn.__name__ for launch in launches] == list(names)
    for launch in launches:
        assert type(launch._kernel) is KERNEL_CLASS
        assert launch._device.type == DEVICE.type


def as_bits(x: Tensor) -> Tensor:
    return x.contiguous().view(_BITS[x.element_size()])


def assert_untouched(got: Tensor, want: Tensor) -> None:
    """Bit for bit, NaN payloads too."""
    assert torch.equal(as_bits(got.cpu()), as_bits(want.cpu()))


class Guarded:
    """A tensor `offset` elements past a 16-byte boundary, NaN all around it: who reads there flags it."""

    def __init__(self, values: Tensor, offset: int = 0) -> None:
        place = slice(GUARD + offset, GUARD + offset + values.numel())
        self.start = torch.full((place.stop + GUARD,), NAN, dtype=values.dtype)
        self.values = self.start[place]  # what the tensor holds at first, on the CPU
        self.values.copy_(values)
        self.buffer = self.start.to(DEVICE, copy=True)
        self.tensor = self.buffer[place]
        assert self.buffer.data_ptr() % 16 == 0

    def assert_holds(self, want: Tensor) -> None:
        """The tensor holds `want`, and nothing around it was written."""
        assert_same(self.tensor, want)
        self.tensor.copy_(self.values)
        assert_untouched(self.buffer, self.start)


def finite_values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Finite values over the whole range of `dtype`: random bit patterns, subnormals and both zeros included."""
    generator = torch.Generator().manual_seed(seed)
    end = 2 ** (8 * dtype.itemsize - 1) - 1
    raw = torch.randint(-end - 1, end, (numel,), generator=generator)
    values = raw.to(_BITS[dtype.itemsize]).view(dtype)
    values = torch.where(values.isfinite(), values, torch.full_like(values, 1.5))
    info = torch.finfo(dtype)
    for place, special in enumerate((info.max, -info.max, info.tiny, info.tiny / 2, -0.0)):
        values[place::11] = special
    return values


def with_a_signalling_nan(values: Tensor) -> Tensor:
    """Copies of the values, one of which conversions to fp32 and back would leave a quiet NaN."""
    values = values.clone()
    values[3] = INF
    as_bits(values)[3] += 1
    return values


def edge_numels(dtype: torch.dtype) -> list[int]:
    """Sizes at which something begins or ends: none, one vector, one chunk; and one far from all."""
    vector, chunk = 16 // dtype.itemsize, SMALL.chunk_elements(dtype.itemsize)
    return [0, 1, vector - 1, vector, vector + 1, chunk - 1, chunk, chunk + 1, 1009]


def every_shape(dtype: torch.dtype, values: Callable[..., Tensor] = finite_values) -> list[Guarded]:
    """A tensor of such values for each size and offset."""
    shapes = [(numel, offset) for numel in edge_numels(dtype) for offset in OFFSETS]
    return [Guarded(values(numel, dtype, seed), offset) for seed, (numel, offset) in enumerate(shapes)]


def expected_bits(values: Tensor) -> int:
    return abi.NAN * int(values.isnan().any()) + abi.INF * int(values.isinf().any())


def expected_unscale(values: list[Tensor], inv_scale: Tensor) -> tuple[list[Tensor], Tensor]:
    """torch's own gradients and flag, computed on the CPU."""
    grads = [value.clone() for value in values]
    found_inf = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    return grads, found_inf


def inverse_of(scale: Tensor) -> Tensor:
    """The inverse that torch's scaler takes."""
    return scale.double().reciprocal().float()


def make_table(grads: list[Guarded], dtype: torch.dtype, config: LaunchConfig = SMALL) -> GradTable:
    table = GradTable([grad.tensor.numel() for grad in grads], dtype, DEVICE, config)
    # An empty tensor has no address: 0, as a parameter without a gradient has.
    table.set_addresses(tuple(grad.tensor.data_ptr() for grad in grads))
    table.grads = grads  # an address keeps nothing alive
    return table


class PastInt32:
    """A tensor of more than 2^31 elements, 4 GiB of which a CPU ever touches only the ends.

    Attributes:
        table: of it, cut down to the first chunk, which also has the last elements' edge, and the last two.
        before: what these two hold at first, on the CPU; the first is 0.
    """

    def __init__(self) -> None:
        numel, dtype, head = 2**31 + 12345, torch.float16, 7  # elements before the first 16-byte boundary
        self.grad = torch.empty(numel + 1, dtype=dtype, device=DEVICE)[1:]
        self.table = table = GradTable([numel], dtype, DEVICE)
        ends = torch.tensor([0, table.n_chunks - 2, table.n_chunks - 1], device=DEVICE)
        table.chunk_tensors, table.chunk_indices = table.chunk_tensors[ends], table.chunk_indices[ends]
        table.n_chunks = 3
        table.set_addresses((self.grad.data_ptr(),))
        chunk = DEFAULT.chunk_elements(dtype.itemsize)
        self.grad[: head + chunk] = 0.0
        late = head + int(table.chunk_indices[1]) * chunk
        self._visited, self._beside = self.grad[late:], self.grad[late - 500 : late]
        self.grad[late - 500 :] = finite_values(numel - late + 500, dtype, seed=1).to(DEVICE)
        self.grad[-9000] = INF
        self.before, self._kept = (part.to("cpu", copy=True) for part in (self._visited, self._beside))

    def assert_holds(self, want: Tensor) -> None:
        """The last two chunks hold `want`, and what lies beside them was not written."""
        assert_same(self._visited, want)
        assert_same(self._beside, self._kept)


@contextmanager
def guarded_flag() -> Iterator[Tensor]:
    """A cleared flag; what lies beside it must not be written."""
    flags = torch.tensor([NAN, 0.0, NAN], device=DEVICE)
    yield flags[1]
    assert flags.isnan().tolist() == [True, False, True]
