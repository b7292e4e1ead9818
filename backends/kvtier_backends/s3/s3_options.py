"""Parses the options of an ``s3`` tier, and the address and the credentials that they name.

No refusal, log line or repr holds a credential: a URL that may hold one is refused unseen.

The keys of a bucket are found again whenever the tier connects: they may have changed since.
Without options the library finds them by itself: the usual variables, a web identity, the
instance. It supports no profiles, and no commands.
"""

from __future__ import annotations

import configparser
import json
import os
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeAlias
from urllib.parse import SplitResult, urlsplit

from msgspec import Meta

from kvtier.errors import ConfigError
from kvtier.plugin_api import option_fields as option
from kvtier.plugin_api.options import Options, refusal
from kvtier_backends.shared.records import ProtectionOptions
from kvtier_backends.shared.secrets import SecretCommand

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.plugin_api.backend import BackendContext

    Source: TypeAlias = Callable[[], "Credentials | None"]
    """Finds the keys; None: the library does. May block. Raises ``ConfigError``."""


SCHEMES: Final = ("s3", "gs", "az")
PREFIX_CHARACTERS_MAX: Final = 512
"""Names in S3 have at most 1,024 bytes; kvtier appends under 300 to the prefix."""

BUCKET_CHARACTERS_MIN: Final = 3

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{2,221}")
_SEGMENT: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_OF_S3_ALONE: Final = (
    "region",
    "access_key_env",
    "secret_key_env",
    "session_token_env",
    "profile",
    "credentials_command",
    "virtual_hosted_style",
    "unsigned_payload",
)


@dataclass(frozen=True)
class S3Options(ProtectionOptions):
    """The parsed options."""

    url: option.Text
    """where the blocks are: `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`.
    Refused: with credentials, a port or a query in it"""
    endpoint: option.Text | None = None
    """the address of a server that is not the provider's own, such as `https://rgw.example:7480`.
    Refused: with credentials in it; `http://` without `allow_http`"""
    region: option.Text | None = None
    """the region to sign for; else `AWS_REGION`, else `us-east-1`. `s3://` only"""
    access_key_env: option.Text | None = None
    """the environment variable that holds the access key's id. Without it, credentials come from
    `profile`, `credentials_command`, the usual variables, or the instance"""
    secret_key_env: option.Text | None = None
    """the environment variable that holds the secret key"""
    session_token_env: option.Text | None = None
    """the environment variable that holds the session token of temporary credentials"""
    profile: option.Text | None = None
    """a profile of AWS's files of credentials, with keys or a `credential_process`; else
    `AWS_PROFILE`, if no variable has keys. Read again when the tier connects. `s3://` only"""
    credentials_command: option.Text | None = None
    """a command that prints credentials as AWS's `credential_process` does; run without a shell
    when the tier connects, for 10 seconds at most. `s3://` only"""
    virtual_hosted_style: option.Flag = False
    """send requests to `bucket.host` instead of `host/bucket`. `s3://` only"""
    allow_http: option.Flag = False
    """accept an `http://` endpoint: anyone on the network can read and change blocks"""
    unsigned_payload: option.Flag = False
    """leave the bodies of stores out of the signature, which saves a SHA-256 of each block; best
    with `https://`. `s3://` only"""
    requests_max: Annotated[option.Integer, Meta(ge=1, le=1024)] = 16
    """requests at once; fewer for a while after the server requests a lower rate"""
    request_timeout_s: Annotated[option.Seconds, Meta(le=3600.0)] = 10.0
    """how long one block may take, attempts that are repeated included"""
    presence_ttl_s: option.Seconds = 600.0
    """how long a block counts as present before the server is queried again"""


class Address(NamedTuple):
    """Location of a tier's blocks. Holds no credential."""

    scheme: str
    bucket: str
    prefix: str  #: without slashes at its ends
    endpoint: str | None  #: ``scheme://host:port``, in lower case

    def __str__(self) -> str:
        """Return the normalized URL, and the server if it is not the usual one."""
        url = f"{self.scheme}://{self.bucket}"
        if self.prefix:
            url += f"/{self.prefix}"
        return f"{url} at {self.endpoint}" if self.endpoint else url

    def below(self, *names: str) -> str:
        """Return the name of an object."""
        return "/".join([self.prefix, *names] if self.prefix else names)


