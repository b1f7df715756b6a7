"""Self-supervised training as DINOv2 does it: several sharded modules, one optimizer.

Each is clipped for itself.

torchrun --standalone --nproc-per-node 2 docs/recipes/dinov2_style.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from scaler_triton import ShardedGradScaler

kind = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
device = torch.device(kind)
if kind == "cuda":
    device = torch.device(kind, dist.get_rank() % torch.cuda.device_count())
mesh = dist.init_device_mesh(kind, (dist.get_world_size(),))


def mlp(inputs: int, outputs: int) -> torch.nn.Module:
    layers = torch.nn.Linear(inputs, 64), torch.nn.GELU(), torch.nn.Linear(64, outputs)
    return torch.nn.Sequential(*layers).to(device)


torch.manual_seed(0)
parts = {"backbone": mlp(16, 32), "head": mlp(32, 8)}
sharded = {name: fully_shard(part, mesh=mesh) for name, part in parts.items()}
student = torch.nn.ModuleDict(sharded)
teacher = mlp(16, 8).requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, fused=True)
scaler = ShardedGradScaler(kind)

for step in range(40):
    optimizer.zero_grad()
    images = torch.randn(64, 16, device=device)
    with torch.autocast(kind, dtype=torch.float16):
        wanted = teacher(images).float().softmax(dim=-1)
        found = student["head"](student["backbone"](images)).float().log_softmax(dim=-1)
    scaler.scale(-(wanted * found).sum(dim=-1).mean()).backward()
    norms = {}
    # The first call unscales everything; FSDP1 needs model=student, too.
    for name, part in student.items():
        norm = scaler.clip_grad_norm_(optimizer, 3.0, parameters=part.parameters())
        norms[name] = norm.item()
    scaler.step(optimizer)
    scaler.update()
    if dist.get_rank() == 0 and step % 10 == 9:
        texts = [f"{name} {norm:.4f}" for name, norm in norms.items()]
        print(f"step {step}: " + ", ".join(texts))
dist.barrier()  # no thread of a backend is to work on into the end of the interpreter
dist.destroy_process_group()
