"""What the scaler does and measures, in TensorBoard; one line for other loggers.

Nothing waits for the GPU.
"""

import torch
from torch.utils.tensorboard import SummaryWriter

from scaler_triton import GradScaler

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
layers = torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
model = torch.nn.Sequential(*layers).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler(device.type, measure=True)
writer = SummaryWriter("runs")

for step in range(1, 41):
    inputs = torch.randn(64, 16, device=device)
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=torch.float16):
        loss = (model(inputs).float() - inputs.sum(1, keepdim=True)).square().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        metrics = scaler.metrics("scaler/")
        for name, number in metrics.items():
            writer.add_scalar(name, number, step)
        # Weights & Biases: wandb.log(metrics, step=step)
        # MLflow: mlflow.log_metrics(metrics, step=step)

writer.close()
print(scaler.headroom())
