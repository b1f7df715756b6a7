"""The models that whole steps are timed on, and random batches for them."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perf.shapes import LLAMA_KV, LLAMA_LAYERS, LLAMA_MLP, LLAMA_WIDTH, LLAMA_WORDS
from scaler_triton.demo.model import CharTransformer, ModelSize

GPT2_SIZE, GPT2_WORDS = ModelSize(layers=12, width=768, heads=12, context=1024), 50257
SMALL_SIZE, SMALL_WORDS = ModelSize(layers=2, width=64, heads=4, context=64), 96
HEAD = 128


def transformer(size: ModelSize, words: int, device: str) -> CharTransformer:
    """A transformer in fp32 whose output layer shares the embedding's weights, as GPT-2's does."""
    torch.manual_seed(0)
    with torch.device(device):
        model = CharTransformer(words, size)
    nn.init.normal_(model.characters.weight, std=0.02)
    model.logits.weight = model.characters.weight
    return model


def tokens(batch: int, context: int, words: int, device: str) -> tuple[Tensor, Tensor]:
    """Random inputs and targets, each [batch, context]."""
    drawn = torch.randint(words, (2, batch, context), generator=torch.Generator().manual_seed(0))
    return tuple(drawn.to(device))


def adamw(parameters: Any, **options: Any) -> torch.optim.AdamW:
    """AdamW whose steps hardly move the weights, however many are timed."""
    return torch.optim.AdamW(parameters, lr=1e-6, **options)


class LoraLinear(nn.Module):
    """A frozen fp16 linear map, and a trainable one of low rank beside it."""

    RANK = 16

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(outputs, inputs, dtype=torch.float16) * 0.02, requires_grad=False)
        self.down = nn.Parameter(torch.randn(self.RANK, inputs) * 0.02)
        self.up = nn.Parameter(torch.randn(outputs, self.RANK) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., inputs] -> [..., outputs]."""
        return F.linear(x, self.frozen) + F.linear(F.linear(x, self.down), self.up)


class LoraBlock(nn.Module):
    """A Llama layer without its rotary positions, which hold no parameters."""

    def __init__(self, width: int, key_width: int, mlp: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2)).requires_grad_(False)
        self.query, self.out = LoraLinear(width, width), LoraLinear(width, width)
        self.key, self.value = LoraLinear(width, key_width), LoraLinear(width, key_width)
        self.gate, self.up, self.down = LoraLinear(width, mlp), LoraLinear(width, mlp), LoraLinear(mlp, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, context, width]."""
        heads = partial(Tensor.unflatten, dim=-1, sizes=(-1, HEAD))
        y = self.norms[0](x)
        query, key, value = (heads(part(y)).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LoraLlama(nn.Module):
    """Llama-3 8B with LoRA on every linear map: 448 trainable tensors among 291 frozen ones.

    Args:
        layers, width, key_width, mlp, words: its dimensions, smaller ones for a trial.
    """

    def __init__(
        self,
        layers: int = LLAMA_LAYERS,
        width: int = LLAMA_WIDTH,
        key_width: int = LLAMA_KV,
        mlp: int = LLAMA_MLP,
        words: int = LLAMA_WORDS,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, dtype=torch.float16).requires_grad_(False)
        self.blocks = nn.ModuleList(LoraBlock(width, key_width, mlp) for _ in range(layers))
        self.norm = nn.RMSNorm(width).requires_grad_(False)
        self.logits = nn.Linear(width, words, bias=False, dtype=torch.float16).requires_grad_(False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy. inputs, targets: [batch, context]."""
        x = self.words(inputs).float()
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.logits(self.norm(x)).flatten(0, 1).float(), targets.flatten())
