"""Debian's packages that tests need: which are missing, and their installation.

    python requirements/debian.py

installs the missing ones of ``requirements/debian.list``, as root on Debian or Ubuntu. Elsewhere it
does nothing: the tests that need them are left out by name. Runs before anything is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

LIST: Final = Path(__file__).with_name("debian.list")
_REFRESH: Final = ["apt-get", "update", "-qq"]
_INSTALL: Final = ["apt-get", "install", "-qq", "-y", "--no-install-recommends"]


class Package(NamedTuple):
    """One line of the list."""

    name: str
    program: str
    needed_by: str

    def is_missing(self) -> bool:
        """Whether there is no such program, from wherever it might have come."""
        return shutil.which(self.program) is None


def packages() -> list[Package]:
    """Read the list."""
    lines = LIST.read_text().splitlines()
    return [Package(*line.split(maxsplit=2)) for line in lines if not line.startswith("#")]


def install(missing: list[str]) -> int:
    """Install packages; returns apt-get's exit status. A failure is a warning: see above."""
    print("==", *_INSTALL[:2], *missing, "(about half a minute)", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (_REFRESH, [*_INSTALL, *missing]):
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            print(f"{done.stdout}\n{' '.join(command)} failed: see above", file=sys.stderr)
            return done.returncode
    return 0


if __name__ == "__main__":
    wanted = [each.name for each in packages() if each.is_missing()]
    if wanted and os.geteuid() == 0 and shutil.which("apt-get"):
        install(wanted)
