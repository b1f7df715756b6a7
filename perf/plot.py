"""The pictures of a CSV: the host's cost by number of gradients, each goal's ratio, the price of a whole step."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from perf.goals import answers
from perf.rows import Entry, Row

TORCH, OURS, GOAL, BAD = "#8c8c8c", "#1f4e79", "#2e8b57", "#b22222"
PATHS = {"cuda": "on the GPU", "stub": "GPU path over a driver that computes nothing", "cpu": "CPU path"}


def save_plot(entries: Sequence[Entry], picture: Path) -> None:
    """Draw what the entries of one machine allow and write it as an SVG, the same one for the same entries.

    Args:
        entries: of one CSV.
        picture: the file.
    """
    panels: list[Callable[[Any, Sequence[Entry]], None]] = [_draw_ratios]
    if _host_path(entries):
        panels.insert(0, _draw_host)
    if _overheads(entries):
        panels.append(_draw_overheads)
    figure = Figure(figsize=(6.2 * len(panels), 5.4), layout="constrained")
    FigureCanvasSVG(figure)
    for axes, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes, entries)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_caption(entries), x=0.01, ha="left", fontsize=9, color="#555555")
    picture.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "perf"}):
        figure.savefig(picture, metadata={"Date": None})


def _caption(entries: Sequence[Entry]) -> str:
    machine = entries[0].machine
    versions = f"torch {machine.torch}, triton {machine.triton}, Python {machine.python}"
    return f"{machine.device}, {versions}, {machine.date}; medians, p20 to p80"


def _host_path(entries: Sequence[Entry]) -> str:
    """Return the path whose host times are drawn: a GPU's before the others."""
    cases = {entry.row.case for entry in entries if entry.row.bench == "host"}
    return next((path for path in PATHS if any(case.endswith(f", {path}") for case in cases)), "")


def _draw_host(axes: Any, entries: Sequence[Entry]) -> None:
    path = _host_path(entries)
    for kind, style in (("plain", "-"), ("DTensor", "--")):
        for subject, color in (("torch", TORCH), ("ours", OURS)):
            points = _host_points(entries, rf"(\d+) {kind}, same addresses, {path}", subject)
            if points:
                counts = [count for count, _ in points]
                low, mid, high = ([getattr(row, p) for _, row in points] for p in ("p20", "p50", "p80"))
                axes.plot(counts, mid, style, color=color, marker="o", markersize=3, label=f"{subject}, {kind}")
                axes.fill_between(counts, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="gradients", ylabel="unscale_ on the host (us)")
    _plain_numbers(axes.xaxis, axes.yaxis)
    axes.set_title(f"Host time of one unscale_, {PATHS[path]}", loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8, handlelength=3)


def _host_points(entries: Sequence[Entry], pattern: str, subject: str) -> list[tuple[int, Row]]:
    rows = [entry.row for entry in entries if (entry.row.bench, entry.row.metric) == ("host", "unscale_")]
    found = [(re.fullmatch(pattern, row.case), row) for row in rows if row.subject == subject]
    return sorted(((int(match[1]), row) for match, row in found if match), key=lambda point: point[0])


def _draw_ratios(axes: Any, entries: Sequence[Entry]) -> None:
    """Draw each answered goal's time over torch's, its worst case."""
    drawn = [a for a in answers(entries) if a.rows and a.goal.subject == "ours / torch"]
    for place, answer in enumerate(drawn):
        row = answer.rows["ours / torch"]
        color = OURS if answer.met == "yes" else BAD
        axes.plot([row.p20, row.p80], [place, place], color=color, linewidth=2, alpha=0.5)
        axes.plot(row.p50, place, "o", color=color, markersize=6)
        axes.plot(answer.goal.limit, place, "|", color=GOAL, markersize=14, markeredgewidth=2)
    axes.axvline(1, color=TORCH, linewidth=1)
    axes.set_yticks(range(len(drawn)), [answer.goal.question for answer in drawn], fontsize=8)
    axes.set(xscale="log", xlabel="our time / torch's", ylim=(len(drawn) - 0.4, -0.6))
    _plain_numbers(axes.xaxis)
    axes.xaxis.set_minor_formatter(FuncFormatter(_number_unless_crowded))
    axes.tick_params(which="minor", labelsize=8)
    axes.set_title("Worst case of each goal (green: goal; red: missed)", loc="left", fontsize=10)
    axes.grid(axis="x", alpha=0.25)


def _plain_numbers(*log_axes: Any) -> None:
    for axis in log_axes:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _number_unless_crowded(value: float, _: Any) -> str:
    text = f"{value:g}"
    return text if text[-1] in "235" else ""


def _overheads(entries: Sequence[Entry]) -> dict[str, dict[str, Row]]:
    """Return whole steps over steps without a scaler, by case and subject; on GPUs only."""
    found: dict[str, dict[str, Row]] = {}
    for row in (entry.row for entry in entries):
        if (row.bench, row.metric) == ("step", "step") and row.subject.endswith("/ none") and "cpu" not in row.case:
            found.setdefault(row.case, {})[row.subject.split()[0]] = row
    return found


def _draw_overheads(axes: Any, entries: Sequence[Entry]) -> None:
    overheads = _overheads(entries)
    for offset, (subject, color) in zip((-0.18, 0.18), (("torch", TORCH), ("ours", OURS)), strict=True):
        rows = [(place, case[subject]) for place, case in enumerate(overheads.values()) if subject in case]
        places, percents = [place + offset for place, _ in rows], [100 * (row.p50 - 1) for _, row in rows]
        axes.barh(places, percents, height=0.34, color=color, label=subject)
        low, high = ([100 * (getattr(row, p) - 1) for _, row in rows] for p in ("p20", "p80"))
        axes.hlines(places, low, high, color="black", linewidth=1, alpha=0.5)
    axes.axvline(0.5, color=GOAL, linewidth=1.5)
    axes.set_yticks(range(len(overheads)), list(overheads), fontsize=8)
    axes.set(xlabel="% over a step without a scaler (median)", ylim=(len(overheads) - 0.4, -0.6))
    axes.set_title("What a scaler adds to a whole step (green: goal)", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
