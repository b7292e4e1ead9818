"""Tries the tier's operations with a bucket, once and step by step: for ``kvtier check``."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import StoreFault
from kvtier_backends.s3.connection import CHECK_TIMEOUT_S_MAX
from kvtier_backends.s3.failures import Failure, RequestFailed, timed_out

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvtier.plugin_api.options import Options
    from kvtier_backends.s3.client import S3Client
    from kvtier_backends.s3.s3_options import Address, S3Options

NAMESPACE: Final = "kvtier-check"
BODY: Final = b"kvtier check" * 16
_REMEDIES: Final = {
    Failure.NO_BUCKET: "Create the bucket; the tier makes none",
    Failure.UNREACHABLE: "Let this host reach the server, or set endpoint and region",
    Failure.FULL: "Make room, or raise the quota",
}


async def try_bucket(
    client: S3Client, address: Address, given: S3Options, reader: Options, *, read_only: bool
) -> str:
    """Return a summary of the successful steps. Raises ``ConfigError`` for a failed one."""
    digits = secrets.token_hex(16)
    name = address.below(NAMESPACE, digits[:3], digits)
    steps: list[tuple[str, str, Callable[[], Awaitable[Any]]]] = [
        ("looking for an object", "s3:ListBucket and s3:GetObject", lambda: client.length(name)),
        ("storing one", "s3:PutObject", lambda: client.put(name, BODY, b"trailer")),
        ("loading it", "s3:GetObject", lambda: client.get(name, len(BODY).__eq__)),
        ("removing it", "s3:DeleteObject", lambda: client.remove([name])),
    ]
    for step, right, call in steps[:1] if read_only else steps:
        try:
            async with asyncio.timeout(min(given.request_timeout_s, CHECK_TIMEOUT_S_MAX)):
                await call()
        except (StoreFault, TimeoutError) as problem:
            failed = problem if isinstance(problem, StoreFault) else timed_out()
            if not read_only:
                with suppress(StoreFault, TimeoutError):
                    async with asyncio.timeout(CHECK_TIMEOUT_S_MAX):
                        await client.remove([name])
            raise reader.error(
                "url", given.url, f"was tried: {step} failed ({failed}). {_remedy(failed, right)}"
            ) from failed
    done = "looked for" if read_only else "stored, loaded and removed"
    return f"its bucket was reached; an object was {done}"


def _remedy(failed: StoreFault, right: str) -> str:
    failure = failed.failure if isinstance(failed, RequestFailed) else None
    if failure in _REMEDIES:
        return _REMEDIES[failure]
    if isinstance(failed, RequestFailed) and failed.remedy:
        return failed.remedy[0].upper() + failed.remedy[1:]
    if failure is Failure.DENIED:
        return f"Give the key the right {right}, or name another key in access_key_env"
    return "See to the server"
