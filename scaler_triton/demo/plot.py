"""The demo's picture: the loss above the scales of each scaler's ranks. Everything here needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from scaler_triton.demo.train import Config, Trace, first_split, mean_losses

WHOSE = {"torch": "torch's scaler", "ours": "scaler_triton"}


class Look(NamedTuple):
    """The colours of a picture."""

    text: str = "#1f2328"
    losses: tuple[str, str] = ("#d2691e", "#1f4e79")  # the last is alone's
    ranks: tuple[str, str] = ("#2e8b57", "#d2691e")
    bad: str = "#b22222"
    ground: str = "white"  # or "none", transparent


def draw(config: Config, runs: Mapping[str, Sequence[Trace]], title: str, look: Look, width: float) -> Figure:
    """Return the figure of one run or two, `width` inches wide; with two it says in words whose ranks split."""
    figure = Figure(figsize=(width, 1.9 + 1.5 * len(runs)), layout="constrained", facecolor=look.ground)
    above, *below = figure.subplots(1 + len(runs), 1, sharex=True, height_ratios=(4, *([3] * len(runs))))
    colours = look.losses[-len(runs) :]
    for (name, ranks), colour, line in zip(runs.items(), colours, (2.6, 1.4)[-len(runs) :], strict=True):
        losses = mean_losses(ranks)
        above.plot(range(1, len(losses) + 1), losses, color=colour, linewidth=line, label=WHOSE[name])
    for step, rank in config.bad_shards.items():
        where: Any = {"xy": (step + 1, 0.45), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        above.annotate(f"inf on\nrank {rank}", xytext=(4, 0), color=look.bad, **where)
    above.set(ylabel="loss")
    above.set_title(title, loc="left")
    scales = [scale for ranks in runs.values() for trace in ranks for scale in trace.scales]
    for axes, (name, ranks) in zip(below, runs.items(), strict=True):
        axes.set_ylim(min(scales) / 1.5, max(scales) * 3)
        _draw_scales(axes, ranks, look)
        if len(runs) > 1:
            axes.set_title(f"{WHOSE[name]}: {_in_words(ranks)}", loc="left")
    below[-1].set(xlabel="step")
    below[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, *below):
        for step in config.bad_shards:
            below_legend = {"ymin": 0.0, "ymax": 0.82}
            axes.axvline(step + 1, **below_legend, color=look.bad, linewidth=1, linestyle=":", zorder=0)
        axes.set_facecolor("none")
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes is not above or len(runs) > 1:
            loc = "upper right" if axes is above else "upper left"
            place = {"loc": loc, "ncols": 3, "columnspacing": 1.2}
            axes.legend(**place, frameon=False, borderpad=0.1, borderaxespad=0.1, handlelength=1.4, handletextpad=0.5)
    return figure


def _draw_scales(axes: Any, ranks: Sequence[Trace], look: Look) -> None:
    """Draw the scale of every rank, one line if they are equal, and a cross at each step that a rank skipped."""
    agreed = len(ranks) > 1 and first_split(ranks) is None
    for rank, trace in enumerate(ranks[:1] if agreed else ranks):
        label = "both ranks" if agreed else f"rank {rank}"
        style = {"color": look.ranks[rank], "linewidth": 2.4 - 0.6 * rank}
        axes.step(range(1, len(trace.scales) + 1), trace.scales, where="post", label=label, **style)
    points = [(step + 1, trace.scales[step]) for trace in ranks for step, bad in enumerate(trace.skipped) if bad]
    if points:
        axes.plot(
            *zip(*points, strict=True),
            "x",
            color=look.bad,
            markersize=7,
            mew=2,
            clip_on=False,
            zorder=3,
            label="skipped",
        )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda scale, _: f"{scale:g}"))
    axes.set(ylabel="scale")


def _in_words(ranks: Sequence[Trace]) -> str:
    split = first_split(ranks)
    if split is None:
        return "both ranks hold the same scale" if len(ranks) > 1 else "the scale"
    return f"the ranks' scales part after step {split}"


def theme(look: Look, size: float) -> Any:
    """Return matplotlib's settings for a look, with letters of `size` points."""
    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
    return {**dict.fromkeys(names, look.text), "font.size": size, "axes.titlesize": size, "axes.titleweight": "bold"}


def save_plot(config: Config, runs: Mapping[str, Sequence[Trace]], title: str, picture: Path) -> None:
    """Draw the runs and write them as a PNG."""
    look = Look()
    with mpl.rc_context(theme(look, 10)):
        figure = draw(config, runs, title, look, 9)
        FigureCanvasAgg(figure)
        figure.savefig(picture, dpi=140)
