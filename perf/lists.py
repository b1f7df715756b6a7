"""The GPU's gradient lists, in every dtype, each checked before it is timed."""

import gc
from collections.abc import Iterator

import torch

from perf import shapes
from perf.compare import DTYPES, Build, require_equal
from perf.context import Context
from perf.gpu import torch_serves
from perf.grads import Gradients
from perf.measure import Subject

LISTS = {
    "GPT-2 124M": shapes.gpt2(),
    "Llama-3 8B, 1 of 8 shards": shapes.llama(8),
    "ViT-L": shapes.vit_large(),
    "2000 x 64": [64] * 2000,
    "2000 x 1k": [1000] * 2000,
    "2000 x 10k": [10_000] * 2000,
    "2000 x 100k": [100_000] * 2000,
}


def checked_lists(context: Context, bench: str, build: Build) -> Iterator[tuple[str, Gradients, dict[str, Subject]]]:
    """Give every list's name, gradients and subjects, once they are found to leave the same bits."""
    for dtype_name, dtype in DTYPES.items():
        served = torch_serves(dtype)
        if not served:
            context.leave_out(f"{bench}: torch for {dtype_name}", "its op has none on this GPU")
        for name, numels in (shapes.FEW if context.quick else LISTS).items():
            case = f"{name} {dtype_name}"
            gradients = Gradients(numels, dtype, "cuda")
            require_equal(f"{bench}, {case}", gradients, build, torch_serves=served)
            subjects = build(gradients).subjects
            if not served:
                del subjects["torch"]
            yield case, gradients, subjects
            del gradients, subjects
            gc.collect()
            torch.cuda.empty_cache()
