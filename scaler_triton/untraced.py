"""Keeps torch.compile from tracing into a scaler, whose plans hold weak references and addresses."""

from __future__ import annotations

from contextlib import suppress
from types import FunctionType

REASON = "a scaler runs beside compiled code, not in it; compiled callers have scaler_triton.ops"


def skip_tracing(cls: type) -> None:
    """Have every method of a class and of its bases in this package run uncompiled, with all that it calls.

    Equivalent PyTorch: `torch.compiler.disable` on each, but without a wrapper in every call and without importing
    Dynamo. What is compiled itself, such as an optimizer's step, runs compiled within them, too. Methods with names
    such as `__init__` are left out: Dynamo treats those specially.
    """
    for base in cls.__mro__:
        if base.__module__.startswith("scaler_triton."):
            for name, member in vars(base).items():
                if isinstance(member, FunctionType) and not name.startswith("__"):
                    _mark(member)


def _mark(function: FunctionType) -> None:
    """Mark a function as `torch._dynamo.skip` does, recursively: Dynamo is off until its frame returns."""
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=REASON)
    with suppress(ImportError):  # private to torch, and needed only for torch.compile
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
