"""A large capacity costs nothing before it is used."""

from __future__ import annotations

import subprocess
import sys


def test_a_policy_takes_memory_for_what_is_there_and_not_for_its_capacity() -> None:
    """In a process of its own: what others have freed would hide what this one takes."""
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from kvtier.settings.plugins import make_policy\n"
        "def resident():\n"
        "    pages = int(Path('/proc/self/statm').read_text().split()[1])\n"
        "    return pages * os.sysconf('SC_PAGE_SIZE')\n"
        "before = resident()\n"
        "policy = make_policy(sys.argv[1], 150_000_000)\n"
        "print(resident() - before)\n"
    )
    for name in ("arc", "lru", "reuse"):
        run = subprocess.run(
            [sys.executable, "-c", program, name], capture_output=True, text=True, check=True
        )
        assert int(run.stdout) < 64 << 20, name
