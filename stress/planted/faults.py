"""The faults that can be planted: each was in kvtier once, and a soak or a user found it.

Each replaces a few functions by what they were, or by what amounts to the same.
"""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from msgspec import structs

from kvtier.core.events import PRIMARY, EventKind, EventLog
from kvtier.engine.link.tier_link import TierLink
from kvtier.engine.primary.load_completions import LoadCompletions
from kvtier.engine.primary.requests import Request
from kvtier.plugin_api.backend import Connection
from kvtier.tier import backend_driver, batching, bounded_tier, unbounded_tier
from kvtier.tier.unbounded_tier import UnboundedTier
from kvtier_backends.disk.backend import DiskBackend
from kvtier_backends.fs import backend as fs_backend
from kvtier_backends.fs import files
from kvtier_backends.posix import filesystem_of
from kvtier_backends.redis.redis_options import Credentials
from kvtier_backends.shared.kept_connection import KeptConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtier.core import messages as m
    from kvtier.core import wire
    from kvtier.core.statistics import PrimaryCounts
    from kvtier.engine.primary.tier_directory import Search
    from kvtier.plugin_api.backend import LoadBlock, Loaded, Outcome

Replacement = tuple[object, str, Any]
"""Whose function, its name, and what is in its place."""


@dataclass(frozen=True)
class Plant:
    """One fault."""

    layer: str  #: that finds it
    what: str
    replacements: Sequence[Replacement]

    def put(self) -> Callable[[], None]:
        """Put it into this process. Returns what takes it back."""
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in self.replacements]
        _replace(self.replacements)
        return lambda: _replace(before)


def _replace(replacements: Iterable[Replacement]) -> None:
    for owner, name, function in replacements:
        setattr(owner, name, function)


# --- the engine ---


def _unmarked(keys: tuple[bytes, ...], _mark: bytes) -> tuple[bytes, ...]:
    return keys


_promotion_ended = LoadCompletions._ended  # noqa: SLF001 - as are all below: what is replaced
_tier_fenced = TierLink._tier_fenced  # noqa: SLF001
_add_event = EventLog.add
_read_password = Credentials.password
_passwords: dict[str, str | None] = {}
_begin_request = Request.__init__


def _take_any_promotion(self: LoadCompletions, message: m.PromotionEnded) -> None:
    _promotion_ended(self, structs.replace(message, epoch=self._epoch))


def _forget_cascades(self: TierLink, message: wire.TierFenced) -> None:
    self._stores.pop_all()
    _tier_fenced(self, message)


class _NeverSeen(set[bytes]):
    """Keys of which nobody finds out that they are here."""

    def __contains__(self, key: object) -> bool:
        return False

    def isdisjoint(self, _other: object) -> bool:
        return True


def _begin_with_sets_that_change_sides(self: Request, search: Search) -> None:
    _begin_request(self, search)
    self.hits, self.misses = _NeverSeen(), _NeverSeen()


def _count_what_is_a_hit_now(self: Request, counts: PrimaryCounts) -> None:
    hits = len(self.hits - self.misses)
    counts.queries += len(self.hits | self.misses) - self._queries_counted
    counts.hits += hits - self._hits_counted
    self._queries_counted, self._hits_counted = len(self.hits | self.misses), hits


def _keep_removals_of_tiers(self: EventLog, kind: EventKind, keys: Sequence[bytes] = ()) -> None:
    if kind is not EventKind.REMOVED or self._tier == PRIMARY:
        _add_event(self, kind, keys)


# --- tiers ---


def _unchecked(
    _block: LoadBlock,
    loaded: Loaded,
    _computed: bytes | None,
    _step_bytes: int,
    *,
    accepts_unchecked: bool,
) -> Outcome:
    del accepts_unchecked
    return loaded.outcome


def _tell_nobody(_self: UnboundedTier, _gone: object) -> None:
    pass


def _sweep_with_types(*_: object) -> NoReturn:
    raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def _thread_that_nobody_hears(
    work: Callable[[], object], name: str | None = None, *_: object
) -> threading.Thread:
    def work_and_raise() -> None:
        work()
        raise KeyError(name)

    return threading.Thread(target=work_and_raise, name=name, daemon=True)


def _has_the_number(self: DiskBackend) -> bool:
    return filesystem_of(self._path) == self._filesystem


async def _give_up_what_was_lost(self: KeptConnection) -> None:
    while True:
        was_up = self.state is Connection.UP
        await self._turn()
        if was_up and self.state is not Connection.UP:
            return


def _read_once(self: Credentials) -> str | None:
    if self.source not in _passwords:
        _passwords[self.source] = _read_password(self)
    return _passwords[self.source]


PLANTS: Final = {
    "old_weights": Plant(
        "runtime",
        "what was stored before a reset is found after it",
        [(each, "marked", _unmarked) for each in (bounded_tier, unbounded_tier, batching)],
    ),
    "late_load": Plant(
        "runtime",
        "what a tier delivers for a lookup from before a reset is taken for one after it",
        [(LoadCompletions, "_ended", _take_any_promotion)],
    ),
    "falling_counter": Plant(
        "runtime",
        "a hit that was counted is a miss after a later lookup of the same request",
        [
            (Request, "__init__", _begin_with_sets_that_change_sides),
            (Request, "count", _count_what_is_a_hit_now),
        ],
    ),
    "pins_left": Plant(
        "runtime",
        "a tier's process that dies leaves its stores' blocks pinned",
        [(TierLink, "_tier_fenced", _forget_cascades)],
    ),
    "untold_removals": Plant(
        "runtime",
        "no event tells of what leaves a secondary tier",
        [(EventLog, "add", _keep_removals_of_tiers)],
    ),
    "untold_losses": Plant(
        "runtime",
        "no event tells of a block that a load of a shared tier found damaged",
        [(UnboundedTier, "_tell_gone", _tell_nobody)],
    ),
    "torn_blocks": Plant(
        "filesystem",
        "what storage returns is not compared with its checksum",
        [(backend_driver, "_checked", _unchecked)],
    ),
    "no_sweep": Plant(
        "filesystem",
        "the sweep of what dead writers left ends where names are listed without types",
        [(files, "sweep_after", _sweep_with_types)],
    ),
    "unheard": Plant(
        "filesystem",
        "a thread raises when its work is done, and no log has it",
        [(fs_backend, "daemon_thread", _thread_that_nobody_hears)],
    ),
    "other_number": Plant(
        "filesystem",
        "a folder whose filesystem has another number is not used again",
        [(DiskBackend, "_is_our_place", _has_the_number)],
    ),
    "lost_for_good": Plant(
        "remote",
        "a server that was lost is not connected to again",
        [(KeptConnection, "_run", _give_up_what_was_lost)],
    ),
    "password_kept": Plant(
        "remote",
        "a password is read when the tier starts, and never again",
        [(Credentials, "password", _read_once)],
    ),
}
