"""An actor and a critic, updated as RL trainers do: micro-batches, FSDP2, a clip.

torchrun --standalone --nproc-per-node 2 docs/recipes/verl_style.py
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


class Learner:
    def __init__(self, outputs: int) -> None:
        layers = torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, outputs)
        net = torch.nn.Sequential(*layers).to(device)
        self.model = fully_shard(net, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.scaler = ShardedGradScaler(kind, growth_interval=400)

    def update(self, batch: torch.Tensor, micro_batches: int = 4) -> torch.Tensor:
        self.optimizer.zero_grad()
        for micro in batch.chunk(micro_batches):
            with torch.autocast(kind, dtype=torch.float16):
                loss = self.model(micro).float().square().mean() / micro_batches
            self.scaler.scale(loss).backward()
        # FSDP1 needs model=self.model, too.
        norm = self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm


actor, critic = Learner(outputs=8), Learner(outputs=1)
for step in range(20):
    batch = torch.randn(32, 16, device=device)
    if step == 10 and dist.get_rank() == dist.get_world_size() - 1:
        batch[3, 5] = float("inf")  # on one rank; all skip
    for name, learner in {"actor": actor, "critic": critic}.items():
        learner.update(batch)
        if learner.scaler.was_skipped(learner.optimizer):  # on every rank alike
            scale = learner.scaler.get_scale()
            where = f"rank {dist.get_rank()}, step {step}"
            print(f"{where}: {name} skipped, scale now {scale:g}")
dist.barrier()  # no thread of a backend is to work on into the end of the interpreter
dist.destroy_process_group()
