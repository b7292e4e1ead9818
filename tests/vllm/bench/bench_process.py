"""A benchmark in a process of its own, and what a test asks of what it leaves behind: nothing."""

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
from tests.support.printed import options_of
from tests.vllm.support.children import child_environment
from tests.vllm.support.play import SHM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MARK = "KVTIER_TEST_MARK"
BENCH_S_MAX = 5 * PATIENCE_S  #: some start five processes that import vLLM, one after the other
INTERRUPTED = (130, -signal.SIGINT)
"""A shell shows 130 for both. Python has the second where the signal comes while it ends."""


def printed_bench(page: str, name: str) -> list[str]:
    """Return a benchmark and its options, as a page has it; those given behind them replace them.

    Of several commands: the first one.
    """
    return next(each for each in options_of(page, "stress.bench") if each[:1] == [name])


def run_bench(tmp_path: Path, *options: str) -> str:
    """Run a benchmark to its end, and return what it printed."""
    with _started(tmp_path, *options) as (process, log, _):
        assert process.wait(BENCH_S_MAX) == 0, log()
        return log()


def interrupt_bench(tmp_path: Path, child: str, *options: str) -> None:
    """Do what Ctrl-C does once the module ``child`` runs in a process of the benchmark's."""
    with _started(tmp_path, *options) as (process, log, running):
        until(lambda: process.poll() is not None or any(child in each for each in running()), log)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) in INTERRUPTED, log()


@contextmanager
def _started(
    tmp_path: Path, *options: str
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str], Callable[[], list[str]]]]:
    """Start one; at the end there is no process, no folder, and no shared memory of it.

    Yields it, its log, and the command lines of its processes, which inherit its environment.
    """
    folder, log_path, mark = tmp_path / "temporary", tmp_path / "log", str(uuid.uuid4())
    folder.mkdir()
    before = _regions()
    command = [sys.executable, "-W", "ignore", "-m", "stress.bench", *options]
    environment = child_environment({"TMPDIR": str(folder), "PYTHONFAULTHANDLER": "1", MARK: mark})
    with (
        log_path.open("wb") as log,
        process_group(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        yield process, lambda: log_path.read_text(errors="replace"), lambda: _running(mark)
        assert _running(mark) == []
    assert list(folder.iterdir()) == []
    assert _regions() <= before


def _regions() -> set[str]:
    of_ours = ("vllm_offload_bench-", "kvtier_bench-")
    return {path.name for path in SHM.iterdir() if path.name.startswith(of_ours)}


def _running(mark: str) -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
    return found
