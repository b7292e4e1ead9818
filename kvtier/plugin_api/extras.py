"""Builds the command that installs an extra: libraries that only some tiers or keys need.

The command names the libraries themselves: it needs no clone, no wheel, and no index with the
package that has the extra.
"""

from __future__ import annotations

import re
from typing import Final

_EXTRA: Final = re.compile(r"extra\s*==\s*[\"']([\w-]+)[\"']")


def install(extra: str, package: str = "kvtier") -> str:
    """Return the command that installs the libraries of a package's extra."""
    from importlib.metadata import (  # noqa: PLC0415 - only where something is missing
        PackageNotFoundError,
        requires,
    )

    try:
        lines = requires(package) or []
    except PackageNotFoundError:  # run from a clone that was never installed
        return f"the extra {extra}, in {package}'s clone"
    found = ((line.partition(";")[0].strip(), _EXTRA.search(line)) for line in lines)
    names = (f"'{name}'" for name, mark in found if mark is not None and mark[1] == extra)
    return " ".join(["pip", "install", *names])
