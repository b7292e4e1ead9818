"""Repeats requests as long as that may help and a caller waits.

Full jitter ("Exponential Backoff and Jitter", AWS Architecture Blog, 2015): clients that
failed together do not retry together.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final, TypeVar

from kvtier.plugin_api.deadlines import time_left_s
from kvtier_backends.s3.failures import MAY_PASS, Failure, RequestFailed, timed_out

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvtier_backends.s3.request_limiter import RequestLimiter, Urgency

T = TypeVar("T")

ATTEMPTS_MAX: Final = 8
BACKOFF_S_FIRST: Final = 0.05
BACKOFF_S_MAX: Final = 2.0


def backoff_s(attempt: int) -> float:
    """Return the pause after this attempt, the first of which is 0."""
    bound = min(BACKOFF_S_MAX, BACKOFF_S_FIRST * 2.0 ** min(attempt, 32))
    return random.uniform(0.0, bound)  # noqa: S311 - no secret


class Attempts:
    """Sends requests in turns of a limiter. Loop thread only."""

    def __init__(
        self,
        limiter: RequestLimiter,
        timeout_s: float,
        on_failure: Callable[[RequestFailed, Urgency], None],
        is_worthwhile: Callable[[], bool] = lambda: True,
    ) -> None:
        """``on_failure``: called for each failed request, repeated or not.

        ``is_worthwhile``: called before a request is repeated; False: the server is known to be
        gone.
        """
        self._limiter = limiter
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._is_worthwhile = is_worthwhile

    async def run(self, urgency: Urgency, send: Callable[[], Awaitable[T]]) -> T:
        """Send until it succeeds, cannot, or no caller waits any more. Raises ``RequestFailed``.

        The remaining time counts from here on, turns and pauses included.
        """
        last: RequestFailed | None = None
        try:
            async with asyncio.timeout(min(time_left_s(), self._timeout_s)):
                for attempt in range(ATTEMPTS_MAX):
                    if attempt:
                        await asyncio.sleep(backoff_s(attempt - 1))
                    try:
                        return await self._send(urgency, send)
                    except RequestFailed as failed:
                        last = failed
                        if failed.failure not in MAY_PASS or not self._is_worthwhile():
                            raise
        except TimeoutError:
            if last is None:
                last = timed_out()
                self._on_failure(last, urgency)
        assert last is not None
        raise last from None

    async def _send(self, urgency: Urgency, send: Callable[[], Awaitable[T]]) -> T:
        async with self._limiter.turn(urgency) as turn:
            try:
                answer = await send()
            except RequestFailed as failed:
                if failed.failure is Failure.BUSY:
                    self._limiter.slow_down(turn)
                elif failed.failure not in MAY_PASS:
                    self._limiter.on_success()
                self._on_failure(failed, urgency)
                raise
            self._limiter.on_success()
            return answer
