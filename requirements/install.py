"""Install lists of requirements with pip, and say how far that is.

    .venv/bin/python requirements/install.py [pip's options] -r requirements/dev.txt

pip installs hundreds of megabytes without a word, or prints a thousand lines. This prints one line
every ten seconds, and what pip said if it fails.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Final

EVERY_S: Final = 10.0
TAIL_LINES: Final = 20  #: of what pip said
PIP: Final = ["-m", "pip", "install", "--no-input", "--no-deps", "--no-compile"]


def packages(path: Path) -> int:
    """Count what a list names, with the lists that it includes."""
    lines = path.read_text().splitlines()
    included = [path.parent / line.split()[1] for line in lines if line.startswith("-r ")]
    return sum("==" in line and line[0] != "#" for line in lines) + sum(map(packages, included))


def installed(target: Path) -> int:
    """Count what is there."""
    return len(list(target.glob("*.dist-info")))


def main(arguments: list[str]) -> int:
    """Return pip's exit status."""
    lists = [Path(after) for each, after in itertools.pairwise(arguments) if each == "-r"]
    total = sum(map(packages, lists))
    target = Path(sysconfig.get_path("purelib"))
    command = [sys.executable, *PIP, "--progress-bar", "off", *arguments]
    before, began_s = installed(target), time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None
        said: list[str] = []
        reading = threading.Thread(target=lambda: said.extend(pip.stdout or ()), daemon=True)
        reading.start()
        while True:
            reading.join(EVERY_S)
            if not reading.is_alive():
                break
            # pip fetches all of it, then installs all of it: each is about half of the time.
            fetched = sum(bool(re.match(r"Collecting |Requirement already", each)) for each in said)
            share = (fetched + installed(target) - before) / (2 * total) if total else 0.0
            passed_s = time.monotonic() - began_s
            left = f", about {passed_s * (1 - share) / share:.0f} s left" if share > 0.1 else ""
            print(f"   {lists[0].name}: {share:.0%} after {passed_s:.0f} s{left}", flush=True)
    if pip.returncode:
        sys.stderr.writelines(said[-TAIL_LINES:])
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
