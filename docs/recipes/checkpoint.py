"""Run twice, on any number of ranks each time:

torchrun --nproc-per-node 4 checkpoint.py FOLDER, then with 2.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scaler_triton import ShardedGradScaler
from scaler_triton.integrations.dcp import ScalerLoadPlanner

if len(sys.argv) != 2:
    sys.exit(__doc__)
folder = Path(sys.argv[1])
cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
if cuda:
    # fully_shard puts shards on the current one.
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
device = torch.device("cuda" if cuda else "cpu")
net = torch.nn.Linear(8, 8, device=device)
# Without a mesh it takes the kind of GPU that torch is built for, there or not.
fully_shard(net, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(net.parameters(), fused=True)
scaler = ShardedGradScaler(
    device.type, init_scale=256.0, growth_interval=2, min_scale=1.0, hysteresis=2
)


class Training:
    def state_dict(self):
        model, moments = get_state_dict(net, optimizer)
        return {"model": model, "optimizer": moments, "scaler": scaler.state_dict()}

    def load_state_dict(self, state):
        set_state_dict(
            net,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        scaler.load_state_dict(state["scaler"])


if resumes := (folder / ".metadata").exists():
    # The planner takes a scaler's state as it was saved; by itself DCP asks for what
    # the new scaler would save.
    dcp.load(
        {"training": Training()}, checkpoint_id=folder, planner=ScalerLoadPlanner()
    )
for _ in range(3):
    optimizer.zero_grad()
    scaler.scale(net(torch.ones(2, 8, device=device)).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
if not resumes:
    dcp.save({"training": Training()}, checkpoint_id=folder)
# One write: lines stay whole.
sys.stdout.write(f"{scaler.stats().updates} updates, scale {scaler.get_scale()}\n")
dist.barrier()  # no thread of a backend is to work on into the end of the interpreter
dist.destroy_process_group()
