"""bf16 training with Accelerate that skips bad steps.

python guard_accelerate.py, or accelerate launch guard_accelerate.py
"""

import torch
from accelerate import Accelerator

from scaler_triton import use_step_guard

accelerator = Accelerator(mixed_precision="bf16")
guard = use_step_guard(accelerator, spike_sigma=6.0, window=16)  # the one line

torch.manual_seed(0)
inputs = torch.randn(512, 16)
inputs[320] = torch.nan
inputs[480] *= 1000.0
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
layers = torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
batches = torch.utils.data.DataLoader(data, batch_size=16)
prepared = accelerator.prepare(model, optimizer, batches, scheduler)
model, optimizer, batches, scheduler = prepared

for step, (x, y) in enumerate(batches):
    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)  # checks and clips
    optimizer.step()
    scheduler.step()  # not after a skipped step
    optimizer.zero_grad()
    if accelerator.optimizer_step_was_skipped:
        accelerator.print(f"step {step}: {guard.overflow_report(model)}")
