"""Refuses a primary tier without enough memory: the machine's, a container's, or shared."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError
from kvtier.plugin_api.machine import ROOT, machine_memory_bytes
from kvtier.plugin_api.options import shown
from kvtier.settings.extra_config import WHERE

if TYPE_CHECKING:
    from pathlib import Path

SHARED_MEMORY_FOLDER: Final = "/dev/shm"  # noqa: S108 - files are made O_EXCL, 0600


@dataclass(frozen=True)
class HostMemory:
    """Memory that a configuration asks for: ``total_bytes``, by ``value`` of ``cpu_bytes_to_use``.

    ``of``: the owner, if ``value`` is the size of each one's memory, in words that follow it.
    """

    value: object
    total_bytes: int
    of: str = ""

    def require(self, root: Path = ROOT) -> None:
        """Raise ``ConfigError`` if it is more than there is, or more than is free to be shared.

        ``root``: the folder with ``proc`` and ``sys``.
        """
        self.require_machine(root)
        self.require_shared(SHARED_MEMORY_FOLDER)

    def require_machine(self, root: Path = ROOT) -> None:
        """Raise ``ConfigError`` if it is more than machine or control groups have in all."""
        most = machine_memory_bytes(root)
        if most is not None and self.total_bytes > most:
            together = f" ({self.total_bytes} bytes together)" if self.of else ""
            raise ConfigError(
                f"{self._named}{together} is more than the {most} bytes of memory that there are. "
                "Lower it."
            )

    def require_shared(self, folder: str) -> None:
        """Raise ``ConfigError`` if it is more than is free in a folder of shared memory."""
        with suppress(OSError):  # it is not there: opening it reports that
            usage = os.statvfs(folder)
            free = usage.f_bavail * usage.f_frsize
            if free < self.total_bytes:
                raise self.refusal(f"{free} bytes are free in {folder}")

    def refusal(self, reason: str) -> ConfigError:
        """Return the refusal of more shared memory than there is."""
        return ConfigError(
            f"{self._named} needs {self.total_bytes} bytes of shared memory, but {reason}. Lower "
            "cpu_bytes_to_use, or give the host more shared memory (docker run --shm-size, or an "
            "emptyDir volume with medium: Memory)."
        )

    @property
    def _named(self) -> str:
        return f"{WHERE}: cpu_bytes_to_use={shown(self.value)}{self.of}"
