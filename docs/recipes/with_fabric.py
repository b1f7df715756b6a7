"""A Fabric loop in fp16: a fused optimizer, clipped by norm, and a checkpoint."""

import tempfile
from pathlib import Path

import torch
from lightning.fabric import Fabric

from scaler_triton import GradScaler, mixed_precision

device = "cuda" if torch.cuda.is_available() else "cpu"
scaler = GradScaler(device)
plugin = mixed_precision(Fabric, scaler, device=device)  # the one line
fabric = Fabric(accelerator=device, devices=1, plugins=plugin)
fabric.launch()

fabric.seed_everything(0, verbose=False)
layers = torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
net = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
model, optimizer = fabric.setup(net, optimizer)
inputs = torch.randn(256, 16, device=fabric.device)
targets = inputs.sum(1, keepdim=True)

for step in range(60):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    fabric.backward(loss)
    if step == 30:
        net[0].weight.grad[3, 5] = float("inf")
    # Else Fabric raises where a step should only be skipped.
    fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    optimizer.step()

with tempfile.TemporaryDirectory() as folder:
    state = {"model": model, "optimizer": optimizer, "scaler": scaler}
    fabric.save(Path(folder) / "run.ckpt", state)
print(f"loss {loss.item():.4f}, {scaler.stats()}")
print(scaler.overflow_report(net))
