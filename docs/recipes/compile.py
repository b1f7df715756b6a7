"""The model and the optimizer compiled, the scaler between them.

python compile.py [BACKEND]
"""

import sys

import torch

from scaler_triton import GradScaler

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
backend = sys.argv[1] if len(sys.argv) > 1 else "inductor"

layers = torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)
model = torch.nn.Sequential(*layers).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)
# The learning rate is a tensor: a new value compiles nothing anew.
optimizer.step = torch.compile(optimizer.step, backend=backend)
scaler = GradScaler(device.type, init_scale=256.0, growth_interval=4)


@torch.compile(backend=backend, fullgraph=True)
def loss_of(inputs, targets):
    with torch.autocast(device.type, dtype=torch.float16):
        outputs = model(inputs)
    return torch.nn.functional.mse_loss(outputs.float(), targets)


for number in range(8):
    # Proves that nothing compiles after warm-up.
    with torch._dynamo.config.patch(error_on_recompile=number > 2):
        optimizer.zero_grad()
        inputs = torch.randn(8, 16, device=device)
        loss = loss_of(inputs, torch.zeros(8, 4, device=device))
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
print(f"loss {loss.item():.3f}, scale {scaler.get_scale()}")
