"""A soak fails on what any of its processes writes to the standard error stream."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stress.failure import Failure
from stress.heard import nothing_on_stderr

if TYPE_CHECKING:
    from pathlib import Path


def test_what_a_process_of_a_soak_says_on_stderr_fails_it(tmp_path: Path) -> None:
    program = "import sys; sys.exit('a thread died')"
    with pytest.raises(Failure, match="a thread died"), nothing_on_stderr(tmp_path / "stderr"):
        subprocess.run([sys.executable, "-c", program], check=False)


def test_what_libfuse_says_is_nobodys_fault(tmp_path: Path) -> None:
    program = "import sys; sys.exit('Ignoring invalid max threads value 4294967295')"
    with nothing_on_stderr(tmp_path / "stderr"):
        subprocess.run([sys.executable, "-c", program], check=False)
