"""A loop as torchtitan has it: parts of a model on meshes of their own.

Their optimizers are in a container with hooks.

torchrun --standalone --nproc-per-node 2 docs/recipes/torchtitan_style.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from scaler_triton import StepGuard


class Optimizers(torch.optim.Optimizer):
    """An optimizer for each part of a model, which step together.

    Hooks of the whole run are called by its own `step`.
    """

    def __init__(self, parts: list[torch.nn.Module]) -> None:
        self.optimizers = [
            torch.optim.AdamW(part.parameters(), lr=1e-3, fused=True) for part in parts
        ]
        super().__init__([each for part in parts for each in part.parameters()], {})

    def step(self, closure: None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


kind = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device(kind)
if kind == "cuda":
    device = torch.device(kind, rank % torch.cuda.device_count())

torch.manual_seed(0)
dense, experts = torch.nn.Linear(16, 64).to(device), torch.nn.Linear(64, 1).to(device)
fully_shard(dense, mesh=dist.init_device_mesh(kind, (ranks,), mesh_dim_names=("dp",)))
fully_shard(experts, mesh=dist.init_device_mesh(kind, (ranks,), mesh_dim_names=("ep",)))
model = torch.nn.Sequential(dense, torch.nn.GELU(), experts)
optimizers = Optimizers([dense, experts])
lr_schedulers = [
    torch.optim.lr_scheduler.LinearLR(each, total_iters=20)
    for each in optimizers.optimizers
]
guard = StepGuard(kind, spike_sigma=6.0, window=16)

# What the experts have seen since they were last balanced.
tokens, balanced = torch.zeros(1, device=device), []


def balance_experts(*_: object) -> None:
    balanced.append(tokens.item())
    tokens.zero_()


# As torchtitan's balancing of experts.
optimizers.register_step_pre_hook(balance_experts)

torch.manual_seed(1 + rank)
for step in range(40):
    optimizers.zero_grad()
    for _ in range(2):
        batch = torch.randn(16, 16, device=device)
        if rank == ranks - 1:  # one rank's batch is bad; all skip
            batch *= {20: torch.nan, 30: 1000.0}.get(step, 1.0)
        with torch.autocast(kind, dtype=torch.bfloat16):
            errors = model(batch) - batch.sum(1, keepdim=True)
            loss = errors.float().square().mean() / 2
        loss.backward()
        tokens += len(batch)
    norm = guard.clip_grad_norm_(optimizers, 1.0)  # over all meshes, in one reduction
    guard.step(optimizers)  # the container's own step, with its hooks, or nothing
    guard.update()
    if not guard.was_skipped(optimizers):
        for scheduler in lr_schedulers:
            scheduler.step()
    else:
        report = guard.overflow_report(model, gather=True)
        if rank == 0:
            print(f"step {step}: norm {norm.item():.3g}; {report}")
if rank == 0:
    print(f"balanced {len(balanced)} times, {sum(balanced):.0f} tokens in all")
dist.barrier()  # no thread of a backend is to work on into the end of the interpreter
dist.destroy_process_group()
