"""`python -m scaler_triton demo`: the arguments, and what is checked before torch is imported."""

import argparse
import shutil
import sys
from pathlib import Path

from scaler_triton.cli.console import complain, missing_packages, requested_backend

HELP = (
    "train a small transformer with torch's scaler and with ours, and check whether its ranks agree; or prove a defect"
)
MODES = {
    "single": "one process, nothing sharded",
    "ddp": "DistributedDataParallel",
    "fsdp1": "FullyShardedDataParallel (default)",
    "fsdp2": "fully_shard",
}
OTHER_PICTURES = (".bmp", ".eps", ".gif", ".jpeg", ".jpg", ".pdf", ".ps", ".svg", ".tif", ".tiff", ".webp")
FEWEST_STEPS, MOST_STEPS = 6, 128  # three are skipped, the loss must fall in others; rounding drives long runs apart


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's arguments."""
    parser.add_argument("--scaler", choices=("both", "ours", "torch"), default="both", help="default: both")
    modes = parser.add_mutually_exclusive_group()
    for mode, what in MODES.items():
        modes.add_argument(f"--{mode}", dest="mode", action="store_const", const=mode, default="fsdp1", help=what)
    optimizers = ("adamw", "adamw-fused", "sgd")
    parser.add_argument("--optimizer", choices=optimizers, default="adamw-fused", help="default: adamw-fused")
    parser.add_argument("--steps", type=_step_count, default=48, metavar="N", help="6 to 128, default: 48")
    parser.add_argument("--out", type=Path, help="a .png file or a folder, default: demo.png")
    parser.add_argument("--prove", metavar="CASE", help="show a known defect of torch and nothing else; or: list, all")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo or a proof and return the exit status."""
    if arguments.prove:
        return _prove(arguments)
    picture = None
    if not (missing := missing_packages(["matplotlib"])):
        out = arguments.out or Path("demo.png")
        if out.suffix.lower() in OTHER_PICTURES and not out.is_dir():
            return complain(f"--out {out}: must be a .png file or a folder")
        try:
            picture = picture_path(out)
        except OSError as error:
            return complain(f"--out {out}: cannot write there: {error.strerror}")
    elif arguments.out:
        return complain(f"--out {arguments.out}: a picture needs {', '.join(missing)}: pip install {' '.join(missing)}")
    from scaler_triton.demo.show import show

    if requested_backend() is None:
        return 2
    return show(arguments.scaler, arguments.mode, arguments.optimizer, arguments.steps, picture)


def picture_path(out: Path) -> Path:
    """Return the file the plot goes to, `out` or one in it; its folder exists then and can be written to."""
    picture = out if out.suffix.lower() == ".png" else out / "demo.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.open("ab").close()
    if not picture.stat().st_size:
        picture.unlink()
    return picture


def _prove(arguments: argparse.Namespace) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    given = {key: value for key, value in vars(arguments).items() if value != defaults.get(key, value)}
    name = given.pop("prove")
    if given:
        ignored = ", ".join(f"--{value if key == 'mode' else key}" for key, value in given.items())
        return complain(f"--prove takes no other option, got {ignored}")
    from scaler_triton.demo import proofs

    if name == "list":
        print(proofs.list_cases(shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
        return 0
    if name != "all" and name not in proofs.CASES:
        return complain(f"--prove {name}: no such case; one of {', '.join(proofs.CASES)}, list, all")
    if requested_backend() is None:
        return 2
    return proofs.prove(list(proofs.CASES.values()) if name == "all" else [proofs.CASES[name]])


def _step_count(word: str) -> int:
    if not word.isdecimal() or not FEWEST_STEPS <= int(word) <= MOST_STEPS:
        raise argparse.ArgumentTypeError(f"from {FEWEST_STEPS} to {MOST_STEPS} steps, got {word}")
    return int(word)
