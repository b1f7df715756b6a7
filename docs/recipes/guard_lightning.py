"""bf16 training with Lightning's Trainer that skips bad steps, and says why."""

import lightning.pytorch as pl
import torch

from scaler_triton import StepGuard, step_guard_precision

device = "cuda" if torch.cuda.is_available() else "cpu"
guard = StepGuard(device, spike_sigma=6.0, window=16)


class Sums(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.net(inputs).float(), targets)

    def on_train_batch_end(
        self, outputs: object, batch: list[torch.Tensor], index: int
    ) -> None:
        if guard.was_skipped(self.optimizers()):
            print(f"step {index}: {guard.overflow_report(self)}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


pl.seed_everything(0, verbose=False)
inputs = torch.randn(512, 16)
inputs[320] = torch.nan
inputs[480] *= 1000.0
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))

trainer = pl.Trainer(
    accelerator=device,
    devices=1,
    # The one line, instead of precision="bf16-mixed".
    plugins=step_guard_precision(pl.Trainer, guard, device=device),
    gradient_clip_val=1.0,
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Sums(), torch.utils.data.DataLoader(data, batch_size=16))
