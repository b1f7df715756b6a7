"""A training step in fp16, clipped, with a report when it was skipped."""

import torch

from scaler_triton import GradScaler

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
layers = torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
model = torch.nn.Sequential(*layers).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
scaler = GradScaler(device.type, init_scale=2.0**16, growth_interval=20)

inputs = torch.randn(256, 16, device=device)
targets = inputs.sum(1, keepdim=True)

for step in range(60):
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=torch.float16):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
    scaler.scale(loss).backward()
    if step == 30:
        model[0].weight.grad[3, 5] = float("inf")
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    if scaler.was_skipped(optimizer):  # waits for the flag; leave it out if nobody asks
        print(f"step {step} was skipped")
    scaler.update()

print(f"loss {loss.item():.4f}, {scaler.stats()}")
print(scaler.overflow_report(model))
