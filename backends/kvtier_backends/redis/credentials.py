"""User and password, which no log line, error or ``repr`` shows."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvtier.plugin_api.options import refusal
from kvtier_backends.shared.secret_file import read_secret_file

if TYPE_CHECKING:
    from kvtier.plugin_api.options import Options

_VARIABLE: Final = re.compile(r"[A-Z_][A-Z0-9_]*")


@dataclass(frozen=True)
class Credentials:
    """Whom the server takes the tier for."""

    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @property
    def is_given(self) -> bool:
        """Whether there is anything to log in with."""
        return self.password is not None


def read_credentials(reader: Options, username: str | None) -> Credentials:
    """Read what the options name. Raises ``ConfigError``, which shows no password."""
    if reader.has("password"):
        raise refusal(
            "password",
            f"{reader.where}: password=(not shown) would be shown in logs. Remove it, and name a "
            "file of mode 0600 that holds it in password_file, or an environment variable in "
            "password_env.",
        )
    has_file, has_name = reader.has("password_file"), reader.has("password_env")
    if has_file and has_name:
        raise reader.error("password_env", "...", "excludes password_file. Give one of them")
    if not (has_file or has_name):
        if username is not None:
            raise reader.error(
                "username", username, "needs a password. Set password_file or password_env"
            )
        return Credentials()
    key = "password_file" if has_file else "password_env"
    named = reader.text(key)
    # Whoever writes the password itself where its name belongs must not find it in a log.
    is_name = "/" in named if has_file else _VARIABLE.fullmatch(named)
    shown = named if is_name else "..."
    try:
        text = read_secret_file(reader.path(key)) if has_file else os.environ.get(named, "")
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise reader.error(key, shown, f"gives no password ({reason})") from None
    password = text.strip("\r\n")
    if not password:
        raise reader.error(key, shown, "gives no password: it is empty or not set")
    return Credentials(username, password)
