"""What is trained, in the same way by every rank and by the single-process reference."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from scaler_triton.demo.config import DemoConfig
from scaler_triton.demo.model import CharTransformer
from scaler_triton.demo.text import python_topics


class Workload:
    """The text, the model at its start and the loss of any rank's micro-batch."""

    def __init__(self, config: DemoConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.text = python_topics()

    def new_model(self) -> CharTransformer:
        """Return a model with the same starting parameters in every process."""
        torch.manual_seed(0)
        return CharTransformer(len(self.text.vocabulary), self.config.size).to(self.device)

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        """Return the loss of one rank's micro-batch under fp16 autocast, unscaled."""
        inputs, targets = self.text.batch(step, rank, self.config.batch_size, self.config.size.context)
        with torch.autocast(self.device.type, dtype=torch.float16):
            loss: Tensor = model(inputs.to(self.device), targets.to(self.device))
        return loss


def new_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimizer that `--optimizer` names: adamw, adamw-fused or sgd."""
    if name == "sgd":
        return SGD(parameters, lr=0.3, momentum=0.9)
    return AdamW(parameters, lr=5e-3, eps=1e-6, fused=name == "adamw-fused")
