"""Reads secrets, keys or a password: from a file, or from a command that prints one.

A command is for tokens that last for minutes. Errors never reveal a secret.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from typing import Final

from kvtier.errors import ConfigError

SECRET_BYTES_MAX: Final = 1 << 16

_ROOT: Final = 0
_OF_OTHERS: Final = 0o077
_OF_OTHERS_IF_ROOTS: Final = 0o037
"""A group may read root's file, for containers whose user does not own the secret. In Kubernetes, a
Secret's files belong to root, and the pod's ``fsGroup`` may read them, whatever ``defaultMode``."""


def read_secret_file(path: str) -> str:
    """Return the file's text. Raises ``OSError`` or ``ValueError``, ``ConfigError`` among these."""
    # O_NONBLOCK: a FIFO must not keep the engine from starting.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if found.st_mode & (_OF_OTHERS_IF_ROOTS if found.st_uid == _ROOT else _OF_OTHERS):
            raise ConfigError(
                "others may read it: run chmod 600 on it; for a Secret of Kubernetes, set its "
                "defaultMode to 0400 and the pod's fsGroup"
            )
        try:
            return file.read(SECRET_BYTES_MAX).decode()
        except ValueError:  # its text would show a part of the secret
            raise ConfigError("it is no text in UTF-8") from None


COMMAND_S_MAX: Final = 10.0
SECRETS_S_MAX: Final = COMMAND_S_MAX + 1.0
"""Longest wait for everything that a login reads: a command's output, and files, which may hang."""

KEPT_S: Final = 5.0
"""A command's output is reused for this long: connections are made several at a time."""


class SecretCommand:
    """Runs a command without a shell, and returns its output. One thread."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._printed: tuple[float, str] | None = None  # the time and the output

    def __call__(self) -> str:
        """Return the output. May block. Raises ``ConfigError``, without the output."""
        if self._printed is None or time.monotonic() - self._printed[0] > KEPT_S:
            self._printed = time.monotonic(), self._run()
        return self._printed[1]

    def forget(self) -> None:
        """Run it again next time: its output was refused."""
        self._printed = None

    def _run(self) -> str:
        try:
            words = shlex.split(self._command)
        except ValueError:
            raise ConfigError("its quotes are not closed") from None
        try:
            done = subprocess.run(  # noqa: S603 - the operator chose it
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=COMMAND_S_MAX,
                check=True,
            )
            return done.stdout[:SECRET_BYTES_MAX].decode()
        except subprocess.CalledProcessError as problem:
            raise ConfigError(f"it ended with status {problem.returncode}") from None
        except subprocess.TimeoutExpired:
            raise ConfigError(f"it took more than {COMMAND_S_MAX:g} s") from None
        except OSError as problem:
            raise ConfigError(problem.strerror or "it can't be run") from None
        except UnicodeError:  # its text would show a part of the output
            raise ConfigError("it prints no text") from None
