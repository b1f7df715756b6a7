"""The command line: what it refuses, its exit status, and that it answers at once."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import scaler_triton
from scaler_triton import cli
from scaler_triton.cli import audit
from scaler_triton.cli.console import NoBar, fitted, missing_packages, new_bar

ROOT = Path(__file__).parents[3]


def started(words: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [sys.executable, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run(command, text=True, timeout=60, **pipes)  # type: ignore[call-overload, no-any-return]


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
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for buffering in ([], ["-u"]):
        reader, writer = os.pipe()
        os.close(reader)
        words = [*buffering, "-m", "scaler_triton", "audit", str(tmp_path)]
        done = started(words, stdout=writer, cwd=ROOT, env=environment)
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, "")


def test_no_command_imports_torch_before_it_runs() -> None:
    program = (
        "import sys\n"
        "from scaler_triton import cli\n"
        "cli.build_parser().format_help()\n"
        "heavy = {'torch', 'triton', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    done = started(["-c", program], cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_module_runs_as_a_program_and_explains_each_command(command: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = started(["-m", "scaler_triton", command, "--help"], cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: python -m scaler_triton {command} ")


def test_lines_break_between_words_in_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    text = "one line, short\n\n  a long line, some/long/path/of-a/checkpoint, its end"
    assert fitted(text, SimpleNamespace(isatty=lambda: False)) == text  # type: ignore[arg-type]
    assert fitted(text, SimpleNamespace(isatty=lambda: True)).splitlines() == [  # type: ignore[arg-type]
        "one line, short",
        "",
        "  a long line,",
        "    some/long/path/of-a/checkpoint,",
        "    its end",
    ]


def test_without_tqdm_there_is_a_bar_that_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with new_bar("title", 3) as bar:
        bar.update()
        bar.set_postfix_str("text", refresh=True)
    assert isinstance(bar, NoBar)
    assert capsys.readouterr() == ("", "")
    assert missing_packages(["sys", "no_such_package"]) == ["no_such_package"]
