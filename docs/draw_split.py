"""Draw `split-light.svg` and `split-dark.svg`: the demo's run of torch's scaler and of ours, FSDP1, fused AdamW."""

from pathlib import Path

import matplotlib as mpl

from scaler_triton.demo.launch import run_ranks
from scaler_triton.demo.plot import Look, draw, theme
from scaler_triton.demo.train import Config, Trace, train_rank

OUT = Path(__file__).parent
TITLE = "The loss does not show it"
LOOKS = {
    "light": Look(ground="none"),
    "dark": Look(
        text="#e6edf3",
        losses=("#f0a35e", "#79b8ff"),
        ranks=("#56d364", "#f0a35e"),
        bad="#ff7b72",
        ground="none",
    ),
}
WIDTH, LETTERS = 5.8, 11.0  # inches, points: on a page of 420 pixels they are still 10 pixels high


def write(config: Config, runs: dict[str, list[Trace]]) -> None:
    """Draw both pictures of the runs."""
    for name, look in LOOKS.items():
        # Letters stay letters, which readers' own fonts draw; the same picture every time.
        fonts = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans", "Arial"]}
        with mpl.rc_context({**theme(look, LETTERS), **fonts, "svg.hashsalt": "split"}):
            figure = draw(config, runs, TITLE, look, WIDTH)
            figure.savefig(OUT / f"split-{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    configs = {name: Config(name, "fsdp1", "adamw-fused", 48) for name in ("torch", "ours")}
    answers = {name: run_ranks(train_rank, config) for name, config in configs.items()}
    write(configs["ours"], {name: [rank.value for rank in ranks] for name, ranks in answers.items()})
