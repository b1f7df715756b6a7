"""The models whose training loops are timed, each with a batch."""

from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(count: int, width: int) -> nn.Module:
    """Linear layers with `count` parameters: a weight and a bias a layer."""
    layers = [nn.Linear(width, width, bias=2 * n + 2 <= count) for n in range((count + 1) // 2)]
    return nn.Sequential(*(each for layer in layers for each in (layer, nn.ReLU())))


class Block(nn.Module):
    """A basic block of ResNet: two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = outputs // inputs
        first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
        second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.main, self.shortcut = nn.Sequential(*first, *second), nn.Sequential()
        if inputs != outputs:
            self.shortcut.extend([nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)])

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, inputs, height, width]."""
        return (self.main(x) + self.shortcut(x)).relu()


def resnet18(classes: int = 10) -> nn.Module:
    """ResNet-18, 62 parameters."""
    blocks = [Block(*widths) for widths in pairwise((64, 64, 64, 128, 128, 256, 256, 512, 512))]
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
        return {f"MLP, {n}": (mlp(n, 16).to(device), torch.randn(16, 16, device=device)) for n in counts}
    models = {
        "MLP, 6": mlp(6, 256),
        "MLP, 24": mlp(24, 256),
        "ResNet-18, 62": resnet18(),
        "12 layers, 144": transformer(),
    }
    shapes = (256, 256), (256, 256), (64, 3, 32, 32), (8, 512, 768)
    batches = (torch.randn(shape, device=device) for shape in shapes)
    return {name: (model.to(device), batch) for (name, model), batch in zip(models.items(), batches, strict=True)}
