"""Lightning's Trainer in fp16 with our scaler: a fused optimizer, clipped by norm.

A schedule and an average wait for skipped steps.
"""

import lightning.pytorch as pl
import torch
from torch.optim.swa_utils import AveragedModel

from scaler_triton import GradScaler, mixed_precision

device = "cuda" if torch.cuda.is_available() else "cpu"


class Sums(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
        self.net = torch.nn.Sequential(*layers)
        self.average = AveragedModel(self.net)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.net(inputs).float(), targets)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, fused=True)
        schedule = torch.optim.lr_scheduler.LinearLR(
            optimizer, 1.0, 0.5, total_iters=80
        )
        stepwise = {"scheduler": schedule, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": stepwise}

    def lr_scheduler_step(self, schedule: object, metric: object) -> None:
        if not self.trainer.scaler.was_skipped(self.optimizers()):
            super().lr_scheduler_step(schedule, metric)
            self.average.update_parameters(self.net)


pl.seed_everything(0, verbose=False)
inputs = torch.randn(256, 16)
inputs[100, 3] = 1e30  # infinite in fp16: the step of this batch is skipped
targets = inputs.sum(1, keepdim=True).clamp(-20, 20)
data = torch.utils.data.TensorDataset(inputs, targets)
module = Sums()

trainer = pl.Trainer(
    accelerator=device,
    devices=1,
    # The one line.
    plugins=mixed_precision(pl.Trainer, GradScaler(device, 1024.0), device=device),
    gradient_clip_val=1.0,
    max_epochs=10,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=32))
print(trainer.scaler.stats())
rate = module.lr_schedulers().get_last_lr()[0]
averaged = module.average.n_averaged.item()
print(f"{averaged} of {trainer.global_step} averaged; lr {rate:.6f}")
print(trainer.scaler.overflow_report(module))
