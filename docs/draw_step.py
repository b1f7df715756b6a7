"""Draw `step.svg`: what the scaler does in one clipped FSDP2 step, torch's beside ours.

Counted, not timed: torch's ops, those of 2.13, and our launches, for one dtype on one GPU with a plain AdamW.
`tests/nightly/simulator/test_traffic.py` counts the bytes of our passes. A pass is as high as the bytes it moves per
fp32 element; everything else has one small height. Time goes down, so that letters can be read on a phone.
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

OUT = Path(__file__).parent / "step.svg"
COLOURS = {"pass": "#9ecae1", "small": "#d9d9d9", "collective": "#fdae6b", "wait": "#e34a33", "theirs": "#f7f7f7"}
SMALL = 2.4  # the height of whatever is no pass, in bytes per element
GAP = 0.25  # between two boxes, of the same unit


@dataclass(frozen=True)
class Work:
    """One box: a pass over all gradients, tiny launches, a collective, a host wait, or what others do."""

    kind: str
    text: str
    count: int = 1
    moved: int = 0  # bytes per fp32 element

    @property
    def height(self) -> float:
        """How high its box is."""
        return self.moved or SMALL


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
    Work("pass", "check, norm", moved=4),
    Work("small", "sum up"),
    Work("collective", "both"),
    Work("pass", "unscale, clip", moved=8),
    Work("small", "copy"),
    Work("wait", "flag"),
    Work("theirs", "step"),
    Work("small", "update"),
]


def lane(axes: Axes, x: float, name: str, works: list[Work]) -> None:
    """Draw one step from top to bottom, and its sums at the end."""
    y = 0.0
    for work in works:
        axes.bar(x, work.height - GAP, bottom=y + GAP / 2, width=0.9, color=COLOURS[work.kind])
        label = f"{work.count} x {work.text}" if work.kind == "small" and work.count > 1 else work.text
        axes.text(x, y + work.height / 2, label, ha="center", va="center_baseline", color="black")
        y += work.height
    axes.text(x, -1, name, ha="center", va="bottom", weight="bold")
    axes.text(x, y + 0.5, sums(works), ha="center", va="top")


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
    figure, axes = plt.subplots(figsize=(5.8, 6.6), layout="constrained")
    lane(axes, 0.0, "torch", TORCH)
    lane(axes, 1.0, "ours", OURS)
    names = {"pass": "pass over the gradients", "small": "tiny launch", "collective": "collective", "wait": "host wait"}
    handles = [mpl.patches.Patch(color=COLOURS[kind], label=name) for kind, name in names.items()]
    figure.legend(handles=handles, ncols=2, loc="outside lower center", frameon=False)
    axes.set_xlim(-0.55, 1.55)
    axes.invert_yaxis()
    axes.axis("off")
    figure.savefig(OUT, metadata={"Date": None})


if __name__ == "__main__":
    draw()
