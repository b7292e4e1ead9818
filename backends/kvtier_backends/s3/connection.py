"""Checks whether the server serves this namespace: its description can be read and written there.

There is no connection to watch: each request has its own. So the tier is up once the description
has been read and written; it is gone once a request fails in a way that more requests would
share, and the query for the description fails, too.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, TypeVar

from kvtier_backends.s3.failures import Failure, RequestFailed, WrongLength, timed_out
from kvtier_backends.shared.kept_connection import KeptConnection
from kvtier_backends.shared.namespaces import DESCRIPTION_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from kvtier.errors import StoreFault
    from kvtier_backends.incidents import TierCounters
    from kvtier_backends.s3.client import S3Client
    from kvtier_backends.shared.namespaces import OwnDescription

T = TypeVar("T")

CHECK_TIMEOUT_S_MAX: Final = 5.0

_REMEDIES: Final = {
    Failure.DENIED: "the server denies access. The key must be allowed to get, put and delete "
    "objects, and to list the bucket, without which it is denied where nothing is stored",
}
"""Used if the failure has no remedy of its own."""

_FOR_ALL: Final = frozenset({Failure.DENIED, Failure.CREDENTIALS, Failure.CLOCK})
"""Failures that any other request would meet as well."""

_OF_WRITES: Final = frozenset({Failure.DENIED, Failure.FULL})
"""Failures of writes to a bucket that may still serve its objects."""


class BucketConnection(KeptConnection):
    """Checks whether the server serves this namespace. Loop thread only."""

    def __init__(
        self,
        client: S3Client,
        *,
        description: OwnDescription,
        timeout_s: float,
        place: str,
        tier_name: str,
        counters: TierCounters,
    ) -> None:
        super().__init__("s3", tier_name, place, counters)
        self._client = client
        self._description = description
        self._timeout_s = min(timeout_s, CHECK_TIMEOUT_S_MAX)

    def suspect(self, failed: RequestFailed, *, of_store: bool) -> None:
        """Note that a request has failed. Its meaning for the server is checked soon."""
        if of_store and failed.failure is Failure.DENIED:
            return  # without write access, reads may work: stores fail separately
        if failed.failure in _FOR_ALL:
            # The description may be allowed and blocks not: more requests would be denied.
            self.lose(failed)
        elif failed.failure in (Failure.UNREACHABLE, Failure.NO_BUCKET):
            self.doubt()

    async def _connect(self) -> None:
        await self._client.renew()
        await self._agree(writes=True)

    async def _check(self) -> None:
        self._client.forget_connections()
        await self._agree(writes=False)

    def _remedy(self, problem: StoreFault) -> str:
        known = ""
        if isinstance(problem, RequestFailed):
            known = problem.remedy or _REMEDIES.get(problem.failure, "")
        return known or super()._remedy(problem)

    async def _agree(self, *, writes: bool) -> None:
        """Ensure that the description exists, and compare it. ``writes``: try to write it, too."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._agree_some_time(writes=writes)
        except TimeoutError:
            raise timed_out() from None

    async def _agree_some_time(self, *, writes: bool) -> None:
        wanted = self._description
        there = await self._read()
        if there is None and wanted.is_read_only:
            return
        if there is None:
            # If it can't be written, nothing of ours is there, and others' blocks may be read.
            if await _unless_refused(self._client.put(wanted.name, wanted.text)) is not False:
                return
            there = await self._read()  # another engine has just written one
        if there is None:
            raise RequestFailed(Failure.BROKEN, f"{wanted.name} is there and is not")
        wanted.refuse_other_untrusted(there)
        if writes and not wanted.is_read_only:  # again: this restarts a lifecycle rule's count
            await _unless_refused(self._client.replace(wanted.name, wanted.text))

    async def _read(self) -> memoryview | None:
        """Return the stored description, if there is one."""
        try:
            return await self._client.get_up_to(self._description.name, DESCRIPTION_BYTES_MAX)
        except RequestFailed as failed:
            if failed.failure is Failure.ABSENT:
                return None
            raise
        except WrongLength as wrong:
            raise self._description.no_description(str(wrong)) from None


async def _unless_refused(write: Awaitable[T]) -> T | None:
    """Write; return None if a bucket refuses writes but may serve its objects."""
    try:
        return await write
    except RequestFailed as failed:
        if failed.failure not in _OF_WRITES:
            raise
        return None
