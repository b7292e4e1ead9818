"""Decides whether a tier is given work, by its circuit breakers and its connection.

Part of a link's actor. It notifies the primary tier when the tier becomes usable, or no longer is,
and logs changes of the breakers.

Peers of a tier have a breaker for each address that fails: a request-scoped tier may load from many
engines, each at its own address. A dead or stopped engine affects only the requests that name it:
its failures open a breaker of its own. For the tier, a peer whose breaker opens counts as one
failure, which a success of any other peer cancels. So the tier's breaker opens only if several
peers fail and none does any work.

Addresses come with requests, from any client, so only failing ones are kept, up to a limit.

A backend that needs a server reports the state of its connection. While it has none, the link
gives the tier no work. This complements the circuit breaker, which detects a sick tier by its
failures only, one deadline after the other. A backend that reports nothing has no server, and
counts as connected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.core import messages as m
from kvtier.engine.link.circuit_breaker import Breaker, BreakerState, Work
from kvtier.engine.link.flights import LinkTime
from kvtier.plugin_api.backend import Connection
from kvtier.plugin_api.deadlines import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.core.actor import Mailbox
    from kvtier.core.statistics import TierCounts
    from kvtier.plugin_api.keys import RequestId
    from kvtier.settings.runtime_config import RuntimeConfig


NAMES: Final = {Work.PROBE: "probes", Work.LOAD: "loads", Work.STORE: "stores"}
"""Names of the kinds of work in logs and statistics."""

NOT_LOADED: Final = "blocks_not_loaded"
NOT_STORED: Final = "blocks_not_stored"
LOST: Final = {Work.PROBE: (), Work.LOAD: (NOT_LOADED,), Work.STORE: (NOT_STORED,)}
"""Fields of the log line "tier is back", by kind of work."""


STEADY_S: Final = 60.0
LASTING_S: Final = 5.0
"""Within ``STEADY_S`` of a return, a loss is logged only once it has lasted this long."""


class ServerConnection:
    """The connection between one tier's backend and its server. Its notices go to ``log``."""

    def __init__(self, tier_name: str, log: Mailbox) -> None:
        self.state = Connection.UP
        self._has_reported = False
        self._lost_at, self._back_at = 0.0, -NEVER
        self._say_lost_at = NEVER  # NEVER: no loss is still to be logged
        self._tier_name = tier_name
        self._log = log

    @property
    def is_up(self) -> bool:
        """Whether the tier may be given work."""
        return self.state is Connection.UP

    def change(self, state: Connection, now: float, lost: Mapping[str, int]) -> bool:
        """Apply the state that the backend reports; return whether it has changed.

        ``lost``: blocks lost since the tier last worked, for the log.
        """
        self._has_reported = True
        was, self.state = self.state, state
        if state is was:
            return False
        if state is Connection.GONE:
            self._lost_at = now
            self._say_lost_at = now + (LASTING_S if now - self._back_at < STEADY_S else 0.0)
            self.pass_time(now)
        if state is Connection.UP:
            is_first = was is Connection.CONNECTING  # no fault has ended
            end = {} if is_first else {"seconds": round(now - self._lost_at, 3), **lost}
            if not self.has_untold_loss:
                self._say("tier has reached its server", "info", end)
            if not is_first:
                self._back_at, self._say_lost_at = now, NEVER
        return True

    @property
    def has_untold_loss(self) -> bool:
        """Whether the server is lost, and that is not logged yet."""
        return self._say_lost_at != NEVER

    def pass_time(self, now: float) -> None:
        """Log a loss that has lasted long enough."""
        if now >= self._say_lost_at:
            self._say_lost_at = NEVER
            self._say("tier lost its server", "warning", {})

    def set_connects(self, *, connects: bool) -> None:
        """Note whether the backend needs a server. It may have reported its state already."""
        if connects and not self._has_reported:
            self.state = Connection.CONNECTING

    def restart(self) -> None:
        """Note that the backend is gone, and that another will follow."""
        self.state, self._say_lost_at = Connection.UP, NEVER
        self._has_reported = False

    def _say(self, event: str, level: m.NoticeLevel, numbers: Mapping[str, float]) -> None:
        self._log.post(m.Notice(event, self._tier_name, "", level, numbers))


class TierRecord(NamedTuple):
    """How often a tier's work of one kind succeeded, and how often it failed."""

    worked: int  #: without probes: one that finds nothing shows little
    failed: int
    is_bypassed: bool  #: whether some of this work is not sent now


def _works(*, stores: bool) -> tuple[Work, ...]:
    return (Work.STORE,) if stores else (Work.LOAD, Work.PROBE)


