"""The models whose training loops are timed, each with a batch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perf.subjects import plural


def mlp(count: int, width: int) -> nn.Module:
    """Linear layers with `count` parameters: a weight and a bias a layer."""
    layers = [nn.Linear(width, width, bias=2 * n + 2 <= count) for n in range((count + 1) // 2)]
    return nn.Sequential(*(each for layer in layers for each in (layer, nn.ReLU())))


class Block(nn.Module):
    """A basic block of ResNet: two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, inputs, height, width]."""
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.shortcut(x))


def resnet18(classes: int = 10) -> nn.Module:
    """ResNet-18, 62 parameters."""
    widths = (64, 64, 128, 256, 512)
    blocks = [
        Block(before if first else after, after, 2 if first and before != after else 1)
        for before, after in zip(widths, widths[1:], strict=False)
        for first in (True, False)
    ]
    stem = [nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def transformer(layers: int = 12, width: int = 768, heads: int = 12) -> nn.Module:
    """An encoder, 12 parameters a layer."""
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def loop_cases(device: str, quick: bool) -> dict[str, tuple[nn.Module, Tensor]]:
    """Return the models by name, each with its batch: on the CPU tiny ones, since the scaler's time is asked for."""
    torch.manual_seed(0)
    if quick or device == "cpu":
        counts = (1, 10) if quick else (1, 10, 50, 500, 2000)
        return {plural(n, "parameter"): (mlp(n, 16).to(device), torch.randn(16, 16, device=device)) for n in counts}
    image = torch.randn(64, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    rows = torch.randn(256, 256, device=device)
    return {
        "MLP, 6": (mlp(6, 256).to(device), rows),
        "MLP, 24": (mlp(24, 256).to(device), rows),
        "ResNet-18, 62": (resnet18().to(device, memory_format=torch.channels_last), image),
        "12 layers, 144": (transformer().to(device), torch.randn(8, 512, 768, device=device)),
    }
