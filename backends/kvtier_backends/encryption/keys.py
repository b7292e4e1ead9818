"""Reads the secret keys that a tier's options name, and selects the one that writes.

A keyring has one key that writes and others that still read: to rotate, add a
new first line; blocks under older keys are still served.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError
from kvtier.plugin_api.extras import install
from kvtier_backends.shared.secrets import read_secret_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plugin_api.options import Options

AUTH_KEY: Final = "auth_key"
ENCRYPTION_KEY: Final = "encryption_key"
"""The two kinds of keys: options are named after them, ``auth_key_file`` and so on."""

KEY_BYTES: Final = 32
KEYS_MAX: Final = 16
KEY_ID_BYTES: Final = 16
_LIKE_A_KEY: Final = re.compile(r"[0-9a-fA-F]{32,}")


class Keyring:
    """Secret keys by id. The first one writes."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.by_id = {_key_id(key): key for key in keys}
        self.current_id = _key_id(keys[0])


def parse_keys_untrusted(text: str) -> Keyring:
    """Parse one hex key per line; empty lines and ``#`` lines don't count.

    Raises ``ConfigError`` and nothing else. Its text never contains any of the input.
    """
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    keys = []
    for number, line in enumerate(lines, start=1):
        try:
            key = bytes.fromhex(line)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise ConfigError(f"key {number} is not {2 * KEY_BYTES} hex digits")
        keys.append(key)
    if not 0 < len(keys) <= KEYS_MAX:
        raise ConfigError(f"there must be 1 to {KEYS_MAX} keys, not {len(keys)}")
    return Keyring(keys)


def read_keyring(reader: Options, kind: str) -> Keyring | None:
    """Read the keys that the option ``<kind>_file`` or ``<kind>_env`` names, if one is given.

    Raises ``ConfigError``, which never repeats a key.
    """
    in_file, in_variable = f"{kind}_file", f"{kind}_env"
    reader.allow(in_file, in_variable)
    has_file, has_variable = reader.has(in_file), reader.has(in_variable)
    if not (has_file or has_variable):
        return None
    if has_file and has_variable:
        raise reader.error(in_variable, "...", f"excludes {in_file}; give one of them")
    option = in_file if has_file else in_variable
    named = reader.text(option)
    path = reader.path(option) if has_file else ""
    try:
        text = read_secret_file(path) if has_file else os.environ.get(named, "")
        return parse_keys_untrusted(text)
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        # A key that was written by mistake where its name belongs must not appear in a log.
        shown = "..." if _LIKE_A_KEY.search(named) else named
        raise reader.error(
            option, shown, f"gives no keys ({reason}); put 64 hex digits a key there, one a line"
        ) from None


def given_option(reader: Options, kind: str) -> str:
    """Return which of the two options is given, for a refusal that names it."""
    return f"{kind}_file" if reader.has(f"{kind}_file") else f"{kind}_env"


def refuse_missing_package(reader: Options, kind: str) -> ConfigError:
    """Return the refusal of keys whose library is missing."""
    option = given_option(reader, kind)
    return reader.error(option, "...", f"needs a package: {install('protection')}")


def _key_id(key: bytes) -> bytes:
    return hashlib.blake2b(key=key, digest_size=KEY_ID_BYTES, person=b"kvtier key id").digest()
