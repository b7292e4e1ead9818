"""What a request to an object store can end with, told from what the library raises.

The library's texts hold URLs, which may hold credentials: nothing of them is passed on but the
status and the server's own word for the error.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

from kvtier.errors import StoreFault

TEXT_CHARACTERS_MAX: Final = 16384
_STATUS: Final = re.compile(r"status code: (\d{3})\b")
_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")


class Failure(Enum):
    """Why a request brought nothing."""

    ABSENT = auto()  #: no such object
    EXISTS = auto()  #: there is one already
    NO_BUCKET = auto()
    BUSY = auto()  #: the server wants fewer requests
    DENIED = auto()
    FULL = auto()  #: a quota, or the server's disks
    UNREACHABLE = auto()  #: no answer, or half of one
    BROKEN = auto()  #: the server failed, and may not the next time
    REFUSED = auto()  #: the server answers, and will say the same the next time


MAY_PASS: Final = frozenset({Failure.BUSY, Failure.UNREACHABLE, Failure.BROKEN})
"""Worth another attempt."""


_BY_CODE: Final = {
    "NoSuchBucket": Failure.NO_BUCKET,
    "ContainerNotFound": Failure.NO_BUCKET,
    "ContainerBeingDeleted": Failure.NO_BUCKET,
    "QuotaExceeded": Failure.FULL,
    "XMinioStorageFull": Failure.FULL,
    "XMinioAdminBucketQuotaExceeded": Failure.FULL,
    "SlowDown": Failure.BUSY,
    "ServerBusy": Failure.BUSY,
    "RequestLimitExceeded": Failure.BUSY,
}
_CAUSES: Final = (  # what the library's account of an error has in it, without a server's text
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
    409: Failure.BROKEN,  # another store of the same key runs now
    412: Failure.EXISTS,
    429: Failure.BUSY,
    503: Failure.BUSY,
    507: Failure.FULL,
}


class RequestFailed(StoreFault):
    """Raised when a request fails. The text has the status and the server's word, no URL."""

    def __init__(self, failure: Failure, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.failure = failure
        self.status = status


class WrongLength(StoreFault):
    """Raised when an object, or what came of it, is not as long as it should be. Drop it."""


def timed_out() -> RequestFailed:
    """Return what a request without an answer in time ends with."""
    return RequestFailed(Failure.UNREACHABLE, "no answer in time")


def failure_of(error: BaseException) -> RequestFailed:
    """Tell what an exception of the library stands for."""
    text = str(error)[:TEXT_CHARACTERS_MAX]
    found_status, found_code = _STATUS.search(text), _CODE.search(text)
    status = int(found_status[1]) if found_status else None
    code = found_code[1] if found_code else ""
    kind = type(error).__name__
    known = " ".join(str(part) for part in (status, code) if part)
    shown = known or f"no answer ({_cause(text) or kind})"
    return RequestFailed(_failure(kind, status, code), shown, status)


def _cause(text: str) -> str:
    """Return in plain words why there was no answer; none if that can't be told."""
    return next((words for sign, words in _CAUSES if sign in text), "")


def _failure(kind: str, status: int | None, code: str) -> Failure:
    # By the server's word first: some say "no room" with a 403.
    if code in _BY_CODE:
        return _BY_CODE[code]
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    if status is None:
        return Failure.UNREACHABLE
    return _BY_STATUS.get(status, Failure.BROKEN if status >= 500 else Failure.REFUSED)
