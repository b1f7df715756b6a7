"""Draw `skips.svg`: scale, loss and skipped steps of a small fp16 run whose scale grows until fp16 overflows."""

from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt

from scaler_triton import GradScaler

STEPS = 600
OUT = Path(__file__).parent / "skips.svg"


def train() -> tuple[list[float], list[float], list[int]]:
    """Return loss and scale of every step, and which steps were skipped."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=20)
    inputs = torch.randn(512, 32)
    targets = inputs.square().sum(1, keepdim=True)
    losses, scales, skipped = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
        scales.append(scaler.get_scale())
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if scaler.was_skipped(optimizer):
            skipped.append(step)
        scaler.update()
    return losses, scales, skipped


def draw(losses: list[float], scales: list[float], skipped: list[int]) -> None:
    """Write the picture: the scale in powers of two with a mark at every skip, the loss below."""
    plt.style.use(OUT.with_name("pages.mplstyle"))
    mpl.rcParams["svg.hashsalt"] = "skips"  # the same picture every time
    figure, (above, below) = plt.subplots(
        2, sharex=True, figsize=(5.8, 4.2), height_ratios=(3, 2), layout="constrained"
    )
    above.step(range(STEPS), scales, where="post", color="tab:blue")
    above.scatter(skipped, [scales[step] for step in skipped], marker="x", color="tab:red", zorder=3, clip_on=False)
    above.set_yscale("log", base=2)
    above.set_ylabel("scale")
    above.legend(["scale", f"step skipped ({len(skipped)} of {STEPS})"], loc="lower right", frameon=False)
    below.plot(losses, color="tab:green")
    below.set_yscale("log")
    below.set_ylabel("loss")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, STEPS)
    figure.savefig(OUT, metadata={"Date": None})


if __name__ == "__main__":
    draw(*train())
