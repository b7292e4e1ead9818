"""Finds the keys of a bucket, again whenever the tier connects: they may have changed since.

Without options the library finds them by itself: the usual variables, a web identity, the
instance. It supports no profiles, and no commands.
"""

from __future__ import annotations

import configparser
import json
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvtier.errors import ConfigError
from kvtier.plugin_api.options import refusal
from kvtier_backends.shared.secret_command import SecretCommand

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.plugin_api.options import Options
    from kvtier_backends.s3.s3_options import S3Options

    Source: TypeAlias = Callable[[], "Credentials | None"]
    """Finds the keys; None: the library does. May block. Raises ``ConfigError``."""

_FILES: Final = (
    ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", ""),
    ("AWS_CONFIG_FILE", "~/.aws/config", "profile "),
)
_DEFAULT: Final = "default"


@dataclass(frozen=True)
class Credentials:
    """An access key. Its repr shows none of it."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str | None = field(repr=False, default=None)


def credentials_of(given: S3Options, reader: Options) -> Source:
    """Return the source of the credentials that the options name.

    Raises ``ConfigError`` for options that exclude one another.
    """
    has_keys = given.access_key_env is not None or given.secret_key_env is not None
    ways = {
        "access_key_env": has_keys,
        "profile": given.profile is not None,
        "credentials_command": given.credentials_command is not None,
    }
    chosen = [way for way, is_given in ways.items() if is_given]
    if len(chosen) > 1:
        raise reader.error(chosen[1], "...", f"excludes {chosen[0]}. Give one of them")
    if has_keys:
        return partial(_of_variables, given, reader)
    if given.session_token_env is not None:
        raise reader.error(
            "session_token_env",
            given.session_token_env,
            "is of no use alone. Name access_key_env and secret_key_env, too",
        )
    if given.credentials_command is not None:
        return _Command(given.credentials_command, f"{reader.where}: credentials_command")
    if given.profile is not None:
        return _Profile(given.profile, reader.where)
    profile = os.environ.get("AWS_PROFILE")
    is_for_us = given.url.startswith("s3://") and not os.environ.get("AWS_ACCESS_KEY_ID")
    if profile and is_for_us:
        return _Profile(profile, reader.where, is_asked_for=False)
    return _found_by_the_library


def _found_by_the_library() -> None:
    return None


def _of_variables(given: S3Options, reader: Options) -> Credentials:
    for key in ("access_key_env", "secret_key_env"):
        if getattr(given, key) is None:
            raise refusal(key, f"{reader.where}: {key} is missing. Set it beside the other one.")
    token = given.session_token_env
    return Credentials(
        _variable(reader, "access_key_env", given.access_key_env or ""),
        _variable(reader, "secret_key_env", given.secret_key_env or ""),
        None if token is None else _variable(reader, "session_token_env", token),
    )


def _variable(reader: Options, key: str, name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise reader.error(
            key, name, "names an environment variable that is not set. Set it for the engine"
        )
    return value


class _Command:
    """Runs a command whose output is that of AWS's ``credential_process``."""

    def __init__(self, command: str, what: str) -> None:
        self._run = SecretCommand(command)
        self._what = what

    def __call__(self) -> Credentials:
        self._run.forget()  # asked one at a time, after pauses; the old key may have been refused
        try:
            printed = json.loads(self._run())
            keys = [printed["AccessKeyId"], printed["SecretAccessKey"]]
            token = printed.get("SessionToken")
        except ConfigError as problem:
            raise ConfigError(f"{self._what} gives no keys ({problem}). See to it.") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ConfigError(
                f"{self._what} prints no JSON with AccessKeyId and SecretAccessKey. Have it print "
                "what AWS's credential_process prints."
            ) from None
        return Credentials(str(keys[0]), str(keys[1]), None if token is None else str(token))


class _Profile:
    """Reads a profile from AWS's files; the credentials file goes first."""

    def __init__(self, name: str, where: str, *, is_asked_for: bool = True) -> None:
        """``is_asked_for``: without keys, it is refused; else the library looks elsewhere."""
        self._name = name
        self._where = where
        self._is_asked_for = is_asked_for

    def __call__(self) -> Credentials | None:
        settings: dict[str, Any] = {}
        for variable, usual, prefix in reversed(_FILES):
            path = Path(os.environ.get(variable) or usual).expanduser()
            settings |= self._section(path, "" if self._name == _DEFAULT else prefix)
        access, secret = (
            settings.get(f"aws_{each}") for each in ("access_key_id", "secret_access_key")
        )
        if access and secret:
            return Credentials(access, secret, settings.get("aws_session_token"))
        if "credential_process" in settings:
            what = f"{self._where}: credential_process of the profile {self._name!r}"
            return _Command(settings["credential_process"], what)()
        if not self._is_asked_for:
            return None
        raise self._refused(
            "has neither keys nor a credential_process. Give it one: aws configure "
            "export-credentials prints what is wanted, for single sign-on and roles, too"
            if settings
            else "is in none of AWS's files. Set AWS_SHARED_CREDENTIALS_FILE, or name another"
        )

    def _section(self, path: Path, prefix: str) -> Mapping[str, str]:
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, configparser.Error):  # the text may show a line of it
            raise self._refused(f"can't be read from {path}. See to the file") from None
        name = f"{prefix}{self._name}"
        return dict(parser[name]) if parser.has_section(name) else {}

    def _refused(self, remedy: str) -> ConfigError:
        return ConfigError(f"{self._where}: profile={self._name!r} {remedy}.")