class TierHealth:
    """The health of one tier."""

    def __init__(
        self,
        number: int,
        config: RuntimeConfig,
        connection: ServerConnection,
        counts: TierCounts,
        primary: Mailbox,
        log: Mailbox,
        peer_of: Callable[[RequestId], str],
    ) -> None:
        """``number``: the tier's."""
        self.peer_of = peer_of  #: returns the peer that does a request's work, if it has peers
        self.time = LinkTime()  #: used for its deadlines and pauses
        self._number = number
        self._name = config.tiers[number].name

        def new_breaker() -> Breaker:
            pause_s, pause_s_max = config.breaker_pause_s, config.breaker_pause_s_max
            return Breaker(config.breaker_failures_max, pause_s, pause_s_max)

        self._breakers = {work: new_breaker() for work in Work}
        self._peers = PeerHealth(new_breaker)
        self.trusts, self.on_sent = self._peers.allows, self._peers.on_sent
        self._connection = connection
        self._counts = counts
        self._primary = primary
        self._log = log
        self._told = (True, True)
        self._bypassed: set[Work] = set()  # by ``bypass``
        self._worked = dict.fromkeys(Work, 0)
        self._failed = dict.fromkeys(Work, 0)
        self._lost_loads = 0  # blocks whose load failed or was given up since one succeeded
        self._dropped_before = 0  # cascades_dropped when a store last succeeded
        self.is_open = False  #: whether its backend has ever opened

    @property
    def states(self) -> dict[Work, BreakerState]:
        """The state of the breaker of each kind of work."""
        return {work: breaker.state for work, breaker in self._breakers.items()}

    @property
    def is_disabled(self) -> bool:
        """Whether the tier broke, and was not restarted."""
        return self._breakers[Work.LOAD].state is BreakerState.DISABLED

    def record(self, *, stores: bool) -> TierRecord:
        """Return how the tier's stores, or its loads and probes, have gone so far."""
        works = _works(stores=stores)
        failed = sum(self._failed[work] for work in works)
        bypassed = not all(self.takes(work) for work in works)
        return TierRecord(self._worked[works[0]], failed, is_bypassed=bypassed)

    def bypass(self, *, stores: bool, is_bypassed: bool) -> None:
        """Stop the tier's stores, or its loads and probes, or allow them again."""
        change = self._bypassed.update if is_bypassed else self._bypassed.difference_update
        change(_works(stores=stores))

    def takes(self, work: Work) -> bool:
        """Return whether work may be sent, now or once a trial has ended."""
        may = self._connection.is_up and work not in self._bypassed
        return may and self._breakers[work].allows

    def tries(self, work: Work) -> bool:
        """Return whether the next piece of work is a trial of the tier."""
        return self._breakers[work].state is BreakerState.HALF_OPEN

    def try_acquire(self, work: Work) -> bool:
        """Return whether a piece of work may be sent now. It may become the trial."""
        return self.takes(work) and self._breakers[work].try_acquire()

    @property
    def pauses(self) -> bool:
        """Whether a breaker is to be tried once its pause is over."""
        is_open = any(each.state is BreakerState.OPEN for each in self._breakers.values())
        return is_open or self._peers.pauses

    def end_pauses(self) -> None:
        """Begin trials of breakers whose pause is over."""
        if self.pauses:
            for breaker in self._breakers.values():
                breaker.pass_time(self.time.now)
            self._peers.pass_time(self.time.now)
            self.tell_usable()

    def succeeded(self, work: Work, peer: str) -> None:
        """Note that work succeeded. ``peer``: which peer of the tier did it, if it has peers."""
        opened_at = self._peers.succeeded(work, peer)
        if opened_at is not None:
            self._say_back("peer is back", f"{NAMES[work]} from {peer} resume", opened_at)
        self._worked[work] += 1
        breaker = self._breakers[work]
        was = breaker.state
        breaker.succeeded()
        if was is BreakerState.HALF_OPEN and breaker.state is BreakerState.CLOSED:
            self._say_back("tier is back", f"{NAMES[work]} resume", breaker.opened_at, *LOST[work])
        if work is Work.LOAD and breaker.state is BreakerState.CLOSED:
            self._lost_loads = 0
        elif work is Work.STORE and breaker.state is BreakerState.CLOSED:
            self._dropped_before = self._counts.cascades_dropped
        self.tell_usable()

    def on_loads_lost(self, blocks: int) -> None:
        """Note blocks whose load failed, or was given up."""
        self._lost_loads += blocks

    def lost_blocks(self) -> dict[str, int]:
        """Return how many blocks were lost since the tier last loaded, or stored. Any thread."""
        return {
            NOT_LOADED: self._lost_loads,
            NOT_STORED: self._counts.cascades_dropped - self._dropped_before,
        }

    def failed(self, work: Work, how: str, peer: str = "") -> None:
        """Note that the tier failed, or one of its peers."""
        self._change(work, Breaker.failed, how, peer)

    def late(self, work: Work, count: int, peer: str, *, is_stalled: bool) -> None:
        """Note that the tier is late with ``count`` pieces of work; ``is_stalled``: with all."""
        if is_stalled:
            how = f"completed none of its {NAMES[work]} for too long"
            self._change(work, Breaker.stalled, how, peer)
            return
        for _ in range(count):
            self.failed(work, f"did not complete one of its {NAMES[work]} in time", peer)

    def _change(
        self, work: Work, change: Callable[[Breaker, float], None], how: str, peer: str
    ) -> None:
        self._failed[work] += 1
        if peer:
            opens = self._peers.change(work, peer, change, self.time.now)
            if opens:
                self._say("peer bypassed", f"{peer} {how}: {NAMES[work]} from it pause")
            if not (opens or self.tries(work)):
                return
            change, how = Breaker.failed, "has several peers that fail"
        breaker = self._breakers[work]
        was = breaker.state
        change(breaker, self.time.now)
        if was is BreakerState.CLOSED and breaker.state is BreakerState.OPEN:
            self._counts.breaker_opened += 1
            self._say("tier bypassed", f"{how}: {NAMES[work]} pause")
        self.tell_usable()

    def showed_nothing(self, work: Work) -> None:
        """Note that work of a kind ended without a success or a failure."""
        self._breakers[work].showed_nothing()
        self._peers.showed_nothing(work)

    def reconnected(self) -> None:
        """Try all work again at once: the server had failed, and is back.

        Or the tier has opened for the first time, however long that took.
        """
        self.is_open = True
        for breaker in self._breakers.values():
            breaker.reconnected()
        self._peers.forget()
        self.tell_usable()

    def broke(self) -> None:
        """Send no more work unless the tier is restarted."""
        for breaker in self._breakers.values():
            breaker.broke()

    def on_restart(self) -> None:
        """Trust a fresh cell."""
        for breaker in self._breakers.values():
            breaker.on_restart()
        self._peers.forget()

    def tell_usable(self) -> None:
        """Notify the primary tier if the tier's usability for loads or probes has changed."""
        told = (self.takes(Work.LOAD), self.takes(Work.PROBE))
        if told != self._told:
            self._told = told
            usable, answers = told
            self._primary.post(m.TierUsable(self._number, usable, answers=answers))

    def _say(self, event: str, detail: str) -> None:
        self._log.post(m.Notice(event, self._name, detail))

    def _say_back(self, event: str, detail: str, since: float, *lost: str) -> None:
        blocks = self.lost_blocks()
        end = {"seconds": round(self.time.now - since, 3), **{name: blocks[name] for name in lost}}
        self._log.post(m.Notice(event, self._name, detail, "info", end))


