"""Parses the options of an ``s3`` tier, and the address that they name.

No refusal, log line or repr holds a credential: a URL that may hold one is refused unseen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

from msgspec import Meta

from kvtier.plugin_api import option_fields as option
from kvtier.plugin_api.options import Options, refusal
from kvtier_backends.shared.records import (
    ProtectionOptions,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.plugin_api.backend import BackendContext

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
    """accept an `http://` endpoint: whoever is on the network can read and change blocks"""
    unsigned_payload: option.Flag = False
    """leave the bodies of stores out of the signature, which saves a SHA-256 of each block; best
    with `https://`. `s3://` only"""
    requests_max: Annotated[option.Integer, Meta(ge=1, le=1024)] = 16
    """requests at once; fewer for a while after the server asks for that"""
    request_timeout_s: Annotated[option.Seconds, Meta(le=3600.0)] = 10.0
    """how long one block may take, attempts that are repeated included"""
    presence_ttl_s: option.Seconds = 600.0
    """how long a block counts as present before the server is asked again"""


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
