"""A benchmark in a process of its own, and what a test asks of what it leaves behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.tools.process_group import process_group
from tests.support.patience import PATIENCE_S, until
from tests.vllm.support.children import child_environment
from tests.vllm.support.play import SHM

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK = "KVTIER_TEST_MARK"
INTERRUPTED = (130, -signal.SIGINT)
"""A shell shows 130 for both. Python has the second where the signal comes while it ends."""


class Bench:
    """A benchmark under way. ``folder`` is where its temporary files go."""

    def __init__(
        self, process: subprocess.Popen[bytes], folder: Path, log: Path, mark: str
    ) -> None:
        self.process = process
        self.folder = folder
        self._log = log
        self._mark = f"{MARK}={mark}".encode()
        self._regions_before = set(regions())

    def wait(self) -> int:
        """Wait for the end and return the exit status. If it hangs, say where."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # faulthandler: all threads' stacks
            self.process.wait(PATIENCE_S)
            raise AssertionError(f"it hangs: {self.log()}") from None

    def log(self) -> str:
        """Return all that it has printed."""
        return self._log.read_text(errors="replace")

    def wait_for_child(self, module: str) -> None:
        """Wait until it has started a part of itself in another process."""
        until(lambda: self.has_ended() or self.runs(module), self.log)
        assert not self.has_ended(), self.log()

    def has_ended(self) -> bool:
        """Tell whether it has ended, well or badly."""
        return self.process.poll() is not None

    def runs(self, module: str) -> bool:
        """Tell whether one of its processes runs this module."""
        return any(module in _command_line(process) for process in self.processes())

    def assert_ctrl_c_ends_it(self) -> None:
        """Do what Ctrl-C does, and look at how it ends and what it leaves."""
        self.process.send_signal(signal.SIGINT)
        assert self.wait() in INTERRUPTED, self.log()
        self.assert_nothing_is_left()

    def processes(self) -> list[Path]:
        """Return its processes: they inherit its environment."""
        found = []
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    environment = (process / "environ").read_bytes()
                except OSError:
                    continue
                if self._mark in environment.split(b"\0"):
                    found.append(process)
        return found

    def assert_nothing_is_left(self) -> None:
        """No process, no folder, no shared memory."""
        assert [_command_line(process) for process in self.processes()] == []
        assert list(self.folder.iterdir()) == []
        assert set(regions()) <= self._regions_before


@contextmanager
def start_bench(tmp_path: Path, *options: str) -> Iterator[Bench]:
    """Start a benchmark with these options; it is killed at the end in any case."""
    folder, log_path, mark = tmp_path / "temporary", tmp_path / "log", str(uuid.uuid4())
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", "-m", "stress.bench", *options]
    environment = child_environment({"TMPDIR": str(folder), "PYTHONFAULTHANDLER": "1", MARK: mark})
    with (
        log_path.open("wb") as log,
        process_group(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        yield Bench(process, folder, log_path, mark)


def run_bench(tmp_path: Path, *options: str) -> str:
    """Run a benchmark to its end, and return what it printed. Nothing else may be left."""
    with start_bench(tmp_path, *options) as bench:
        assert bench.wait() == 0, bench.log()
        bench.assert_nothing_is_left()
        return bench.log()


def regions() -> list[str]:
    """Return the names of the shared memory of all engines of benchmarks."""
    return [
        path.name
        for path in SHM.iterdir()
        if path.name.startswith(("vllm_offload_bench-", "kvtier_bench-"))
    ]


def _command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
