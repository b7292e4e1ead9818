"""Maps the error codes of S3, and of other stores that answer as it does, to their meaning.

The status gives the meaning of an unlisted code (``failures.py``). ``Failure`` documents its
consequence for a block and for the tier. The codes are from the reference of S3's API ("List of
error codes"), of MinIO, Ceph, Google and Azure: those that requests for single objects can meet.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, NamedTuple


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
