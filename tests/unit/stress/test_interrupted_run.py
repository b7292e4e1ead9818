"""A soak that is interrupted leaves no process, no mount, no shared memory and no folder behind.

It is this module, with its layer: it has the gate's limits, so that a busy machine doesn't end it,
and wants more requests than there will be.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stress.__main__ import main
from stress.runtime.in_process import InProcess
from stress.supervisor import supervised
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPOSITORY = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


class Soak:
    """One that runs until it is interrupted, with its folder below ``place``."""

    def __init__(self, layer: str, place: Path) -> None:
        self._place = place
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.stress.test_interrupted_run", layer],
            cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": str(place)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )

    def processes(self) -> dict[int, str]:
        """Return all that came from it, by what their environment is: number → call."""
        mark = f"TMPDIR={self._place}".encode()
        found = {}
        for pid in [each.name for each in Path("/proc").iterdir() if each.name.isdigit()]:
            with suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    call = Path(f"/proc/{pid}/cmdline").read_bytes()
                    found[int(pid)] = call.replace(b"\0", b" ").decode(errors="replace")
        return found

    def mounts(self) -> list[str]:
        lines = Path("/proc/self/mounts").read_text().splitlines()
        return [line for line in lines if str(self._place) in line]

    def folders(self) -> list[Path]:
        """Return its folders. Python tries its temporary folder with a file, and may leave that.

        A signal that comes just then, before there is a supervisor, ends the process between the
        making of that file and its removal.
        """
        return [each for each in self._place.iterdir() if each.is_dir()]

    def log(self) -> str:
        return "".join(each.read_text() for each in self._place.glob("*/log"))


def has_begun(soak: Soak) -> bool:
    return bool(soak.processes())


def has_a_folder(soak: Soak) -> bool:
    return bool(soak.folders())


def starts_a_tier(soak: Soak) -> bool:
    return any("kvtier-3:" in each for each in soak.processes().values())


def serves_under_faults(soak: Soak) -> bool:
    return soak.log().count("fault") > 3


@pytest.fixture
def started() -> Iterator[list[Soak]]:
    soaks: list[Soak] = []
    yield soaks
    for soak in soaks:
        soak.process.kill()
        soak.process.communicate()


@pytest.mark.parametrize(
    ("layer", "moment", "number"),
    [
        ("runtime", has_begun, signal.SIGTERM),
        ("remote", has_a_folder, signal.SIGTERM),
        pytest.param("filesystem", starts_a_tier, signal.SIGINT, marks=needs("fuse")),
        pytest.param("filesystem", serves_under_faults, signal.SIGTERM, marks=needs("fuse")),
        # What these leave is among what the others do: the runtime layer has no mounts.
        pytest.param("runtime", has_a_folder, signal.SIGINT, marks=pytest.mark.long),
        pytest.param("runtime", serves_under_faults, signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(
            "filesystem", has_a_folder, signal.SIGTERM, marks=[needs("fuse"), pytest.mark.long]
        ),
    ],
)
def test_an_interrupted_soak_leaves_nothing_behind(
    layer: str,
    moment: Callable[[Soak], bool],
    number: signal.Signals,
    tmp_path: Path,
    started: list[Soak],
) -> None:
    soak = Soak(layer, tmp_path)
    started.append(soak)
    until(lambda: moment(soak) or soak.process.poll() is not None)
    pids = list(soak.processes())
    os.killpg(soak.process.pid, number)  # as a terminal's Ctrl-C does
    output, _ = soak.process.communicate(timeout=PATIENCE_S)
    assert soak.process.returncode in (128 + number, -number), output
    assert soak.processes() == {}
    assert soak.mounts() == []
    assert soak.folders() == []
    shared = [each.name for each in Path("/dev/shm").iterdir()]
    of_these = re.compile(rf"kvtier-({'|'.join(map(str, pids))})(?!\d)")
    assert [name for name in shared if of_these.search(name)] == []


def endless() -> int:
    """Run a soak whose layer wants more than it can get; returns its exit status."""
    layer = sys.argv[1]
    import_module(f"stress.{layer}.layer")
    layers = [InProcess]
    for each in layers:
        layers += each.__subclasses__()
        each.requests_min = 10**9
    return main(["--gate", "--layer", layer])


if __name__ == "__main__":
    sys.exit(supervised(endless))
