"""A character-level transformer, small enough for fp16 on two CPU cores."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ModelSize(NamedTuple):
    """How big the transformer is."""

    layers: int = 2
    width: int = 64  # channels of the residual stream
    heads: int = 4  # must divide `width`
    context: int = 64  # characters that the model sees at once


class Block(nn.Module):
    """Causal self-attention, then an MLP, each added to the residual stream."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        # No bias: a key's bias has no gradient but rounding noise, which Adam would turn into steps.
        self.query_key_value = nn.Linear(size.width, 3 * size.width, bias=False)
        self.attention_out = nn.Linear(size.width, size.width)
        self.norm_mlp = nn.LayerNorm(size.width)
        self.mlp_in = nn.Linear(size.width, 4 * size.width)
        self.mlp_out = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """One block. x: [batch, context, width]."""
        by_head = self.query_key_value(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = by_head.permute(2, 0, 3, 1, 4)  # each [batch, heads, context, channels]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        x = x + self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x))))
        return x


class CharTransformer(nn.Module):
    """Predicts the next character."""

    def __init__(self, vocabulary: int, size: ModelSize) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Parameter(torch.zeros(size.context, size.width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.logits = nn.Linear(size.width, vocabulary)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy, in nats a character. inputs, targets: [batch, context]."""
        x = self.characters(inputs) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.logits(self.norm(x)).flatten(0, 1), targets.flatten())
