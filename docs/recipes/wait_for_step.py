"""A learning-rate schedule and an average of the weights that wait for the step.

A skipped one moves neither.
"""

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scaler_triton import GradScaler

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
layers = torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
model = torch.nn.Sequential(*layers).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=100)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
scaler = GradScaler(device.type, init_scale=1024.0)

inputs = torch.randn(256, 16, device=device)
targets = inputs.sum(1, keepdim=True)

for step in range(40):
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=torch.float16):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
    scaler.scale(loss * torch.inf if step in (10, 20, 30) else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if not scaler.was_skipped(optimizer):  # waits for a fused optimizer's flag
        scheduler.step()
        average.update_parameters(model)

rate = scheduler.get_last_lr()[0]
print(f"40 batches, {average.n_averaged.item()} averaged; lr {rate:.6f}")
