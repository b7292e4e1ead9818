"""Libraries that a machine lacks come from a wheel, which has named them anew."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from requirements import libraries

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.one_release


def test_a_library_that_the_system_lacks_is_found_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are those that it needs itself, and each name that vLLM and Mooncake ask for."""
    monkeypatch.setattr(libraries, "LINKS", tmp_path)
    libraries.link(list(libraries.NEEDED))
    load = f"import ctypes; [ctypes.CDLL(name) for name in {list(libraries.NEEDED)}]"
    done = subprocess.run(
        [sys.executable, "-c", f"{load}; print(open('/proc/self/maps').read())"],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in libraries.NEEDED:
        assert f"{libraries.BROUGHT}/{name.partition('.so')[0]}-" in done.stdout, name
