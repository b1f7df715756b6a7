"""The README's yes/no table: do all ranks agree on a step that overflows, with torch's class and with ours?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cases
import model_cases
from cases import Fault, Report

PLAIN, FUSED = "adamw", "adamw-fused"


@dataclass(frozen=True)
class Row:
    """One way to spread a model, the classes its users take, and where an overflow shows up by itself.

    Args:
        faults: (rank, parameter): DDP's gradients are equal on all ranks, HSDP's on both replicas.
    """

    name: str
    wrapper: str
    kind: str
    faults: tuple[tuple[int, int], ...]


ROWS = [
    Row("DDP", "ddp", "grad", ((0, 0), (1, 0), (2, 0), (3, 0))),
    Row("FSDP1", "fsdp1-full", "sharded", ((1, 0),)),
    Row("FSDP2", "fsdp2", "grad", ((1, 0),)),
    Row("HSDP (FSDP2)", "hsdp2", "grad", ((1, 0), (3, 0))),
    Row("TP + FSDP2", "fsdp2-tp", "grad", ((1, 2),)),
]
CLASS_NAMES = {"grad": "GradScaler", "sharded": "ShardedGradScaler"}


def torch_class(kind: str) -> Any:
    """torch's own class."""
    from torch.amp import GradScaler
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return {"grad": GradScaler, "sharded": ShardedGradScaler}[kind]


def our_class(kind: str) -> Any:
    """Ours, of the same name."""
    import scaler_triton

    return getattr(scaler_triton, CLASS_NAMES[kind])


def run(rank: int, row: Row, whose: str, optimizer: str, unscale: bool) -> Report | str:
    """Train a few steps, one of them overflowing; what is left, or the error if the scaler raised."""
    make = torch_class(row.kind) if whose == "torch" else our_class(row.kind)
    scaler = make(cases.DEVICE, init_scale=cases.INIT_SCALE, growth_interval=cases.GROWTH_INTERVAL)
    model = model_cases.WRAPPERS[row.wrapper](model_cases.Net(), False)
    faults = [Fault(2, at, param) for at, param in row.faults]
    try:
        return model_cases._train(rank, model, scaler, optimizer, faults, unscale, part=(0, 1))
    except RuntimeError as error:
        return str(error)
