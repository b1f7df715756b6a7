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

from scaler_triton import info, tune
from scaler_triton._version import __version__
from scaler_triton.auditing import command as audit
from scaler_triton.demo import command as demo

COMMANDS = {"demo": demo, "info": info, "tune": tune, "audit": audit}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    parser = argparse.ArgumentParser(
        prog="python -m scaler_triton", description="A gradient scaler for fp16 training whose ranks agree."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0 good, 1 a failed check, 2 wrong usage, 70 an error that nobody foresaw, 130 interrupted, 141 nobody read on.

    Args:
        arguments: the words after the program's name; those of this process by default.
    """
    parser = build_parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        return 2
    parsed = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does: no name of a file may end a command
    try:
        status = int(parsed.run(parsed))
        print(end="", flush=True)
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has seen enough; 1 would be a failed check
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the last flush must not fail, too
        return 141
    except Exception:  # Python's own status for it, 1, would be a failed check
        traceback.print_exc()
        return 70
