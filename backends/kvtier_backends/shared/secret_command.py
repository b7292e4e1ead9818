"""Runs a command that prints a secret, such as a token that lasts for minutes."""

from __future__ import annotations

import shlex
import subprocess
import time
from typing import Final

from kvtier.errors import ConfigError
from kvtier_backends.shared.secret_file import SECRET_BYTES_MAX

COMMAND_S_MAX: Final = 10.0
SECRETS_S_MAX: Final = COMMAND_S_MAX + 1.0
"""How long to wait for all that a login reads: a command's output, and files, which may hang."""

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
