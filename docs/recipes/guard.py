"""bf16 training that skips bad steps.

python guard.py, or torchrun --nproc-per-node 2 guard.py ddp (or fsdp2)
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from scaler_triton import StepGuard

how = sys.argv[1] if len(sys.argv) > 1 else "alone"
kind = "cuda" if torch.cuda.is_available() else "cpu"
if how != "alone":
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
rank, ranks = (0, 1) if how == "alone" else (dist.get_rank(), dist.get_world_size())
device = torch.device(kind)
if kind == "cuda":
    device = torch.device(kind, rank % torch.cuda.device_count())

torch.manual_seed(0)
layers = torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
model = torch.nn.Sequential(*layers).to(device)
if how == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
elif how == "fsdp2":
    fully_shard(model, mesh=dist.init_device_mesh(kind, (ranks,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
guard = StepGuard(kind, spike_sigma=6.0, window=16)

torch.manual_seed(1 + rank)
for step in range(40):
    optimizer.zero_grad()
    batch = torch.randn(32, 16, device=device)
    if rank == ranks - 1:  # one rank's batch is bad; all skip
        batch *= {20: torch.nan, 30: 1000.0}.get(step, 1.0)
    with torch.autocast(kind, dtype=torch.bfloat16):
        loss = (model(batch) - batch.sum(1, keepdim=True)).float().square().mean()
    loss.backward()
    # Leave it out if you do not clip: then step checks; FSDP1 needs model=model.
    guard.clip_grad_norm_(optimizer, 1.0)
    guard.step(optimizer)
    guard.update()
    if guard.was_skipped(optimizer):  # waits for the flag; leave it out if nobody asks
        report = guard.overflow_report(model, gather=ranks > 1)
        if rank == 0:
            print(f"step {step}: {report}")
if how != "alone":
    # No thread of a backend is to work on into the end of the interpreter.
    dist.barrier()
    dist.destroy_process_group()