PEERS_MAX: Final = 256
"""Limit on breakers kept: beyond it, the oldest is forgotten."""


class PeerHealth:
    """The breakers of one tier's peers."""

    def __init__(self, new_breaker: Callable[[], Breaker]) -> None:
        self._new_breaker = new_breaker
        self._failing: dict[tuple[str, Work], Breaker] = {}

    @property
    def pauses(self) -> bool:
        """Whether a breaker is to be tried once its pause is over."""
        return any(each.state is BreakerState.OPEN for each in self._failing.values())

    def allows(self, work: Work, peer: str) -> bool:
        """Return whether a piece of work may be sent. A peer that fails loads is not probed."""
        if not self._failing:  # the usual case: this is called for each job and each probe
            return True
        both = (self._failing.get((peer, each)) for each in (work, Work.LOAD))
        return all(each is None or each.has_turn for each in both)

    def on_sent(self, work: Work, peer: str) -> None:
        """Note that a piece of work is sent. It may be the trial of a breaker."""
        breaker = self._failing.get((peer, work))
        if breaker is not None:
            breaker.try_acquire()

    def succeeded(self, work: Work, peer: str) -> float | None:
        """Note that a peer did some work. If it has recovered, return when it was bypassed."""
        breaker = self._failing.get((peer, work))
        if breaker is None:
            return None
        was = breaker.state
        breaker.succeeded()
        if breaker.state is BreakerState.CLOSED:
            del self._failing[peer, work]
        return breaker.opened_at if was is BreakerState.HALF_OPEN else None

    def change(
        self, work: Work, peer: str, change: Callable[[Breaker, float], None], now: float
    ) -> bool:
        """Note a failure with a method of its breaker; return whether the breaker opens."""
        breaker = self._failing.get((peer, work))
        if breaker is None:
            if len(self._failing) >= PEERS_MAX:
                del self._failing[next(iter(self._failing))]
            breaker = self._failing[peer, work] = self._new_breaker()
        was = breaker.state
        change(breaker, now)
        return was is BreakerState.CLOSED and breaker.state is BreakerState.OPEN

    def showed_nothing(self, work: Work) -> None:
        """Note that all work sent ended without a success or a failure: try again."""
        for (_, kind), breaker in self._failing.items():
            if kind is work:
                breaker.showed_nothing()

    def pass_time(self, now: float) -> None:
        """Begin the trials of breakers whose pause is over."""
        for breaker in self._failing.values():
            breaker.pass_time(now)

    def forget(self) -> None:
        """Trust all peers again."""
        self._failing.clear()
