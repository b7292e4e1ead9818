"""Reads a file with a secret: keys, or a password. Errors never reveal its contents."""

from __future__ import annotations

import os
from typing import Final

from kvtier.errors import ConfigError

SECRET_BYTES_MAX: Final = 1 << 16


def read_secret_file(path: str) -> str:
    """Return the file's text. Raises ``OSError`` or ``ValueError``, ``ConfigError`` among these."""
    # O_NONBLOCK: a FIFO must not keep the engine from starting.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_mode & 0o077:
            raise ConfigError("others may read it: run chmod 600 on it")
        try:
            return file.read(SECRET_BYTES_MAX).decode()
        except ValueError:  # its text would show a part of the secret
            raise ConfigError("it is no text in UTF-8") from None
