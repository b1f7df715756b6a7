"""What torch.compile leaves alone: it does not trace into a scaler, whose plans hold weak references and addresses."""

from __future__ import annotations

from contextlib import suppress
from types import FunctionType

REASON = "a scaler runs beside compiled code, not in it; compiled callers have scaler_triton.ops"


def skip_tracing(cls: type) -> None:
    """Have every method that a class and its bases of this package define run uncompiled, and all that it calls.

    Equivalent PyTorch: `torch.compiler.disable` on each, but for a wrapper that every call pays, and the import of
    Dynamo: here functions stay what they are. What torch.compile was called on runs compiled within them, too, such as
    an optimizer's step. Methods with names such as `__init__` are left out: Dynamo has ways of its own with those.
    """
    for base in cls.__mro__:
        if base.__module__.startswith("scaler_triton."):
            for name, member in vars(base).items():
                if isinstance(member, FunctionType) and not name.startswith("__"):
                    _mark(member)


def _mark(function: FunctionType) -> None:
    """Mark a function as `torch._dynamo.skip` does, and as recursive: its frames switch Dynamo off till they return."""
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=REASON)
    with suppress(ImportError):  # torch's own names, not promised: who does not compile shall not miss them
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
