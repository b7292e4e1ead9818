"""Classifies the failures of requests to an object store by the library's exceptions.

The library's texts hold URLs, which may hold credentials: only the status and the server's own
error code are passed on.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from kvtier.errors import StoreFault
from kvtier_backends.s3.error_codes import ERROR_CODES, Failure

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
