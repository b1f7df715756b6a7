"""Prints, as JSON, what a process sees that has the pretended GPU: what the tests that run there rely on."""

import json
import warnings

import torch


def raised(act):
    """The first words of the error that `act` raises; empty if none."""
    try:
        act()
    except RuntimeError as error:
        return str(error).split(":")[0].split(",")[0]
    return ""


def in_debug_mode(act):
    """The same, where torch is to raise before it waits."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return raised(act)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def replayed():
    """Values before a capture, after it, and after each replay on other inputs."""
    source, graph = torch.ones(2, device="cuda"), torch.cuda.CUDAGraph()
    kept = [source.clone()]
    with torch.cuda.graph(graph):
        doubled = source * 2
        source.add_(doubled)
    kept.append(source.clone())
    for value in (1.0, 5.0):
        source.fill_(value)
        graph.replay()
        kept.append(source.clone())
    return [each[0].item() for each in kept]


def late():
    """A number that is copied to pinned memory: at once, and after its event."""
    to, done = torch.zeros(1, pin_memory=True), torch.cuda.Event()
    to.copy_(torch.ones(1, device="cuda"), non_blocking=True)
    done.record()
    at_once = to.item()
    done.synchronize()
    return at_once, to.item()


def overtaken():
    """What is said of pinned memory that is written while it is copied."""
    buffer = torch.ones(2).pin_memory()
    torch.zeros(2, device="cuda").copy_(buffer, non_blocking=True)
    buffer.fill_(2.0)
    return raised(torch.cuda.synchronize)


def captured_wait():
    """What a capture says of a copy to the host, and at its end, as it holds nothing else."""
    one = torch.ones((), device="cuda")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            said = raised(one.item)
    return said, *(str(each.message) for each in told)


def seen(act):
    """What a profiler sees of `act`."""
    with torch.profiler.profile() as profile:
        act()
    return [event.name for event in profile.events()]


def unscaled(dtype):
    """What torch's op says of finite gradients that fp32 cannot hold: its error, or the flag."""
    flag, inverse = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    gradients = [torch.full((3,), 1e39, dtype=torch.float64, device="cuda").to(dtype)]
    return raised(lambda: torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inverse)) or flag.item()


def stepped_with_other_strides():
    """What a fused optimizer says of a gradient that lies in memory otherwise than its parameter."""
    parameter = torch.ones(2, 3, device="cuda", requires_grad=True)
    parameter.grad = torch.ones(3, 2, device="cuda").t()
    return raised(torch.optim.SGD([parameter], lr=1.0, fused=True).step)


def on_another():
    """Where tensors, events and streams of a second GPU are, and what they say of the first's."""
    first, second = torch.ones(2, device="cuda"), torch.ones(2, device="cuda:1")
    event = torch.cuda.Event()
    event.record()
    with torch.cuda.device(1):
        place = str(torch.ones((), device="cuda").device), torch.cuda.Stream().device_index
        recorded = raised(event.record)
    return {
        "current": place,
        "one operation": raised(lambda: first + second),
        "copied": (first + second.to("cuda:0")).tolist(),
        "event": recorded,
        "beyond": raised(lambda: torch.ones(1, device="cuda:2")),
    }


def main():
    """Print it."""
    ones, here = torch.ones(3, device="cuda"), torch.ones(3)
    pinned = torch.ones(3).pin_memory()
    sparse = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,), device="cuda", check_invariants=True)
    found = {
        "device": str(ones.device),
        "garbage": torch.empty(3, device="cuda").isfinite().all().item() and torch.empty(3, device="cuda")[0].item(),
        "view shares memory": ones[1:].data_ptr() - ones.data_ptr(),
        "coalesced": sparse.coalesce().values().tolist(),
        "mixing": raised(lambda: ones + here),
        "with a number of the CPU": (ones + torch.tensor(1.0)).tolist(),
        "item": in_debug_mode(ones[0].item),
        "pageable copy": in_debug_mode(lambda: ones.copy_(here, non_blocking=True)),
        "pinned copy": in_debug_mode(lambda: ones.copy_(pinned, non_blocking=True)),
        "blocking copy": in_debug_mode(lambda: ones.copy_(pinned)),
        "synchronize": in_debug_mode(torch.cuda.synchronize),
        "late": late(),
        "overtaken": overtaken(),
        "replayed": replayed(),
        "item in a capture": captured_wait(),
        "on another": on_another() if torch.cuda.device_count() > 1 else None,
        "bf16 gradients": unscaled(torch.bfloat16),
        "fp64 gradients": unscaled(torch.float64),
        "other strides": stepped_with_other_strides(),
        "the CPU's generator": raised(lambda: torch.randn(2, device="cuda", generator=torch.Generator())),
        "its own": torch.randn(2, device="cuda", generator=torch.Generator("cuda")).isfinite().all().item(),
        "seen": seen(lambda: (ones * 2)[1:].cpu()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
