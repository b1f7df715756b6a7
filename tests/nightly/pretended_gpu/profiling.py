"""torch.profiler as a machine with CUPTI has it: it sees what the GPU is given, when, and what waits for it."""

import json
from types import SimpleNamespace

import torch
from torch.autograd import DeviceType

HOST = "cuda_runtime"


def install(module):
    """Give torch.profiler a `profile` of ours, and a `record_function` that it is told of."""
    import torch.autograd.profiler as below

    module.profile = Profile
    Profile.marks = []

    class RecordFunction(below.record_function):
        def __enter__(self):
            self.begin = torch._C._pretended_gpu.now()
            return super().__enter__()

        def __exit__(self, *error):
            Profile.marks.append(_event(self.name, "user_annotation", self.begin, torch._C._pretended_gpu.now()))
            return super().__exit__(*error)

    below.record_function = module.record_function = RecordFunction


class Profile:
    """What is used here of `torch.profiler.profile`."""

    def __init__(self, activities=None, acc_events=False):
        self.profiler = SimpleNamespace(_function_events=None)

    def start(self):
        Profile.marks.clear()
        torch._C._pretended_gpu.take_notes(True)

    def stop(self):
        torch._C._pretended_gpu.take_notes(False)
        self._notes = torch._C._pretended_gpu.notes()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error):
        self.stop()

    def events(self):
        return [
            SimpleNamespace(name=name, device_type=DeviceType.CUDA) for name, kind, *_ in self._notes if kind != HOST
        ]

    def export_chrome_trace(self, path):
        events = list(Profile.marks)
        for number, (name, kind, begin, end) in enumerate(self._notes):
            events.append(_event(name, kind, begin, end, number))
            if kind != HOST:
                events.append(_event("cudaLaunchKernel", HOST, begin, begin, number))
        with open(path, "w") as file:
            json.dump({"traceEvents": events}, file)


def _event(name, kind, begin, end, correlation=-1):
    return {
        "ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin, "args": {"correlation": correlation}
    }  # fmt: skip
