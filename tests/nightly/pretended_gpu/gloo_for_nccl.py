"""Process groups over NCCL are made over gloo."""

import functools


def install(c10d):
    """Replace the function that makes the default group."""
    init = c10d.init_process_group

    @functools.wraps(init)
    def init_process_group(backend=None, *args, **kwargs):
        return init(backend and str(backend).replace("nccl", "gloo"), *args, **kwargs)

    c10d.init_process_group = init_process_group
