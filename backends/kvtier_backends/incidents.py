"""Counts incidents with a tier's files, and logs each kind of incident once per episode."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog  # noqa: F401 - with the first line there may be no descriptor left for it

from kvtier.plugin_api.log import log
from kvtier_backends.posix import NO_ROOM

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

EPISODE_S_MIN: Final = 60.0
FULL: Final = "full"
ROOM: Final = "free space or inodes there, or give the tier a smaller capacity_bytes"


class TierCounters:
    """The counters of one tier, by name. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name] += count

    def counts(self) -> Mapping[str, int]:
        """Return a snapshot of all counters that are not 0."""
        with self._lock:
            return dict(self._counts)


@dataclass
class Episode:
    """Incidents of one kind, of which the first and the end are logged."""

    name: str
    count: int  #: blocks, or files
    began: float
    is_over: bool = False


class IncidentLog:
    """Logs and counts one tier's incidents. Any thread may call any method.

    ``folder`` is where the tier's files are. An episode of one kind of incident
    begins with a log line, and ends with another, at a success on the same side (``"load"``
    or ``"store"``) that comes at least ``EPISODE_S_MIN`` later: a medium that
    works half of the time is also reported only once. All that finds the filesystem full is
    one episode.
    """

    def __init__(
        self, backend_type: str, tier_name: str, folder: str, counters: TierCounters
    ) -> None:
        self._event = f"{backend_type} tier: fault"
        self._tier_name = tier_name
        self._folder = folder
        self._counters = counters
        self._lock = threading.Lock()
        # For each side, by kind.
        self._episodes: dict[str, dict[str, Episode]] = {"load": {}, "store": {}}

    def report(
        self,
        side: str,
        name: str,
        reason: object,
        *,
        path: str = "",
        count: int = 1,
        blocks: int | None = None,
    ) -> None:
        """Count ``name``, and log it if its kind has not been logged in this episode.

        ``path`` is the file concerned, if there is one. ``blocks``: how many blocks or files it
        hit, if that is not what is counted.
        """
        hit = count if blocks is None else blocks
        self._counters.add(name, count)
        number = getattr(reason, "errno", None)
        is_full = number in NO_ROOM
        kind = FULL if is_full else f"{name}: {type(reason).__name__} {number}"
        now = time.monotonic()
        with self._lock:
            episode = self._episodes[side].get(kind)
            if episode is not None and not (episode.is_over and _is_old(episode, now)):
                episode.count += hit
                return
            self._episodes[side][kind] = Episode(name, hit, now)
        log.warning(
            f"{self._event}, logged once until it is over",
            kind=name,
            tier=self._tier_name,
            path=path or self._folder,
            reason=str(reason),
            **({"remedy": ROOM} if is_full else {}),
        )

    def success(self, side: str, *, is_full: bool = False) -> None:
        """End the episodes of ``side`` that are old enough. Takes no lock if there are none.

        ``is_full``: the filesystem still is, though there was room for this.
        """
        if self._episodes[side]:
            now = time.monotonic()
            with self._lock:
                episodes = self._episodes[side]
                old = [kind for kind, each in episodes.items() if _is_old(each, now)]
                over = _close(episodes.pop(kind) for kind in old if not (is_full and kind == FULL))
            self._log_end(over, now)

    def end(self, side: str, name: str) -> None:
        """End the episodes of ``name``. Another that begins within the minute is not logged."""
        with self._lock:
            over = _close(each for each in self._episodes[side].values() if each.name == name)
        self._log_end(over, time.monotonic())

    def _log_end(self, episodes: Iterable[Episode], now: float) -> None:
        for episode in episodes:
            log.info(
                f"{self._event} is over",
                kind=episode.name,
                tier=self._tier_name,
                path=self._folder,
                count=episode.count,
                seconds=round(now - episode.began, 3),
            )


def _close(episodes: Iterable[Episode]) -> list[Episode]:
    """Mark episodes as over; return those that were not."""
    ended = [each for each in episodes if not each.is_over]
    for each in ended:
        each.is_over = True
    return ended


def _is_old(episode: Episode, now: float) -> bool:
    return now - episode.began >= EPISODE_S_MIN
