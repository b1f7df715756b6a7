"""Gradient lists as real models have them: element counts, tensor by tensor."""

FEW = {"10 x 64": [64] * 10}  # for quick runs: where a GPU is simulated, elements take long


def gpt2() -> list[int]:
    """GPT-2, 124 million parameters in 148 tensors."""
    width, context, words = 768, 1024, 50257
    norm = [width, width]
    attention = [width * 3 * width, 3 * width, width * width, width]
    mlp = [width * 4 * width, 4 * width, 4 * width * width, width]
    return [words * width, context * width, *(12 * [*norm, *attention, *norm, *mlp]), *norm]


LLAMA_LAYERS, LLAMA_WIDTH, LLAMA_KV, LLAMA_MLP, LLAMA_WORDS = 32, 4096, 1024, 14336, 128256


def llama(shards: int = 1) -> list[int]:
    """Llama-3 8B, 8 billion parameters in 291 tensors, as one of `shards` ranks holds it."""
    width, kv, mlp = LLAMA_WIDTH, LLAMA_WIDTH * LLAMA_KV, LLAMA_WIDTH * LLAMA_MLP
    attention = [width * width, kv, kv, width * width]
    words = LLAMA_WORDS * width
    whole = [words, *(LLAMA_LAYERS * [*attention, mlp, mlp, mlp, width, width]), width, words]
    return [numel // shards for numel in whole]


def vit_large() -> list[int]:
    """ViT-L/16, 304 million parameters in 296 tensors."""
    width, patch, places, classes = 1024, 16, 197, 1000
    norm = [width, width]
    attention = [width * 3 * width, 3 * width, width * width, width]
    mlp = [width * 4 * width, 4 * width, 4 * width * width, width]
    stem = [width, places * width, width * 3 * patch * patch, width]
    return [*stem, *(24 * [*norm, *attention, *norm, *mlp]), *norm, width * classes, classes]
