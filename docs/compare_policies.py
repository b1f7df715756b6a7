"""Train five small models in fp16 on the CPU, by torch's rule and by measured headroom.

Writes `policies.svg`, both scales over one run, and the table of headroom.md: skipped steps and losses.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from tabulate import tabulate
from torch import Tensor, nn

from scaler_triton import GradScaler

HERE = Path(__file__).parent
STEPS, FIRST = 300, 20
POLICIES = {"torch": {}, "headroom": {"scale_policy": "headroom", "init_scale": "measured"}}

# A loss, summed over the batch, of the model and the number of the step.
Loss = Callable[[int], Tensor]


@dataclass
class Task:
    """What is trained: parameters and loss of each optimizer, and the elements that a loss sums over."""

    parts: list[tuple[list[nn.Parameter], Loss]]
    batch: int


@dataclass
class Run:
    """The scale and the loss of every step, and which steps were skipped."""

    scales: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


def draw(step: int) -> torch.Generator:
    """Return the random numbers of a step."""
    return torch.Generator().manual_seed(step)


def transformer() -> Task:
    """A language model that has to copy each token once."""
    embed, position = nn.Embedding(64, 64), nn.Parameter(0.02 * torch.randn(32, 64))
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    layers, head = nn.TransformerEncoder(layer, 2), nn.Linear(64, 64)

    def loss(step: int) -> Tensor:
        tokens = torch.randint(0, 64, (8, 33), generator=draw(step))
        tokens[:, 1::2] = tokens[:, :-1:2]
        logits = head(layers(embed(tokens[:, :-1]) + position)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")

    return Task([([position, *nn.ModuleList([embed, layers, head]).parameters()], loss)], 8 * 32)


def cnn() -> Task:
    """A classifier of noisy pictures."""
    first = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
    model = nn.Sequential(first, second, nn.Flatten(), nn.Linear(512, 10))
    pictures = torch.randn(10, 1, 16, 16)

    def loss(step: int) -> Tensor:
        labels = torch.randint(0, 10, (64,), generator=draw(step))
        noisy = pictures[labels] + 0.5 * torch.randn(64, 1, 16, 16, generator=draw(step))
        return F.cross_entropy(model(noisy).float(), labels, reduction="sum")

    return Task([([*model.parameters()], loss)], 64)


def gan() -> Task:
    """A generator of points on a circle, and its judge: two optimizers, one scaler."""
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    judge = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))

    def noise(step: int) -> Tensor:
        return torch.randn(256, 8, generator=draw(step))

    def of_judge(step: int) -> Tensor:
        angles = 2 * math.pi * torch.rand(256, generator=draw(step))
        real, fake = 3 * torch.stack([angles.cos(), angles.sin()], 1), generator(noise(step)).detach()
        return (F.softplus(-judge(real).float()) + F.softplus(judge(fake).float())).sum()

    def of_generator(step: int) -> Tensor:
        return F.softplus(-judge(generator(noise(step))).float()).sum()

    return Task([([*judge.parameters()], of_judge), ([*generator.parameters()], of_generator)], 256)


def lora() -> Task:
    """Adapters of a frozen fp16 model."""
    base = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).half().requires_grad_(False)
    down = [nn.Parameter(0.1 * torch.randn(4, size)) for size in (64, 256)]
    up = [nn.Parameter(torch.zeros(size, 4)) for size in (256, 64)]
    target = torch.randn(64, 64) / 8

    def adapted(layer: nn.Module, number: int, x: Tensor) -> Tensor:
        return layer(x) + 2 * F.linear(F.linear(x, down[number]), up[number])

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 64, generator=draw(step))
        hidden = F.gelu(adapted(base[0], 0, x))
        return F.mse_loss(adapted(base[2], 1, hidden).float(), x @ target, reduction="sum")

    return Task([([*down, *up], loss)], 32 * 64)


def policy() -> Task:
    """A policy that learns from returns of -100 and 100 which of two actions is right."""
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def loss(step: int) -> Tensor:
        states = torch.randn(128, 4, generator=draw(step))
        chances = F.log_softmax(model(states).float(), -1)
        actions = torch.multinomial(chances.detach().exp(), 1, generator=draw(step))
        returns = torch.where(actions[:, 0] == (states[:, 0] > 0), 100.0, -100.0)
        return -(chances.gather(1, actions)[:, 0] * returns).sum()

    return Task([([*model.parameters()], loss)], 128)


TASKS = {"transformer": transformer, "CNN": cnn, "GAN": gan, "LoRA": lora, "RL policy": policy}


def train(task: Callable[[], Task], options: dict[str, object], steps: int = STEPS) -> Run:
    """Train a new model with a scaler of these options."""
    torch.manual_seed(0)
    made, run = task(), Run()
    optimizers = [torch.optim.AdamW(parameters, lr=1e-3) for parameters, _ in made.parts]
    scaler = GradScaler("cpu", **options)  # type: ignore[arg-type]
    for step in range(steps):
        run.scales.append(scaler.get_scale())
        for optimizer, (_, loss_of) in zip(optimizers, made.parts, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(step)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        if any(map(scaler.was_skipped, optimizers)):
            run.skipped.append(step)
        run.losses.append(loss.item() / made.batch)
        scaler.update()
    return run


def rows(runs: dict[str, dict[str, Run]]) -> list[list[str]]:
    """Return the table: of each model how many first steps were taken, all skips, and the mean of the last losses."""
    table = []
    for name, of_policies in runs.items():
        row = [name]
        for run in of_policies.values():
            early = sum(step < FIRST for step in run.skipped)
            row += [f"{FIRST - early} of {FIRST}", f"{len(run.skipped)} of {STEPS}"]
        last = [sum(run.losses[-FIRST:]) / FIRST for run in of_policies.values()]
        table.append([*row, f"{last[0]:.3g} / {last[1]:.3g}"])
    return table


def draw_scales(runs: dict[str, Run]) -> None:
    """Write the picture: the scale of each policy in powers of two, with a mark at every skip."""
    plt.style.use(HERE / "pages.mplstyle")
    mpl.rcParams["svg.hashsalt"] = "policies"  # the same picture every time
    figure, axes = plt.subplots(figsize=(5.8, 3.2), layout="constrained")
    for (name, run), colour in zip(runs.items(), ("tab:orange", "tab:blue"), strict=True):
        label = f"{name}: {len(run.skipped)} of {STEPS} steps skipped"
        axes.step(range(STEPS), run.scales, where="post", color=colour, label=label)
        at = [run.scales[step] for step in run.skipped]
        axes.scatter(run.skipped, at, marker="x", color="tab:red", zorder=3, clip_on=False)
    axes.set_yscale("log", base=2)
    axes.set_ylabel("scale")
    axes.set_xlabel("step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, STEPS)
    axes.legend(loc="upper right", frameon=False)
    figure.savefig(HERE / "policies.svg", metadata={"Date": None})


if __name__ == "__main__":
    found = {name: {kind: train(task, options) for kind, options in POLICIES.items()} for name, task in TASKS.items()}
    heads = ["model", "first steps, torch", "skips", "first steps, headroom", "skips", "last losses"]
    table = tabulate(rows(found), heads, tablefmt="github")
    page = HERE / "headroom.md"
    block = re.compile(r"(<!-- policies -->\n).*(<!-- /policies -->)", re.DOTALL)
    page.write_text(block.sub(lambda match: f"{match[1]}{table}\n{match[2]}", page.read_text()))
    draw_scales(found["RL policy"])
    print(table)
