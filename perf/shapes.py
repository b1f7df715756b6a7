"""Gradient lists as real models have them: element counts, tensor by tensor."""


def gpt2(layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024) -> list[int]:
    """GPT-2; by default the one with 124 million parameters, in 148 tensors."""
    norm = [width, width]
    attention = [width * 3 * width, 3 * width, width * width, width]
    mlp = [width * 4 * width, 4 * width, 4 * width * width, width]
    return [vocabulary * width, context * width, *(layers * [*norm, *attention, *norm, *mlp]), *norm]


LLAMA_LAYERS, LLAMA_WIDTH, LLAMA_KV, LLAMA_MLP, LLAMA_WORDS = 32, 4096, 1024, 14336, 128256


def llama_linears() -> list[tuple[int, int]]:
    """A Llama-3 8B layer's linear maps as (inputs, outputs): query, key, value, out, gate, up, down."""
    width, mlp = LLAMA_WIDTH, LLAMA_MLP
    return [
        (width, width),
        (width, LLAMA_KV),
        (width, LLAMA_KV),
        (width, width),
        (width, mlp),
        (width, mlp),
        (mlp, width),
    ]


def llama(shards: int = 1) -> list[int]:
    """Llama-3 8B, 8 billion parameters in 291 tensors, as one of `shards` ranks holds it."""
    layer = [*(inputs * outputs for inputs, outputs in llama_linears()), LLAMA_WIDTH, LLAMA_WIDTH]
    words = LLAMA_WORDS * LLAMA_WIDTH
    return [numel // shards for numel in (words, *(LLAMA_LAYERS * layer), LLAMA_WIDTH, words)]


def vit_large() -> list[int]:
    """ViT-L/16, 304 million parameters in 296 tensors."""
    width, patch, places, classes = 1024, 16, 197, 1000
    norm = [width, width]
    attention = [width * 3 * width, 3 * width, width * width, width]
    mlp = [width * 4 * width, 4 * width, 4 * width * width, width]
    stem = [width, places * width, width * 3 * patch * patch, width]
    return [*stem, *(24 * [*norm, *attention, *norm, *mlp]), *norm, width * classes, classes]
