"""The command line: `python -m scaler_triton COMMAND`.

A command is a module with `HELP`, `add_arguments(parser)` and `run(arguments) -> exit status`. None of them
imports torch before `run`, so that `--help` answers at once.
"""

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from scaler_triton import __version__

COMMANDS = {
    "demo": "scaler_triton.demo.command",
    "info": "scaler_triton.cli.info",
    "tune": "scaler_triton.cli.tune",
    "audit": "scaler_triton.cli.audit",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    parser = argparse.ArgumentParser(
        prog="python -m scaler_triton", description="A gradient scaler for fp16 training whose ranks agree."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = import_module(module)
        own = commands.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0 success, 1 a failed check, 2 wrong usage, 3 a proof that cannot run here, 70 an unexpected error, 130 interrupted,
    141 the reader of a pipe left.

    Args:
        arguments: the words after the program's name; default: those of this process.
    """
    parser = build_parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        return 2
    parsed = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name that cannot be encoded must not end a command
    try:
        status = int(parsed.run(parsed))
        print(end="", flush=True)
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's own flush at exit fails, too
        return 141
    except Exception:  # Python would exit with 1, which means a failed check here
        traceback.print_exc()
        return 70