def read_options(options: Mapping[str, Any], context: BackendContext) -> tuple[S3Options, Options]:
    """Parse the options; return them with the reader, for other options.

    Raises ``ConfigError``. The caller calls ``finish``.
    """
    reader = Options(options, f"secondary tier {context.tier_name}")
    given = S3Options(**option.read(S3Options, reader))
    for key in _OF_S3_ALONE:
        if reader.has(key) and given.url.startswith(("gs://", "az://")):
            raise reader.error(
                key,
                options[key],
                "is for s3:// only. Remove it: gs:// and az:// take credentials from the "
                "environment (GOOGLE_APPLICATION_CREDENTIALS; AZURE_STORAGE_ACCOUNT_NAME and "
                "AZURE_STORAGE_ACCOUNT_KEY), or from the instance",
            )
    return given, reader


def address_of(given: S3Options, reader: Options) -> Address:
    """Return the location of the blocks. Raises ``ConfigError``."""
    parts = _split(reader, "url", given.url)
    prefix = parts.path.strip("/")
    if parts.scheme not in SCHEMES:
        raise reader.error("url", given.url, "must begin with s3://, gs:// or az://")
    fault = _fault_of_bucket(parts.netloc)
    if fault is not None:
        raise reader.error("url", given.url, f"{fault}. Write {parts.scheme}://bucket/prefix")
    if len(prefix) > PREFIX_CHARACTERS_MAX or not all(
        map(_SEGMENT.fullmatch, prefix.split("/") if prefix else [])
    ):
        raise reader.error(
            "url",
            given.url,
            f"has a prefix that is not of letters, digits, dots, dashes and underscores, or of "
            f"more than {PREFIX_CHARACTERS_MAX} characters. Choose another",
        )
    return Address(parts.scheme, parts.netloc, prefix, _endpoint_of(given, reader))


def _fault_of_bucket(name: str) -> str | None:
    """Return why this is not a valid bucket name; None if it is."""
    if not name:
        return "names no bucket"
    if ":" in name:
        return f"has a port in {name!r}, where the bucket belongs; the server is `endpoint`"
    if len(name) < BUCKET_CHARACTERS_MIN:
        return f"names the bucket {name!r}, and names of buckets have 3 to 63 characters"
    if name != name.lower():
        return f"names the bucket {name!r}, and names of buckets are in lower case"
    if _BUCKET.fullmatch(name) is None:
        return (
            f"names the bucket {name!r}, and names of buckets are of letters, digits, dots and "
            "dashes"
        )
    return None


def _endpoint_of(given: S3Options, reader: Options) -> str | None:
    if given.endpoint is None:
        return None
    parts = _split(reader, "endpoint", given.endpoint)
    try:
        is_whole = parts.hostname is not None and parts.port != 0
    except ValueError:
        is_whole = False
    if parts.scheme not in ("http", "https") or not is_whole or parts.path.strip("/"):
        raise reader.error(
            "endpoint", given.endpoint, "must be https://host or https://host:port, and no more"
        )
    if parts.scheme == "http" and not given.allow_http:
        raise reader.error(
            "endpoint",
            given.endpoint,
            "is not encrypted: blocks can be read and changed on their way. Write https://, or "
            'set "allow_http": true',
        )
    return f"{parts.scheme}://{parts.netloc.lower()}"


def _split(reader: Options, key: str, url: str) -> SplitResult:
    """Split a URL. One that may hold a credential, or is invalid, is refused without being shown.

    Raises ``ConfigError``.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise refusal(key, f"{reader.where}: {key} is no URL. Write s3://bucket/prefix.") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise refusal(
            key,
            f"{reader.where}: {key} holds a user, a password or a query, which may be a "
            "credential and is not shown here. Remove it, and name the environment variables of "
            "the credentials in access_key_env and secret_key_env.",
        )
    return parts


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
            "export-credentials prints one, for single sign-on and roles, too"
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
