"""fp16 that also skips spikes.

A scaler unscales and skips overflows, then a guard clips, skips spikes, and steps.
"""

import torch

from scaler_triton import GradScaler, StepGuard


class Guarded:
    """An optimizer whose step is clipped and judged by a guard.

    The scaler unscales before it calls it.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, guard: StepGuard, max_norm: float
    ) -> None:
        self.optimizer, self.guard, self.max_norm = optimizer, guard, max_norm

    @property
    def param_groups(self) -> list[dict[str, object]]:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.guard.clip_grad_norm_(self.optimizer, self.max_norm)  # FSDP1: model=model
        self.guard.step(self.optimizer)
        self.guard.update()


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
layers = torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
model = torch.nn.Sequential(*layers).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = GradScaler(device.type, 64.0)
guard = StepGuard(device.type, spike_sigma=6.0, window=16)
guarded = Guarded(optimizer, guard, 1.0)

for step in range(40):
    optimizer.zero_grad()
    batch = torch.randn(32, 16, device=device)
    batch *= {20: torch.inf, 30: 8.0}.get(step, 1.0)
    with torch.autocast(device.type, dtype=torch.float16):
        loss = (model(batch) - batch.sum(1, keepdim=True)).float().square().mean()
    scaler.scale(loss).backward()
    # Waits for the scaler's flag, as for any optimizer that is not fused.
    scaler.step(guarded)
    scaler.update()
    if scaler.was_skipped(guarded):
        print(f"step {step}, scaler: {scaler.overflow_report(model)}")
    elif guard.was_skipped(optimizer):
        print(f"step {step}, guard: {guard.overflow_report(model)}")

stats = guard.stats()
print(f"scale {scaler.get_scale():g}; {stats.updates} judged, {stats.spikes} spike")
