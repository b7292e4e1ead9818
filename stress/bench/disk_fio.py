"""``fio`` beside the tiers: the usual yardstick of a disk, at the same block size and depth."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import KVTierError
from kvtier.tools.bench.call_legs import STORE
from kvtier.tools.process_group import process_group
from stress.bench.disk_legs import DiskLeg, DiskSetup

if TYPE_CHECKING:
    from pathlib import Path

FIO: Final = "fio"
ENGINES: Final = ("io_uring", "libaio")  #: the first that the kernel lets it use
REMEDY: Final = "Install it (apt-get install fio, or dnf install fio) for its column."

_PROBE_BYTES: Final = 1 << 20
_LOG_CHARACTERS: Final = 500


class FioFailed(KVTierError):
    """Raised when fio ends badly. The text ends with its output."""


class Fio:
    """Writes and reads one file of a leg's bytes in order, as many blocks at once as threads."""

    def __init__(self, setup: DiskSetup) -> None:
        """Find an engine that works. Raises ``FioFailed`` if fio is missing, or none does."""
        program = shutil.which("fio")
        if program is None:
            raise FioFailed(f"fio not found. {REMEDY}")
        self.folder = setup.folder / FIO
        self.folder.mkdir()
        self._program = program
        self._setup = setup
        self._engine = self._find_engine()

    def run(self, kind: str) -> DiskLeg:
        """Write or read the file once. It has no jobs to be timed."""
        direction = "write" if kind == STORE else "read"
        found = self._run(self._engine, direction, self._setup.leg_bytes, "file")[direction]
        return DiskLeg(found["io_bytes"] / found["bw_bytes"], [], 0.0, None)

    def __str__(self) -> str:
        """Return what it calls itself, and how it runs."""
        version = _output([self._program, "--version"], self.folder).strip()
        return f"{version}, {self._engine}, depth {self._setup.threads}"

    def _find_engine(self) -> str:
        refused: FioFailed | None = None
        for engine in ENGINES:
            try:
                self._run(
                    engine, "write", max(_PROBE_BYTES, self._setup.memory.block_bytes), "probe"
                )
            except FioFailed as problem:
                refused = problem
            else:
                return engine
        raise FioFailed(f"fio runs with none of {', '.join(ENGINES)}: {refused}")

    def _run(self, engine: str, direction: str, size: int, name: str) -> dict[str, Any]:
        arguments = [
            self._program,
            "--name=bench",
            f"--filename={name}",
            f"--size={size}",
            f"--bs={self._setup.memory.block_bytes}",
            f"--rw={direction}",
            f"--direct={int(self._setup.takes_direct)}",
            f"--ioengine={engine}",
            f"--iodepth={self._setup.threads}",
            "--fallocate=posix",
            "--output-format=json",
        ]
        text = _output(arguments, self.folder)
        try:
            report: dict[str, Any] = json.loads(text[text.index("{") :])["jobs"][0]
        except (ValueError, LookupError, RecursionError) as problem:
            raise FioFailed(f"fio's report can't be read: {text[:_LOG_CHARACTERS]}") from problem
        return report


def _output(arguments: list[str], folder: Path) -> str:
    """Run it to its end and return its stdout. It is killed if this call is left otherwise."""
    fio = process_group(
        arguments,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with fio as process:
        output, errors = (printed.decode(errors="replace") for printed in process.communicate())
    if process.returncode:
        output = f"{output}{errors}".strip()[-_LOG_CHARACTERS:]
        raise FioFailed(f"fio ended with status {process.returncode}: {output}")
    return output
