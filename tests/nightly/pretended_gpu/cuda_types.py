"""The types that torch.cuda's streams, events, graphs and properties are made of."""

import time
import warnings

from torch._C import Stream as TorchStream
from torch._C import _pretended_gpu as gpu


def install(C):
    """Put them into torch._C."""
    C._CudaStreamBase, C._CudaEventBase, C._CUDAGraph, C._CudaDeviceProperties = Stream, Event, Graph, Properties


class Stream(TorchStream):
    """A number: work is done in the order in which it is given, whatever the stream."""

    def __new__(cls, priority=0, stream_id=None, device_index=None, stream_ptr=None, **kwargs):
        number = stream_ptr if stream_id is None else stream_id  # the first of `torch.cuda.ExternalStream`
        number = gpu.new_stream() if number is None else number
        index = gpu.current_gpu() if device_index is None else device_index
        return super().__new__(cls, stream_id=number, device_index=index, device_type=1)

    def __init__(self, *args, **kwargs):
        pass

    @property
    def cuda_stream(self):
        return self.stream_id

    def query(self):
        return True

    def synchronize(self):
        gpu.wait_for_gpu("stream")

    def __eq__(self, other):
        return (self.stream_id, self.device_index) == (other.stream_id, other.device_index)

    def __hash__(self):
        return hash((self.stream_id, self.device_index))


class Event:
    """A place in the order of work: copies that began before may still be under way."""

    _number, _is_captured = 0, False  # the operation that is waited for: none yet
    _gpu = None  # where it was first recorded, for good

    def __new__(cls, **kwargs):
        return super().__new__(cls)

    def record(self, stream=None):
        here = gpu.current_gpu() if stream is None else stream.device_index
        self._gpu = here if self._gpu is None else self._gpu
        if self._gpu != here:
            raise RuntimeError(f"Event device {self._gpu} does not match recording stream's device {here}.")
        self._at, self._number, self._is_captured = time.perf_counter(), gpu.tick(), gpu.is_capturing()

    def wait(self, stream=None):
        pass

    def query(self):
        self._refuse_captured()
        return gpu.has_landed(self._number)

    def synchronize(self):
        self._refuse_captured()
        gpu.note("cudaEventSynchronize", True)
        gpu.land(self._number)

    def _refuse_captured(self):
        if self._is_captured:
            raise RuntimeError("CUDA error: operation not permitted on an event that was recorded in a capture")

    def elapsed_time(self, end):
        return (end._at - self._at) * 1e3


class Graph:
    """What was captured, to be replayed."""

    def __new__(cls, keep_graph=False):
        return super().__new__(cls)

    def capture_begin(self, *args, **kwargs):
        gpu.begin_capture()

    def capture_end(self):
        self._work = gpu.end_capture()
        if self._work.is_empty:
            warnings.warn("The CUDA Graph is empty.", stacklevel=2)

    # From torch 2.14 on its own class ends a capture by these.
    capture_end_pre = capture_end
    _has_graph_exec = True
    instantiate = capture_end_post = lambda self: None

    def replay(self):
        gpu.replay(self._work)

    def register_generator_state(self, generator):
        pass


class Properties:
    """An H100's, but for a cache that is quickly filled."""

    name = "Pretended H100"
    major, minor = 9, 0
    multi_processor_count = 132
    warp_size = 32
    total_memory = 80 << 30
    L2_cache_size = 1 << 20
    max_threads_per_multi_processor = 2048
    shared_memory_per_block_optin = 227 << 10
    regs_per_multiprocessor = 65536
