"""Classifies the failures of requests to an object store: by the store's error code, or the status.

``ERROR_CODES`` has the codes of S3, and of other stores that answer as it does; the status gives
the meaning of an unlisted one. ``Failure`` documents its consequence for a block and for the tier.
The codes are from the reference of S3's API ("List of error codes"), of MinIO, Ceph, Google and
Azure: those that requests for single objects can meet.

The texts of the library's exceptions hold URLs, which may hold credentials: only the status and the
server's own error code are passed on.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Final, NamedTuple

from kvtier.errors import StoreFault


class Failure(Enum):
    """Why a request brought no result."""

    ABSENT = auto()  #: no such object, or no readable one: a miss
    EXISTS = auto()  #: the object exists already
    NO_BUCKET = auto()  #: the tier is gone until there is one
    BUSY = auto()  #: the server wants fewer requests; repeated later
    DENIED = auto()  #: a load: the tier is gone; a store: stores fail
    CREDENTIALS = auto()  #: invalid, or no longer valid: the tier is gone until there are others
    CLOCK = auto()  #: this host's clock is wrong: the tier is gone until it is right
    FULL = auto()  #: a quota, or the server's disks
    UNREACHABLE = auto()  #: no answer, or half of one; repeated, and the tier is checked
    BROKEN = auto()  #: the server failed, perhaps only this time; repeated
    REFUSED = auto()  #: the server answers, and would repeat the answer: the block's fault


class ErrorCode(NamedTuple):
    """A row of ``ERROR_CODES``."""

    failure: Failure
    remedy: str = ""  #: for the log


_KEYS: Final = "give the tier the keys of a user of this server"
_REGION: Final = "set region to the bucket's"
_KMS: Final = "see to the key by which the bucket is encrypted"
_SCHEME: Final = "the server wants another way to sign: see to endpoint, region and its release"

ERROR_CODES: Final[dict[str, ErrorCode]] = {
    # missing
    "NoSuchKey": ErrorCode(Failure.ABSENT),
    "NoSuchVersion": ErrorCode(Failure.ABSENT),
    "BlobNotFound": ErrorCode(Failure.ABSENT),
    "InvalidObjectState": ErrorCode(Failure.ABSENT),  # a lifecycle rule has archived it
    "NoSuchBucket": ErrorCode(
        Failure.NO_BUCKET, "the bucket does not exist. Create it; the tier makes none"
    ),
    "ContainerNotFound": ErrorCode(Failure.NO_BUCKET, "create the container"),
    "ContainerBeingDeleted": ErrorCode(Failure.NO_BUCKET, "create the container"),
    # exists already
    "PreconditionFailed": ErrorCode(Failure.EXISTS),
    "BlobAlreadyExists": ErrorCode(Failure.EXISTS),
    # repeated
    "SlowDown": ErrorCode(Failure.BUSY),
    "SlowDownRead": ErrorCode(Failure.BUSY),
    "SlowDownWrite": ErrorCode(Failure.BUSY),
    "Busy": ErrorCode(Failure.BUSY),
    "ServerBusy": ErrorCode(Failure.BUSY),
    "RequestLimitExceeded": ErrorCode(Failure.BUSY),
    "ServiceUnavailable": ErrorCode(Failure.BUSY),
    "RequestTimeout": ErrorCode(Failure.BROKEN),
    "IncompleteBody": ErrorCode(Failure.BROKEN),
    "InternalError": ErrorCode(Failure.BROKEN),
    "OperationAborted": ErrorCode(Failure.BROKEN),
    "ConditionalRequestConflict": ErrorCode(Failure.BROKEN),
    "BadDigest": ErrorCode(Failure.BROKEN),
    "XAmzContentSHA256Mismatch": ErrorCode(Failure.BROKEN),
    "TemporaryRedirect": ErrorCode(Failure.BROKEN),
    "NotImplemented": ErrorCode(Failure.BROKEN),  # the client uses other requests from then on
    # no room
    "QuotaExceeded": ErrorCode(Failure.FULL, "raise the quota, or remove blocks"),
    "TooManyObjects": ErrorCode(Failure.FULL, "raise the quota, or remove blocks"),
    "XMinioStorageFull": ErrorCode(Failure.FULL, "make room on the server's disks"),
    "XMinioAdminBucketQuotaExceeded": ErrorCode(Failure.FULL, "raise the bucket's quota"),
    # rights and keys
    "AccessDenied": ErrorCode(Failure.DENIED),
    "AllAccessDisabled": ErrorCode(Failure.DENIED),
    "AccountProblem": ErrorCode(Failure.DENIED, "see to the account"),
    "NotSignedUp": ErrorCode(Failure.DENIED, "see to the account"),
    "InvalidPayer": ErrorCode(Failure.DENIED, "see to the account"),
    "AuthorizationFailure": ErrorCode(Failure.DENIED),
    "AuthenticationFailed": ErrorCode(Failure.CREDENTIALS, _KEYS),
    "InvalidAccessKeyId": ErrorCode(Failure.CREDENTIALS, _KEYS),
    "SignatureDoesNotMatch": ErrorCode(
        Failure.CREDENTIALS, f"{_KEYS}: the secret key is another's"
    ),
    "InvalidSecurity": ErrorCode(Failure.CREDENTIALS, _KEYS),
    "MissingSecurityHeader": ErrorCode(Failure.DENIED, _SCHEME),
    "KMS.DisabledException": ErrorCode(Failure.DENIED, _KMS),
    "KMS.InvalidStateException": ErrorCode(Failure.DENIED, _KMS),
    "KMS.NotFoundException": ErrorCode(Failure.DENIED, _KMS),
    "ExpiredToken": ErrorCode(Failure.CREDENTIALS, "the session token has expired"),
    "InvalidToken": ErrorCode(Failure.CREDENTIALS, "the session token is not of this server"),
    "TokenRefreshRequired": ErrorCode(Failure.CREDENTIALS, "the session token has expired"),
    "RequestTimeTooSkewed": ErrorCode(Failure.CLOCK, "set this host's clock, or the server's"),
    "RequestExpired": ErrorCode(Failure.CLOCK, "set this host's clock, or the server's"),
    # permanent
    "AuthorizationHeaderMalformed": ErrorCode(Failure.REFUSED, _REGION),
    "PermanentRedirect": ErrorCode(Failure.REFUSED, _REGION),
    "IllegalLocationConstraintException": ErrorCode(Failure.REFUSED, _REGION),
    "InvalidRegion": ErrorCode(Failure.REFUSED, _REGION),
    "EntityTooLarge": ErrorCode(Failure.REFUSED, "blocks are larger than the server takes"),
    "KeyTooLongError": ErrorCode(Failure.REFUSED, "choose a shorter prefix in url"),
    "MetadataTooLarge": ErrorCode(Failure.REFUSED),
    "InvalidArgument": ErrorCode(Failure.REFUSED),
    "InvalidBucketName": ErrorCode(Failure.REFUSED, "see to the bucket's name in url"),
    "InvalidDigest": ErrorCode(Failure.REFUSED),
    "InvalidRequest": ErrorCode(Failure.REFUSED, _SCHEME),
    "InvalidStorageClass": ErrorCode(Failure.REFUSED),
    "InvalidURI": ErrorCode(Failure.REFUSED),
    "MethodNotAllowed": ErrorCode(Failure.REFUSED),
    "MissingContentLength": ErrorCode(Failure.REFUSED),
    "UnexpectedContent": ErrorCode(Failure.REFUSED),
}


TEXT_CHARACTERS_MAX: Final = 16384
_STATUS: Final = re.compile(r"status code: (\d{3})\b")
_CODE: Final = re.compile(r"<Code>([\w.]{1,64})</Code>")
_SERVER_TIME: Final = re.compile(r"<ServerTime>([0-9T:.Z-]{1,32})</ServerTime>")


MAY_PASS: Final = frozenset({Failure.BUSY, Failure.UNREACHABLE, Failure.BROKEN})
"""Worth another attempt."""


_CAUSES: Final = (  # substrings of the library's error texts, without a server's text
    ("InvalidCertificate", "the server's certificate is not trusted"),
    ("dns error", "the server's name is not known"),
    ("ConnectionRefused", "connection refused"),
    ("ConnectionReset", "connection reset"),
    ("kind: Timeout", "timed out"),
    ("kind: Interrupted", "the connection ended"),
    ("kind: Decode", "the connection ended"),
)
_BY_KIND: Final = {  # of the library's exceptions
    "AlreadyExistsError": Failure.EXISTS,
    "FileNotFoundError": Failure.ABSENT,
    "PermissionDeniedError": Failure.DENIED,
    "UnauthenticatedError": Failure.DENIED,
}
_BY_STATUS: Final = {
    401: Failure.DENIED,
    403: Failure.DENIED,
    404: Failure.ABSENT,
    408: Failure.BROKEN,  # the server has waited for the body
    409: Failure.BROKEN,  # another store of the same key is running
    412: Failure.EXISTS,
    429: Failure.BUSY,
    503: Failure.BUSY,
    507: Failure.FULL,
}


class RequestFailed(StoreFault):
    """Raised when a request fails. The text has the status and the server's code, no URL."""

    def __init__(
        self, failure: Failure, text: str, status: int | None = None, code: str = ""
    ) -> None:
        super().__init__(text)
        self.failure = failure
        self.status = status
        self.remedy = ERROR_CODES[code].remedy if code in ERROR_CODES else ""


