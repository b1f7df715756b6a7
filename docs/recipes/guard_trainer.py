"""bf16 training with Hugging Face's Trainer that skips bad steps, and says why."""

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from scaler_triton import use_step_guard


class Sums(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)
        self.net = torch.nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.net(x).float(), labels)}


class Why(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if trainer.accelerator.optimizer_step_was_skipped:
            print(f"step {state.global_step}: {guard.overflow_report(model)}")


torch.manual_seed(0)
rows = [{"x": x, "labels": x.sum(0, keepdim=True)} for x in torch.randn(512, 16)]
rows[100]["x"] = rows[100]["x"] * torch.nan
arguments = TrainingArguments(
    output_dir="guarded",
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    num_train_epochs=1,
    per_device_train_batch_size=16,
    report_to=[],
)
trainer = Trainer(Sums(), arguments, train_dataset=rows, callbacks=[Why])
guard = use_step_guard(trainer, spike_sigma=6.0)  # the one line, before train()

trainer.train()
print(guard.stats())
