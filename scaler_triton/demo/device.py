"""Where the ranks run: every GPU, two ranks on one GPU, or the CPU."""

from dataclasses import dataclass

import torch
from torch import nn

from scaler_triton.demo.ranks import RankPool, RankTimeout

RANKS = 2
TRIAL_LIMIT = 30.0  # seconds; three trials that hang must fit into what `make gpu-tests` gives them


@dataclass(frozen=True)
class Placement:
    """How many ranks run where.

    Args:
        device_type: "cpu" or "cuda".
        backend: "gloo" or "nccl".
        ranks: processes.
        note: why, in words for the user.
    """

    device_type: str
    backend: str
    ranks: int
    note: str


def place(mode: str) -> Placement:
    """Return the best placement that this machine allows.

    Args:
        mode: "single", "ddp", "fsdp1" or "fsdp2"; single takes one process, the others two.
    """
    ranks = 1 if mode == "single" else RANKS
    if not torch.cuda.is_available():
        return Placement("cpu", "gloo", ranks, f"no GPU: on the CPU{', over gloo' if ranks > 1 else ''}")
    if torch.cuda.device_count() >= ranks:
        over = ", over nccl" if ranks > 1 else ""
        return Placement("cuda", "nccl", ranks, f"{ranks} of {torch.cuda.device_count()} GPUs{over}")
    if not why_not_one_gpu_gloo(mode):
        return Placement("cuda", "gloo", ranks, f"{ranks} ranks share the one GPU, over gloo")
    note = f"only 1 rank: {mode} with {ranks} gloo ranks does not run on the one GPU here"
    return Placement("cuda", "nccl", 1, note)


def why_not_one_gpu_gloo(mode: str) -> str:
    """Train with two gloo ranks on GPU 0 and return what went wrong; empty if nothing did."""
    try:
        with RankPool(RANKS, backend="gloo") as pool:
            results = pool.run(_train_a_little, mode, timeout=TRIAL_LIMIT)
    except RankTimeout as late:
        results = late.results
    except RuntimeError as error:  # the ranks did not start
        return str(error).splitlines()[0]
    return next((result.error for result in results if result.error), "")


def main() -> None:
    """Print what several ranks on one GPU can do on this machine."""
    if not torch.cuda.is_available():
        print("no GPU")
        return
    for mode in ("ddp", "fsdp1", "fsdp2"):
        reason = why_not_one_gpu_gloo(mode)
        print(f"{mode} with {RANKS} gloo ranks on one GPU: {f'no: {reason}' if reason else 'yes'}", flush=True)


def use_device(device_type: str, rank: int) -> torch.device:
    """Make this rank's device the current one, and return it.

    Args:
        device_type: "cpu" or "cuda".
        rank: this process; ranks share GPUs where there are fewer.
    """
    if device_type == "cpu":
        torch.set_num_threads(1)  # the ranks share the cores
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _train_a_little(rank: int, mode: str) -> None:
    from scaler_triton.demo.model import CharTransformer, ModelSize
    from scaler_triton.demo.parallel import spread, whole_parameters

    device = use_device("cuda", rank)
    model: nn.Module = spread(CharTransformer(8, ModelSize(1, 8, 1, 4)).to(device), mode, RANKS)
    tokens = torch.zeros(1, 4, dtype=torch.int64, device=device)
    model(tokens, tokens).backward()
    whole_parameters(model).sum().item()


if __name__ == "__main__":
    # Not this module's own `main`: a rank could not find the functions of a `__main__`.
    from scaler_triton.demo import device

    device.main()
