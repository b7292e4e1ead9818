"""S3's error codes: what each means, and what the tier does about those that concern all of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from kvtier_backends.s3.failures import ERROR_CODES, Failure, failure_of

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
