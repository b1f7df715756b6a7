"""Where the ranks run: on every GPU, two ranks on one GPU, or on the CPU."""

from typing import NamedTuple

import torch

from scaler_triton.demo.launch import run_ranks
from scaler_triton.demo.model import ModelSize
from scaler_triton.demo.train import Config, train_rank

RANKS = 2
TRIAL_SECONDS = 30.0


class Placement(NamedTuple):
    """How many ranks run where, and why, in words for the user."""

    device_type: str  # "cpu" or "cuda"
    backend: str  # "gloo" or "nccl"
    ranks: int
    note: str


def place(mode: str) -> Placement:
    """Return the best placement for a mode that this machine allows; "single" takes one process, others two."""
    ranks = 1 if mode == "single" else RANKS
    if not torch.cuda.is_available():
        return Placement("cpu", "gloo", ranks, f"no GPU: on the CPU{', over gloo' if ranks > 1 else ''}")
    if torch.cuda.device_count() >= ranks:
        over = ", over nccl" if ranks > 1 else ""
        return Placement("cuda", "nccl", ranks, f"{ranks} of {torch.cuda.device_count()} GPUs{over}")
    if not why_not_on_one_gpu(mode):
        return Placement("cuda", "gloo", ranks, f"{ranks} ranks share the one GPU, over gloo")
    note = f"only 1 rank: {mode} with {ranks} gloo ranks does not run on the one GPU here"
    return Placement("cuda", "nccl", 1, note)


def why_not_on_one_gpu(mode: str) -> str:
    """Train a little with two gloo ranks on one GPU and return the error; empty if there was none."""
    trial = Config("torch", mode, "sgd", 1, RANKS, "cuda", ModelSize(layers=1, width=8, heads=1, context=4))
    answers = run_ranks(train_rank, trial, ranks=RANKS, seconds=TRIAL_SECONDS)
    return next((answer.error for answer in answers if answer.error), "")
