"""fp16 training with Accelerate.

python with_accelerate.py, or accelerate launch with_accelerate.py
"""

import torch
from accelerate import Accelerator

from scaler_triton import use_scaler_triton

accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
scaler = use_scaler_triton(accelerator, min_scale=1.0)  # the one line, before prepare()

torch.manual_seed(0)
inputs = torch.randn(256, 16)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
batches = torch.utils.data.DataLoader(data, batch_size=16)
layers = torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
prepared = accelerator.prepare(model, optimizer, batches, scheduler)
model, optimizer, batches, scheduler = prepared

step = 0
for _ in range(8):
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            # Step 3 overflows.
            accelerator.backward(loss * torch.inf if step == 3 else loss)
            if accelerator.sync_gradients:
                # Unscales and clips, one reduction.
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()  # not after a skipped step
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            # Right for fused optimizers, too.
            if accelerator.optimizer_step_was_skipped:
                accelerator.print(f"step {step} was skipped")
            step += 1

accelerator.save_state("checkpoint")
accelerator.print(f"loss {loss.item():.4f}, {scaler.stats()}")
