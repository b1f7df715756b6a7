"""Runs the tests in several processes of pytest side by side: what uses the GPU in the first ones, the rest beside it.

tests/conftest.py tells by SHARD which tests are whose. The rest does not see the GPU and runs as where there is none.
OUT names a folder for the log and the report, which take in those of the processes; all arguments but --shards go to
pytest.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

MOST = 12  # processes
GRACE = 6.0  # seconds to write a report once interrupted; whoever ends this process gives it ten
TAIL = 60  # lines
WELL = (0, 5)  # pytest's statuses: all passed; no test in this shard
# For shards without the GPU. No kernels are simulated where they run natively beside them.
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "NEEDS_GPU": "", "SIMULATE": ""}

interrupted = False


class Shard:
    """One process of pytest, with its log and report."""

    def __init__(self, number: int, count: int, out: Path, arguments: list[str]) -> None:
        self.name = f"{number}/{count}"
        self.log, self.report = out / f"tests-{number}.log", out / f"junit-{number}.xml"
        self.status: int | None = None
        self.report.unlink(missing_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, f"--junitxml={self.report}"]
        threads = str(max(1, (os.cpu_count() or 1) // count))
        hidden = HIDDEN if number >= on_gpu(count) else {}
        variables = {"OMP_NUM_THREADS": threads, **os.environ, "SHARD": self.name, **hidden}
        with self.log.open("wb") as log:
            try:  # with a group of its own, what it started can be ended with it
                self._process = subprocess.Popen(
                    command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            except OSError as error:
                log.write(f"did not start: {error}\n".encode())
        if self._process is None:
            self._end(-1)

    def has_ended(self) -> bool:
        """Tell whether it has, and print how when it just did."""
        if self.status is None and self._process is not None and self._process.poll() is not None:
            self._end(self._process.returncode)
        return self.status is not None

    def interrupt(self) -> None:
        """Have pytest stop and write its report."""
        if self._process is not None and self.status is None:
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it and what it started."""
        if self._process is not None and self.status is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _end(self, status: int) -> None:
        self.status = status
        lines = self.log.read_text(errors="replace").splitlines() or ["its log is empty"]
        print(f"shard {self.name}, status {status}: {lines[-1].strip('= ')}", flush=True)
        if status not in WELL:
            print("\n".join(lines[-TAIL:]), flush=True)


def main(words: list[str] | None = None) -> int:
    """Run; return 0, or 1 if a shard did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--shards", type=int, default=default_count(), help="at least 2; here by default %(default)s")
    options, arguments = parser.parse_known_args(words)
    out = Path(os.environ.get("OUT", "out"))
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGINT, note)
    count = max(2, options.shards)
    print(f"{count} shards, each with a log until all have ended: {out}/tests-*.log", flush=True)
    shards = [Shard(number, count, out, arguments) for number in range(count)]
    wait_for(shards)
    for shard in shards:
        shard.interrupt()
    wait_for(shards, GRACE)
    for shard in shards:
        shard.kill()
    wait_for(shards, GRACE)
    write_log(out / "tests.log", shards)
    write_report(out / "junit.xml", [shard.report for shard in shards])
    return 0 if all(shard.status in WELL for shard in shards) else 1


def by_itself(count: int) -> int:
    """Return how many of `count` shards share the tests that use the GPU within their own process."""
    return 3 if count > 5 else 1


def on_gpu(count: int) -> int:
    """Return how many shards see the GPU: of three or more one has the processes that use it, of eight or more two."""
    return min(by_itself(count) + 1 + (count > 7), count - 1)


def default_count() -> int:
    """Return three processes for each four cores: at least two, at most `MOST`."""
    return max(2, min(MOST, (os.cpu_count() or 1) * 3 // 4))


def note(*args: object) -> None:
    """Note an interrupt: as an exception the second of two, as `timeout` sends them, could come in between."""
    global interrupted
    interrupted = True


def wait_for(shards: Iterable[Shard], seconds: float | None = None) -> None:
    """Wait until all have ended, for as long as is given or until the interrupt."""
    end = None if seconds is None else time.monotonic() + seconds
    while [shard for shard in shards if not shard.has_ended()]:
        if interrupted if end is None else time.monotonic() > end:
            return
        time.sleep(0.1)


def write_log(path: Path, shards: Iterable[Shard]) -> None:
    """Move all logs into one."""
    with path.open("wb") as log:
        for shard in shards:
            log.write(f"\n== shard {shard.name}, status {shard.status}\n".encode())
            log.write(shard.log.read_bytes())
            shard.log.unlink()


def write_report(path: Path, parts: Iterable[Path]) -> None:
    """Move those reports into one that are there and whole."""
    whole = ElementTree.Element("testsuites", name="pytest tests")
    for part in parts:
        try:
            whole.extend(ElementTree.parse(part).getroot())
            part.unlink()
        except (OSError, ElementTree.ParseError) as error:
            print(f"no report in {part}: {error}", flush=True)
    ElementTree.ElementTree(whole).write(path, encoding="utf-8", xml_declaration=True)


if __name__ == "__main__":
    sys.exit(main())
