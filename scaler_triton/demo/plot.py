"""The plot of a run: loss above, scale below, the skipped steps marked in both."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from scaler_triton.demo.checks import mean_losses
from scaler_triton.demo.config import DemoConfig
from scaler_triton.demo.trace import Trace

LOSS, SCALES, BAD = "#1f4e79", ("#2e8b57", "#d2691e", "#7b5ea7", "#8b7d2e"), "#b22222"


def save_plot(config: DemoConfig, ranks: Sequence[Trace], title: str, picture: Path) -> None:
    """Draw a run and write it as a PNG."""
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    loss, scale = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_loss(loss, ranks)
    _draw_scales(scale, config, ranks)
    _mark_bad_steps((loss, scale), config)
    for axes in (loss, scale):
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    loss.set_title(title, loc="left", fontsize=11)
    figure.savefig(picture, dpi=140)


def _draw_loss(axes: Any, ranks: Sequence[Trace]) -> None:
    losses = mean_losses(ranks)
    axes.plot(range(1, len(losses) + 1), losses, color=LOSS, linewidth=1.8, label="mean of the ranks' micro-batches")
    for marker, label, kind in (("x", "skipped", all), ("o", "skipped by some ranks ONLY", _some_only)):
        steps = [step for step in range(1, len(losses) + 1) if kind([trace.skipped[step - 1] for trace in ranks])]
        if steps:
            at = [losses[step - 1] for step in steps]
            axes.plot(steps, at, marker, color=BAD, markersize=9, mew=2.2, mfc="none", label=label)
    axes.set_ylabel("loss (nats per character)")
    axes.legend(loc="upper right", framealpha=1, edgecolor="none")


def _some_only(skipped: Sequence[bool]) -> bool:
    return any(skipped) and not all(skipped)


def _draw_scales(axes: Any, config: DemoConfig, ranks: Sequence[Trace]) -> None:
    lines = {f"rank {rank}": trace.scales for rank, trace in enumerate(ranks)}
    if len(ranks) > 1 and all(scales == ranks[0].scales for scales in lines.values()):
        lines = {"all ranks": ranks[0].scales}
    for nth, (label, scales) in enumerate(lines.items()):
        color, width = SCALES[nth % len(SCALES)], 2.2 - 0.5 * nth
        axes.step(range(1, config.steps + 2), scales, where="post", color=color, linewidth=width, label=label)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda scale, _: f"{scale:g}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("scale")
    axes.set_xlabel("step")
    axes.legend(loc="upper left", framealpha=1, edgecolor="none")


def _mark_bad_steps(both: Sequence[Any], config: DemoConfig) -> None:
    for step, rank in config.bad_shards.items():
        for axes in both:
            axes.axvline(step + 1, color=BAD, linewidth=1, linestyle=":", zorder=0)
        where = {"xy": (step + 1, 0.5), "xycoords": ("data", "axes fraction")}
        text = {"xytext": (4, 0), "textcoords": "offset points", "color": BAD, "fontsize": 9}
        both[0].annotate(f"inf in rank {rank}'s shard", **where, **text)
