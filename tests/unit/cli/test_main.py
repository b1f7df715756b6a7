"""The command line: what it refuses, its exit status, and that it answers at once."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import scaler_triton
from scaler_triton import cli
from scaler_triton.cli import audit
from scaler_triton.cli.console import NoBar, coloured, fitted_table, missing_packages, new_bar

ROOT = Path(__file__).parents[3]


def started(*words: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, which buffers what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, *words]
    return subprocess.run(
        command, text=True, timeout=60, cwd=ROOT, env=environment, stdout=stdout, stderr=subprocess.PIPE
    )


def test_a_command_is_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["scaler-triton"])
    for nothing in ([], None):
        assert cli.main(nothing) == 2
        assert capsys.readouterr() == ("", cli.build_parser().format_help())
    for words, status in (["train"], 2), (["--version"], 0):
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert stop.value.code == status
    assert capsys.readouterr().out == f"{scaler_triton.__version__}\n"


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (AssertionError("a defect"), 70)])
def test_an_error_is_not_a_failed_check(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(audit, "run", fail)
    assert cli.main(["audit", "."]) == status
    last = capsys.readouterr().err.splitlines()[-1:]
    assert last == ([] if status == 130 else ["AssertionError: a defect"])


def test_output_that_nobody_reads_is_not_a_failed_check(tmp_path: Path) -> None:
    for buffering in ([], ["-u"]):
        reader, writer = os.pipe()
        os.close(reader)
        done = started(*buffering, "-m", "scaler_triton", "audit", str(tmp_path), stdout=writer)
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, "")


def test_no_command_imports_torch_before_it_runs() -> None:
    program = "import sys; from scaler_triton import cli; cli.build_parser().format_help(); print(*sys.modules)"
    imported = started("-c", program).stdout.split()
    assert "scaler_triton.cli" in imported
    assert not {"torch", "triton", "numpy", "matplotlib"} & {*imported}


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_module_runs_as_a_program_and_explains_each_command(command: str) -> None:
    done = started("-m", "scaler_triton", command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: python -m scaler_triton {command} ")


def test_without_tqdm_there_is_a_bar_that_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with new_bar("title", 3) as bar:
        bar.update()
        bar.set_postfix_str("text", refresh=True)
        bar.close()
    assert isinstance(bar, NoBar)
    assert capsys.readouterr() == ("", "")
    assert missing_packages(["sys", "no_such_package"]) == ["no_such_package"]


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "variables", "says"),
    [
        (Terminal(), {}, "\033[32mRIGHT\033[0m: both\n|\033[31mWRONG\033[0m: both\n"),
        (Terminal(), {"NO_COLOR": "1"}, "RIGHT: both\n|WRONG: both\n"),
        (Terminal(), {"NO_COLOR": ""}, "\033[32mRIGHT\033[0m: both\n|\033[31mWRONG\033[0m: both\n"),
        (Terminal(), {"TERM": "dumb"}, "RIGHT: both\n|WRONG: both\n"),
        (io.StringIO(), {}, "RIGHT: both\n|WRONG: both\n"),
    ],
)
def test_a_verdict_has_a_colour_on_a_terminal_that_shows_one(
    stream: io.StringIO, variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NO_COLOR": None, "TERM": "xterm", **variables}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    said = coloured("RIGHT: both\n", True, stream), coloured("WRONG: both\n", False, stream)
    assert "|".join(said) == says


def test_a_tables_widest_column_is_wrapped_on_a_narrow_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("case", "torch", "ours"), ("first", "the ranks split for good and all", "RIGHT"), ("second", "", "RIGHT")]
    whole = "\n".join([
        "case    torch                             ours",
        "------  --------------------------------  -----",
        "first   the ranks split for good and all  RIGHT",
        "second                                    RIGHT",
    ])  # fmt: skip
    monkeypatch.setenv("COLUMNS", "36")
    assert fitted_table(rows, "<<<", io.StringIO()) == whole
    assert fitted_table(rows, "<<<", Terminal()).splitlines()[2:] == [
        "first   the ranks split for  RIGHT",
        "        good and all",
        "second                       RIGHT",
    ]
    monkeypatch.setenv("COLUMNS", "80")
    assert fitted_table(rows, "<<<", Terminal()) == whole
