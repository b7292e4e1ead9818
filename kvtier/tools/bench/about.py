"""Describes the versions and the machine of a measurement: the head of every report."""

from __future__ import annotations

import os
import platform

from kvtier import __version__


def about_machine() -> dict[str, str | int]:
    """Return versions, and the kind of machine."""
    return {
        "kvtier_version": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count() or 0,
    }
