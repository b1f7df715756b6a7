"""Draw `step.svg`: what the scaler does in one clipped FSDP2 step, torch's beside ours.

Counted, not timed: torch's ops, those of 2.13, and our launches, for one dtype on one GPU with a plain AdamW.
`tests/nightly/simulator/test_traffic.py` counts the bytes of our passes. Widths of passes are the bytes they move per
fp32 element; everything else is drawn in the same small width.
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

OUT = Path(__file__).parent / "step.svg"
COLOURS = {"pass": "#9ecae1", "small": "#d9d9d9", "collective": "#fdae6b", "wait": "#e34a33", "theirs": "#f7f7f7"}
SMALL = 1.0  # the width of whatever is no pass, in bytes per element
GAP = 0.1  # between two boxes, of the same unit


@dataclass(frozen=True)
class Work:
    """One box: a pass over all gradients, tiny launches, a collective, a host wait, or what others do."""

    kind: str
    text: str
    count: int = 1
    moved: int = 0  # bytes per fp32 element

    @property
    def width(self) -> float:
        """How wide its box is."""
        return self.moved or SMALL * (2.6 if self.kind == "theirs" else 1.0)


TORCH = [
    Work("theirs", "backward"),
    Work("small", "setup", 6),
    Work("pass", "unscale, check", moved=8),
    Work("small", "copy"),
    Work("collective", "flag"),
    Work("small", "copy"),
    Work("small", "zeros"),
    Work("pass", "norm", moved=4),
    Work("small", "sum up", 4),
    Work("collective", "norm"),
    Work("small", "factor", 6),
    Work("pass", "clip", moved=8),
    Work("small", "copy"),
    Work("wait", "flag"),
    Work("theirs", "step"),
    Work("small", "update"),
]

OURS = [
    Work("theirs", "backward"),
    Work("pass", "check,\nnorm", moved=4),
    Work("small", "sum up"),
    Work("collective", "both"),
    Work("pass", "unscale, clip", moved=8),
    Work("small", "copy"),
    Work("wait", "flag"),
    Work("theirs", "step"),
    Work("small", "update"),
]


def lane(axes: Axes, y: float, name: str, works: list[Work]) -> None:
    """Draw one step from left to right, and its sums at the end."""
    x = 0.0
    for work in works:
        axes.barh(y, work.width - GAP, left=x + GAP / 2, height=0.5, color=COLOURS[work.kind])
        label = f"{work.count} x {work.text}" if work.kind == "small" and work.count > 1 else work.text
        size = {"fontsize": 7, "rotation": 90 if work.width < 2 else 0}
        axes.text(x + work.width / 2, y, label, ha="center", va="center", color="black", **size)
        x += work.width
    axes.text(-0.4, y, name, ha="right", va="center", fontsize=10, weight="bold")
    axes.text(x + 0.5, y, sums(works), ha="left", va="center", fontsize=8)


def sums(works: list[Work]) -> str:
    """Return what a lane adds up to."""
    count = {kind: sum(work.count for work in works if work.kind == kind) for kind in COLOURS}
    moved = sum(work.moved for work in works)
    return "\n".join(
        [
            f"{moved} bytes an element",
            f"{count['pass'] + count['small']} launches or copies",
            f"{count['collective']} collective{'s' * (count['collective'] > 1)}",
            f"{count['wait']} wait",
        ]
    )


def draw() -> None:
    """Write the picture."""
    plt.style.use(OUT.with_name("pages.mplstyle"))
    mpl.rcParams["svg.hashsalt"] = "step"  # the same picture every time
    figure, axes = plt.subplots(figsize=(11, 2.9), layout="constrained")
    lane(axes, 1.0, "torch", TORCH)
    lane(axes, 0.25, "ours", OURS)
    names = {"pass": "pass over the gradients", "small": "tiny launch", "collective": "collective", "wait": "host wait"}
    handles = [mpl.patches.Patch(color=COLOURS[kind], label=name) for kind, name in names.items()]
    axes.legend(handles=handles, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 0.0), frameon=False, fontsize=8)
    axes.set_xlim(-3, 44)
    axes.axis("off")
    figure.savefig(OUT, metadata={"Date": None})


if __name__ == "__main__":
    draw()
