"""Reads user and password, which no log line, error or ``repr`` shows.

A password may change while the tier runs: tokens of managed servers last for minutes. So it is read
again at each login, from the file or with the command in the options, and a failure to read it
is a failed login like any other.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError, StoreFault
from kvtier.plugin_api.options import refusal
from kvtier_backends.shared.secret_command import SecretCommand
from kvtier_backends.shared.secret_file import read_secret_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.plugin_api.options import Options

_VARIABLE: Final = re.compile(r"[A-Z_][A-Z0-9_]*")
_OPTIONS: Final = ("password_file", "password_env", "password_command")


@dataclass(frozen=True)
class Credentials:
    """The user name and the source of the password."""

    username: str | None = None
    source: str = ""  #: where the password comes from, for logs; empty if there is none
    _read: Callable[[], str] | None = field(default=None, repr=False)
    _command: SecretCommand | None = field(default=None, repr=False)

    def on_refused(self) -> None:
        """Note that a server has refused the password."""
        if self._command is not None:
            self._command.forget()

    def password(self) -> str | None:
        """Read the password; None if none is needed. May block. Raises ``StoreFault``."""
        if self._read is None:
            return None
        try:
            return _one_line(self._read())
        except (OSError, ValueError) as problem:
            raise StoreFault(f"{self.source} gives no password ({_reason(problem)})") from None


def read_credentials(reader: Options, username: str | None) -> Credentials:
    """Read the named credentials once. Raises ``ConfigError``, which shows no password."""
    if reader.has("password"):
        raise refusal(
            "password",
            f"{reader.where}: password=(not shown) would be shown in logs. Remove it, and name a "
            "file of mode 0600 that holds it in password_file, an environment variable in "
            "password_env, or a command that prints it in password_command.",
        )
    given = [key for key in _OPTIONS if reader.has(key)]
    if len(given) > 1:
        raise reader.error(given[1], "...", f"excludes {given[0]}. Give one of them")
    if not given:
        if username is not None:
            raise reader.error(
                "username", username, f"needs a password. Set one of {', '.join(_OPTIONS)}"
            )
        return Credentials()
    (key,) = given
    named = reader.text(key)
    # If users write the password itself where its name belongs, it must not reach a log.
    is_name = bool(_VARIABLE.fullmatch(named)) if key == "password_env" else "/" in named
    shown = named if is_name else "..."
    command = SecretCommand(named) if key == "password_command" else None
    read: Callable[[], str]
    if command is not None:
        read = command
    elif key == "password_file":
        read = partial(read_secret_file, reader.path(key))
    else:
        read = partial(_variable, named)
    try:
        _one_line(read())
    except (OSError, ValueError) as problem:
        raise reader.error(key, shown, f"gives no password ({_reason(problem)})") from None
    return Credentials(username, f"{key} {shown}", read, command)


def _variable(name: str) -> str:
    return os.environ.get(name, "")


def _reason(problem: Exception) -> str:
    return getattr(problem, "strerror", None) or str(problem)


def _one_line(text: str) -> str:
    password = text.strip("\r\n")
    if not password:
        raise ConfigError("it is empty or not set")
    return password
