"""Keep the batch of a skipped step, and find the operation that made the NaN.

python save_bad_batch.py, or torchrun --nproc-per-node 2 save_bad_batch.py
"""

import os

import torch
import torch.distributed as dist

from scaler_triton import StepGuard

kind = "cuda" if torch.cuda.is_available() else "cpu"
rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if ranks > 1:
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
device = torch.device(kind)
if kind == "cuda":
    device = torch.device(kind, rank % torch.cuda.device_count())

torch.manual_seed(0)
layers = [torch.nn.Linear(16, 64, bias=False), torch.nn.GELU()]
net = torch.nn.Sequential(*layers, torch.nn.Linear(64, 4, bias=False)).to(device)
model = torch.nn.parallel.DistributedDataParallel(net) if ranks > 1 else net
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
guard = StepGuard(kind, max_consecutive_skips=50)


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast(kind, dtype=torch.bfloat16):
        errors = model(batch).float() - batch[:, :4]
    return errors.square().sum(1).sqrt().mean()


torch.manual_seed(1 + rank)
for step in range(40):
    optimizer.zero_grad()
    batch = torch.randn(32, 16, device=device)
    if step == 20 and rank == ranks - 1:
        batch[7] = 0  # its error is 0, where the root has no derivative
    loss = loss_of(model, batch)
    loss.backward()
    guard.clip_grad_norm_(optimizer, 1.0)
    guard.step(optimizer)
    guard.update()
    if guard.was_skipped(optimizer):  # a fused optimizer's flag is waited for here
        report = guard.overflow_report(model, gather=ranks > 1)
        if rank == 0:
            print(f"step {step}: {report}")
        saved = {"step": step, "loss": loss.item(), "batch": batch}
        torch.save(saved, f"bad-{step}-{rank}.pt")

if rank == ranks - 1:
    saved = torch.load(f"bad-20-{rank}.pt")
    print(f"the loss was {saved['loss']:.3f}")
    try:
        with torch.autograd.detect_anomaly():
            loss_of(net, saved["batch"]).backward()  # this rank alone, so not by DDP
    except RuntimeError as error:
        print(error)
if ranks > 1:
    # No thread of a backend is to work on into the end of the interpreter.
    dist.barrier()
    dist.destroy_process_group()
