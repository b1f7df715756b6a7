"""What torch._C has only where torch is built with CUDA: torch.cuda finds it here."""

import importlib.util
import os

CUDA = "13.0"
CUDA_TYPE = 1  # as a device's type
CONSTANT = {  # bindings that always return the same
    "_cuda_hasPrimaryContext": True,
    "_cuda_isInBadFork": False,
    "_cuda_getArchFlags": "sm_90",
    "_cuda_getCompiledVersion": 13000,
    "_cuda_canDeviceAccessPeer": False,
    "_cuda_getAllocatorBackend": "native",
    "_cuda_cudaCachingAllocator_is_enabled": True,
    "_graph_pool_handle": (0, 1),
}
IDLE = ["emptyCache", "sleep", "ipc_collect", "resetPeakMemoryStats", "clearCublasWorkspaces"]
DUMMIES = [  # types and functions that are only imported
    "_MemPool", "_cuda_CUDAAllocator", "_cuda_CUDAAllocator_AllocatorState", "_cuda_beginAllocateToPool",
    "_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool",
]  # fmt: skip


def install(C):
    """Fill torch._C, and tell torch which CUDA it was built with."""
    spec = importlib.util.spec_from_file_location("pretended_gpu", os.environ["PRETENDED_GPU"])
    gpu = C._pretended_gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu)
    gpu.set_gpu_count(_count())
    import torch.version

    from pretended_gpu import cuda_types

    torch.version.cuda = CUDA
    cuda_types.install(C)
    C._has_cuda = True
    C._cudart = object()
    C._host_emptyCache = lambda: None
    for name, function in _bindings(gpu).items():
        setattr(C, f"_cuda_{name}", function)
    for name, value in CONSTANT.items():
        setattr(C, name, lambda *args, value=value: value)
    for name in IDLE:
        setattr(C, f"_cuda_{name}", lambda *args: None)
    for name in DUMMIES:
        setattr(C, name, type(name, (), {}))


def _bindings(gpu):
    """What torch.cuda asks, answered by the library."""
    return {
        "init": lambda: _on_first_use(gpu),
        "getDeviceCount": _count,
        "getDevice": gpu.current_gpu,
        "setDevice": gpu.exchange_gpu,
        "exchangeDevice": lambda device: gpu.exchange_gpu(device),  # Dynamo tells these two apart
        "maybeExchangeDevice": lambda device: gpu.exchange_gpu(device),
        "getDefaultStream": lambda device: (0, device, CUDA_TYPE),
        "getCurrentStream": lambda device: (gpu.current_stream(device), device, CUDA_TYPE),
        "getCurrentRawStream": gpu.current_stream,
        "setStream": lambda stream_id, device_index, device_type: _set_stream(gpu, stream_id, device_index),
        "isCurrentStreamCapturing": gpu.is_capturing,
        "synchronize": lambda: gpu.wait_for_gpu("synchronize"),
        "get_sync_debug_mode": gpu.sync_mode,
        "set_sync_debug_mode": gpu.set_sync_mode,
        "memoryStats": lambda device: {"allocated_bytes": {"all": {"current": gpu.allocated_bytes(device)}}},
    }


def _set_stream(gpu, stream_id, device):
    gpu.exchange_gpu(device)  # as torch does
    gpu.set_stream(stream_id, device)


def _count():
    """One, unless the process says which it wants to see, such as "0,1"."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return len(seen.split(",")) if seen else 0


def _on_first_use(gpu):
    """What torch itself sets up at its first use of the GPU, and storages, whose own methods know no CUDA."""
    import torch

    from pretended_gpu.cuda_types import Properties

    torch.cuda._get_device_properties = lambda device: Properties()
    # torch.manual_seed also seeds them: the CPU's is used.
    torch.cuda.default_generators = tuple(torch.Generator() for _ in range(_count()))
    storage = torch.UntypedStorage
    storage.resize_ = _with_gpu(storage.resize_, gpu.resize_storage)
    storage.clone = _with_gpu(storage.clone, lambda over: over.clone().untyped_storage())
    storage.to = _to_gpu(storage.to)


def _over(storage):
    """A tensor over all bytes of a storage."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _with_gpu(method, on_gpu):
    """`method` of storages, or for those of the GPU a function of a tensor over all their bytes."""

    def either(storage, *args):
        on_cpu = storage.device.type != "cuda"
        return method(storage, *args) if on_cpu else on_gpu(_over(storage), *args) or storage

    return either


def _to_gpu(method):
    """`method` of storages, `to`, which makes none on a GPU: torch.load asks it for those that were saved there."""

    def to(storage, *, device, **options):
        if not str(device).startswith("cuda"):
            return method(storage, device=device, **options)
        return _over(storage).to(device, copy=True, **options).untyped_storage()

    return to