class WrongLength(StoreFault):
    """Raised when an object, or the data received of it, has the wrong length. Drop it."""


def timed_out() -> RequestFailed:
    """Return the failure of a request without an answer in time."""
    return RequestFailed(Failure.UNREACHABLE, "no answer in time")


def failure_of(error: BaseException) -> RequestFailed:
    """Return the failure that an exception of the library stands for."""
    text = str(error)[:TEXT_CHARACTERS_MAX]
    found_status, found_code = _STATUS.search(text), _CODE.search(text)
    status = int(found_status[1]) if found_status else None
    code = found_code[1] if found_code else ""
    kind = type(error).__name__
    known = " ".join(str(part) for part in (status, code) if part)
    shown = known or f"no answer ({_cause(text) or kind})"
    failure = _failure(kind, status, code)
    if failure is Failure.CLOCK:
        shown += _apart_untrusted(text)
    return RequestFailed(failure, shown, status, code)


def _apart_untrusted(text: str) -> str:
    """Return how far this host's clock is from the server's, if the server reported its time."""
    found = _SERVER_TIME.search(text)
    try:
        there = datetime.fromisoformat(found[1]) if found else None
    except ValueError:
        there = None
    if there is None:
        return " (this host's clock is not the server's)"
    there = there if there.tzinfo else there.replace(tzinfo=UTC)
    behind_s = (there - datetime.now(UTC)).total_seconds()
    return f" (this host's clock is {abs(behind_s):.0f} s {'behind' if behind_s > 0 else 'ahead'})"


def _cause(text: str) -> str:
    """Return in plain words why there was no answer; empty if that is unknown."""
    return next((words for sign, words in _CAUSES if sign in text), "")


def _failure(kind: str, status: int | None, code: str) -> Failure:
    # By the server's error code first: some report "no room" with a 403.
    if code in ERROR_CODES:
        return ERROR_CODES[code].failure
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    if status is None:
        return Failure.UNREACHABLE
    return _BY_STATUS.get(status, Failure.BROKEN if status >= 500 else Failure.REFUSED)
