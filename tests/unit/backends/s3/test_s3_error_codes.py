"""S3's error codes: what each means, and what the tier does about those that concern all of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from kvtier.plugin_api.backend import Connection, Outcome
from kvtier_backends.s3.failures import ERROR_CODES, Failure, failure_of
from tests.support.s3_fault_server import Fault
from tests.unit.backends.s3._s3 import S3, open_s3

if TYPE_CHECKING:
    from tests.support.s3_fault_server import FaultServer

    Faulty = tuple[FaultServer, str]

pytestmark = pytest.mark.anyio
DONE, FAILED = Outcome.DONE, Outcome.FAILED

CODES = {
    Failure.ABSENT: "NoSuchKey NoSuchVersion BlobNotFound InvalidObjectState",
    Failure.NO_BUCKET: "NoSuchBucket ContainerNotFound ContainerBeingDeleted",
    Failure.EXISTS: "PreconditionFailed BlobAlreadyExists",
    Failure.BUSY: "SlowDown SlowDownRead SlowDownWrite Busy ServerBusy RequestLimitExceeded "
    "ServiceUnavailable",
    Failure.BROKEN: "RequestTimeout IncompleteBody InternalError OperationAborted BadDigest "
    "ConditionalRequestConflict XAmzContentSHA256Mismatch TemporaryRedirect NotImplemented",
    Failure.FULL: "QuotaExceeded TooManyObjects XMinioStorageFull XMinioAdminBucketQuotaExceeded",
    Failure.DENIED: "AccessDenied AllAccessDisabled AccountProblem NotSignedUp InvalidPayer "
    "AuthorizationFailure MissingSecurityHeader KMS.DisabledException KMS.InvalidStateException "
    "KMS.NotFoundException",
    Failure.CREDENTIALS: "ExpiredToken InvalidToken TokenRefreshRequired AuthenticationFailed "
    "InvalidAccessKeyId SignatureDoesNotMatch InvalidSecurity",
    Failure.CLOCK: "RequestTimeTooSkewed RequestExpired",
    Failure.REFUSED: "AuthorizationHeaderMalformed PermanentRedirect "
    "IllegalLocationConstraintException InvalidRegion EntityTooLarge KeyTooLongError "
    "MetadataTooLarge InvalidArgument InvalidBucketName InvalidDigest InvalidRequest "
    "InvalidStorageClass InvalidURI MethodNotAllowed MissingContentLength "
    "UnexpectedContent",
}
EXPECTED = {code: failure for failure, codes in CODES.items() for code in codes.split()}


def answered(status: int, code: str, more: str = "") -> Exception:
    """Return what the library raises for such an answer, in its most general form."""
    return RuntimeError(
        f"Generic S3 error: Server returned non-2xx status code: {status} X: "
        f"<Error><Code>{code}</Code>{more}</Error>"
    )


def test_each_code_of_the_table_is_looked_at() -> None:
    assert set(EXPECTED) == set(ERROR_CODES)


@pytest.mark.parametrize("code", EXPECTED)
def test_a_code_means_the_same_with_any_status(code: str) -> None:
    """AWS says with a 400 what others say with a 403 or a 503."""
    found = [failure_of(answered(status, code)) for status in (400, 403, 503)]
    assert {each.failure for each in found} == {EXPECTED[code]}
    assert {each.remedy for each in found} == {ERROR_CODES[code].remedy}
    assert all(code in str(each) for each in found)


def test_a_clock_that_is_wrong_is_told_with_how_much_it_is() -> None:
    there = datetime.now(UTC) + timedelta(seconds=3600)
    text = f"<ServerTime>{there:%Y-%m-%dT%H:%M:%SZ}</ServerTime>"
    told = str(failure_of(answered(403, "RequestTimeTooSkewed", text)))
    assert "this host's clock is 3600 s behind" in told or "3599 s behind" in told
    for odd in ("", "<ServerTime>2026-99-99</ServerTime>", "<ServerTime>SECRET</ServerTime>"):
        told = str(failure_of(answered(403, "RequestTimeTooSkewed", odd)))
        assert "this host's clock is not the server's" in told
        assert "SECRET" not in told


@pytest.mark.parametrize("fault", [Fault.TIMED_OUT, Fault.HALF_A_BODY])
async def test_what_a_server_has_not_got_in_time_is_sent_again(
    faulty: Faulty, fault: Fault
) -> None:
    """Both are a 400, and say nothing of the block."""
    server, endpoint = faulty
    async with open_s3(endpoint) as s3:
        server.misbehave(fault, "PUT", times=2)
        assert await s3.store(1) == [DONE]
        server.misbehave(fault, "GET", times=2)
        assert await s3.load(1) == [DONE]
        assert s3.states == [Connection.CONNECTING, Connection.UP]


@pytest.mark.parametrize("call", [S3.load, S3.store])
@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        (Fault.EXPIRED, "has expired"),
        (Fault.SKEWED, "clock"),
        (Fault.UNKNOWN_KEY, "keys of a user"),
    ],
)
async def test_what_all_requests_would_end_with_takes_the_tier_down_with_its_reason(
    faulty: Faulty, fault: Fault, remedy: str, call: Any
) -> None:
    """It was up, and each call failed. A key that is unknown by now is no right that is missing."""
    server, endpoint = faulty
    async with open_s3(endpoint) as s3:
        assert await s3.store(1) == [DONE]
        server.misbehave_always(fault)
        with capture_logs() as lines:
            assert await call(s3, 1) == [FAILED]
            await s3.until_state(Connection.GONE)
        server.behave()
        await s3.until_state(Connection.UP)
        assert await s3.load(1) == [DONE]
    (told,) = [line for line in lines if line["event"].startswith("s3 tier: not connected")]
    assert remedy in told["remedy"]


async def test_a_bucket_whose_policy_allows_reads_only_is_served(faulty: Faulty) -> None:
    """From the start on, and where it changes: stores fail apart, and the log names the right."""
    server, endpoint = faulty
    async with open_s3(endpoint) as s3:
        assert await s3.store(1) == [DONE]
    begin = server.begin
    server.begin = (  # type: ignore[method-assign]
        lambda method, path: Fault.DENIED if method == "PUT" else begin(method, path)
    )
    for prefix in ("p", "new"):
        with capture_logs() as lines:
            async with open_s3(endpoint, prefix) as s3:
                if prefix == "p":
                    assert await s3.load(1) == [DONE]
                assert await s3.store(2) == [FAILED]
                assert await s3.load(9) == [Outcome.ABSENT]
                assert s3.states == [Connection.CONNECTING, Connection.UP]
        (told,) = [line for line in lines if line["event"].startswith("s3 tier: fault")]
        assert "s3:PutObject" in told["reason"]
