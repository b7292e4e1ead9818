"""A run of a layer whose runtime is in this process: both phases, and the time axis of its plan."""

from __future__ import annotations

import random
import time
from abc import abstractmethod
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from msgspec.structs import asdict

from kvtier.errors import ConfigError
from stress.failure import Failure
from stress.layer import Layer
from stress.limits import PATIENCE_S, limits_of
from stress.load import Counts
from stress.log_file import log_into
from stress.pace import HANGS, ByClock, ByCounts
from stress.plan import Kind
from stress.record import NOTICED
from stress.resources import resources_now
from stress.runtime.heals import Heals
from stress.runtime.rest import Rest
from stress.runtime.session import Session, quick_restarts
from stress.runtime.use import note_use

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from stress.layer import Injector
    from stress.log_file import Noticed
    from stress.plan import Fault, Plan
    from stress.record import Record
    from stress.runtime.residency import Residency
    from stress.runtime.rest import Swept

SAMPLE_S: Final = 0.25
LOOK_S: Final = 0.1
PATIENT_TIER: Final = dict.fromkeys(
    ("probe_timeout_s", "promote_timeout_s", "store_timeout_s", "start_timeout_s"), PATIENCE_S
)
"""Of each tier in the gate, where what hangs has the clock leap past them (``stress.pace``)."""

SERVED_MIN: Final = 100
"""Blocks that each tier must serve under the faults of the gate, at least."""

TIMEOUTS: Final = {"probe_timeout_s": 0.2, "promote_timeout_s": 0.5, "store_timeout_s": 2.0}
"""Of each tier by the clock."""

IMPATIENT: Final = {
    "breaker_pause_s": 0.02,
    "breaker_pause_s_max": 0.2,
    "lease_timeout_s": 2.0,
}
POLICIES: Final = ("reuse", "lru", "arc")

RESET_FLUSHES: Final = ("unnamed", "named", "named_again")

ENGINE_KINDS: Final = (
    Kind("reset", RESET_FLUSHES, per_minute=20),
    Kind("reopen", ("engine",), per_minute=2),
)
"""Done to the runtime itself: weights change, and the engine ends and starts again."""


class InProcess(Layer):
    """A layer whose runtime is in this process. ``world`` and ``tiers`` say over what."""

    heals_s: ClassVar[Mapping[str, float]] = {}
    """So soon a tier must serve again after a fault of these kinds, unless another one begins."""
    harmless: ClassVar[frozenset[str]] = frozenset()  #: kinds that keep no tier from serving
    hangs_at_close: ClassVar[bool] = False  #: whether a tier may hang at close, while faults last
    requests_min: ClassVar[int]  #: what the gate must have decided under faults ...
    blocks_read_min: ClassVar[int]  #: ... and read back and compared

    who_does: Mapping[str, Injector]  #: each kind but the engine's; set by ``world``

    sweeping: Swept | None = None  #: likewise, if there is such a tier

    residency: Residency | None = None

    @abstractmethod
    @contextmanager
    def world(self, folder: Path, record: Record) -> Iterator[None]:
        """Set up what the tiers stand on, until the end of the block."""
        yield

    @abstractmethod
    def tiers(self, seed: int, policy: str) -> list[dict[str, Any]]:
        """Return the settings of the tiers."""

    def settings(self, seed: int) -> Mapping[str, Any]:
        """Return the runtime's: the seed picks the policy, and what a reset means."""
        policy = POLICIES[seed % len(POLICIES)]
        return {
            **IMPATIENT,
            "eviction_policy": policy,
            "on_reset": ("new_generation", "keep")[seed // 2 % 2],
            "secondary_tiers": self.tiers(seed, policy),
        }

    def clock(self) -> float:
        """Return what the scheduler takes for the time."""
        return time.monotonic()

    def may_begin(self, _fault: Fault, _session: Session) -> bool:
        """Tell whether a fault may begin just now; it is left out otherwise."""
        return True

    def run(self, plan: Plan, record: Record, folder: Path) -> None:
        """Carry out a plan. Raises ``Failure``."""
        with ExitStack() as stack:
            noticed = stack.enter_context(log_into(folder / "log"))
            stack.enter_context(quick_restarts())
            stack.enter_context(self.world(folder, record))
            before = resources_now()
            run = _Run(self, plan, record, noticed)
            stack.callback(run.clean_up)
            run.start()
            run.phase_one()
            run.phase_two()
            run.close()
            run.nothing_is_left(before)


class _Run:
    """One run's state."""

    def __init__(self, layer: InProcess, plan: Plan, record: Record, noticed: Noticed) -> None:
        self._layer = layer
        self._plan = plan
        self._record = record
        self._noticed = noticed
        self._counts = Counts()
        self._dice = random.Random(f"{plan.seed}:load")
        self._limits = limits_of(is_gate=plan.is_gate)
        self._settings = layer.settings(plan.seed)
        if plan.is_gate:
            self._settings = _made_patient(self._settings)
        self._pace: ByClock | ByCounts | None = None  # until the plan begins
        self._kept: list[Session] = []  # closed, and a tier of theirs hung then
        self._under_way: list[tuple[float, float, Fault]] = []  # ends by its pace, began, what
        self._resets = 0
        self._noticed_before: dict[str, dict[str, int]] = {}
        self._session = self._open()
        limits_s = {} if plan.is_gate else layer.heals_s
        self._heals = Heals(limits_s, layer.harmless, self._session.tiers)
        self._is_open = True
        self._began_s = time.monotonic()
        self._next_sample_s = 0.0

    def _open(self) -> Session:
        return Session(
            self._settings, self._clock, self._dice, self._counts, self._noticed, self._limits
        )

    def _clock(self) -> float:
        """Return what the scheduler takes for the time."""
        return self._layer.clock() + (0.0 if self._pace is None else self._pace.leapt_s)

    def start(self) -> None:
        """Serve until nothing is new any more, and begin the time axis."""
        self._warm_up()
        self._before = resources_now()
        self._began_s, self._next_sample_s = time.monotonic(), 0.0

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _warm_up(self) -> None:
        """Serve from each tier once, so that all is there that comes with the first use."""
        self._next_sample_s = float("inf")
        rest = Rest(self._session, self._record, self._sample, self._limits)
        rest.hits_are_back()
        rest.nothing_is_held()
        self._record.checks.clear()

    # --- phase one ---

    def phase_one(self) -> None:
        """Serve requests while faults begin and end."""
        self._counts_before = replace(self._counts, served_by=self._counts.served_by.copy())
        self._pace = (
            ByCounts(self._plan, self.missing) if self._plan.is_gate else ByClock(self._plan)
        )
        while not self._pace.is_over():
            for fault in self._pace.due():
                self._begin(fault, self._pace.now_s())
            self._end_due(self._pace.now_s())
            decided = self._counts.decided
            self._session.load.step()
            self._pace.step(self._counts.decided - decided)
            self._heals.look(self._now_s(), self._counts.served_by)
            self._sample()
        self._end_due(float("inf"))
        self._record.faults_ended_s = self._now_s()
        note_use(self._record, self._session.tiers, self._served())
        self._heals.note(self._record)

    def _served(self) -> Counter[int]:
        """Return how many blocks each tier has served under faults."""
        return self._counts.served_by - self._counts_before.served_by

    def missing(self) -> Mapping[str, Collection[str]]:
        """Return what the faults of the gate have not shown yet, and which of them may."""
        assert self._plan.gate is not None, "a plan of the clock's"
        found: dict[str, Collection[str]] = {
            f"a fault {kind.name} that hit something": (kind.name,)
            for kind in self._plan.gate
            if not self._record.injected[kind.name]
        }
        before, served = self._counts_before, self._served()
        reached = {
            "requests": (self._counts.decided - before.decided, self._layer.requests_min),
            "blocks read": (
                self._counts.blocks_read - before.blocks_read,
                self._layer.blocks_read_min,
            ),
            **{
                f"blocks of {tier}": (served[number], SERVED_MIN)
                for number, tier in enumerate(self._session.tiers)
            },
        }
        found |= {
            f"{count:,} of {wanted:,} {what}": ()
            for what, (count, wanted) in reached.items()
            if count < wanted
        }
        hangs = HANGS.intersection(kind.name for kind in self._plan.gate)
        if hangs and not self._deadlines_missed():
            found["a deadline that ran out"] = hangs
        return found

    def _deadlines_missed(self) -> int:
        """Return how many there were, of all runtimes so far."""
        now = [asdict(tier.counts) for tier in self._session.statistics().tiers]
        return sum(
            counts["probes_timed_out"] + counts["jobs_timed_out"]
            for counts in (*now, *self._noticed_before.values())
        )

    def _begin(self, fault: Fault, at_s: float) -> None:
        """Begin a fault; ``at_s`` by its pace."""
        if not self._layer.may_begin(fault, self._session):
            return
        began_s = self._now_s()
        if fault.kind != "reset":
            self._heals.begins(fault)
        if fault.kind == "reset":
            self._reset(fault)
        elif fault.kind == "reopen":
            self._reopen()
        else:
            done = self._layer.who_does[fault.kind].begin(
                fault
            )  # those that come later are counted
            self._record.injected[fault.kind] += done
        if fault.for_s:
            self._under_way.append((at_s + fault.for_s, began_s, fault))
        else:
            self._heals.ended(fault, self._now_s(), self._counts.served_by)
            self._record.note(fault, began_s, self._now_s())

    def _end_due(self, now_s: float) -> None:
        self._end_all([each for each in self._under_way if each[0] <= now_s])

    def _end_all(self, due: list[tuple[float, float, Fault]]) -> None:
        for each in due:
            self._under_way.remove(each)
            _, began_s, fault = each
            self._layer.who_does[fault.kind].end(fault)
            self._heals.ended(fault, self._now_s(), self._counts.served_by)
            self._record.note(fault, began_s, self._now_s())

    def _reset(self, fault: Fault) -> None:
        self._resets += 1
        self._record.injected["reset"] += 1
        name = None
        if fault.target != "unnamed":
            name = "again" if fault.target == "named_again" else f"weights-{self._resets}"
        changes = name is not None or not self._session.keeps_on_reset
        self._session.load.reset(name, changes_weights=changes)

    def _reopen(self) -> None:
        """End the engine and start it again, in the midst of whatever is wrong just now."""
        self._record.injected["reopen"] += 1
        self._close_session()
        try:
            self._session = self._open()
        except ConfigError as refusal:
            self._record.injected["refused"] += 1
            self._end_due(float("inf"))
            self._see_hung_ones_ended()
            try:
                self._session = self._open()
            except ConfigError as again:
                raise Failure(f"refused: {refusal}; and without faults: {again}") from again
        self._is_open = True

    def _close_session(self) -> None:
        """Close, within its time; memory that a hung tier may still write to is kept."""
        self._note_noticed()
        self._session.load.flush()
        self._is_open = False
        if self._plan.is_gate:
            self._close_patiently()
        elif not self._session.close():
            if not self._layer.hangs_at_close:
                raise Failure("a tier still runs after close")
            self._record.injected["hung at close"] += 1
            self._kept.append(self._session)

    def _close_patiently(self) -> None:
        """Close, as in the gate: what hangs is given up, and then hangs no more.

        An engine that is to start beside it would wait for its limit, which is for a sound
        tier of a busy machine: nothing but the clock would ever end that.
        """
        hanging = [each for each in self._under_way if each[2].kind in HANGS]
        has_ended = self._session.close_patiently(hangs=bool(hanging))
        if not has_ended and not self._layer.hangs_at_close:
            has_ended = self._session.wait_until_ended()  # it was killed, if it had to be
            if not has_ended:
                raise Failure("a tier still runs after close")
        self._end_all(hanging)
        if not has_ended:
            self._record.injected["hung at close"] += 1
            if not self._session.wait_until_ended():
                raise Failure("a tier still runs after close, though nothing hangs")

    def _see_hung_ones_ended(self) -> None:
        """Wait for what hung at close, and hangs no more: it may still hold what is to be used."""
        for session in self._kept:
            if not session.wait_until_ended():
                raise Failure("a tier still runs after close, though nothing hangs")
        self._kept.clear()

    # --- phase two ---

    def phase_two(self) -> None:
        """See that everything comes back, and that nothing is left of the faults."""
        rest = Rest(self._session, self._record, self._sample, self._limits)
        rest.breakers_close()
        sweeping = self._layer.sweeping
        if sweeping is not None:
            rest.restart_twice(sweeping)
        rest.hits_are_back()
        if self._layer.residency is not None:
            rest.fs_has_more()
        rest.nothing_is_held()
        if sweeping is not None:
            rest.leftovers_go(sweeping)
        if self._layer.residency is not None:
            rest.events_fold(self._layer.residency)
        self._kept.clear()  # nothing hangs any more
        rest.resources_are_as(self._before, self._record.kept_bytes())

    def close(self) -> None:
        """End the runtime: nothing hangs any more."""
        self._note_noticed()
        self._is_open = False
        if not self._session.close_patiently(hangs=False) and not self._session.wait_until_ended():
            raise Failure("a tier still runs after close, though nothing hangs")
        self._record.noticed = self._noticed_before
        self._record.seconds = self._now_s()

    def nothing_is_left(self, before: Any) -> None:  # noqa: ANN401
        """See that no thread, process or descriptor of a runtime is left."""
        self._kept.clear()
        del self._session
        left: dict[str, str] = {}
        end_s = time.monotonic() + PATIENCE_S
        kept_bytes, judges_memory = self._record.kept_bytes(), self._limits.judges_memory
        while left := resources_now(kept_bytes).left_since(before, judges_memory=judges_memory):
            if time.monotonic() > end_s:
                raise Failure(f"left after close: {left}")
            time.sleep(LOOK_S)
        self._record.checks["after close"] = "nothing is left"

    def clean_up(self) -> None:
        """End what still runs, after a failure."""
        self._end_due(float("inf"))
        if self._is_open:
            self._is_open = False
            self._session.facade.close()

    # --- what is noted ---

    def _sample(self) -> None:
        if self._now_s() >= self._next_sample_s:
            self._next_sample_s = self._now_s() + SAMPLE_S
            self._record.samples.append(self._session.sample(self._now_s()))

    def _note_noticed(self) -> None:
        """Add what this runtime's tiers have noticed of the faults."""
        for tier in self._session.statistics().tiers:
            counts = self._noticed_before.setdefault(tier.name, dict.fromkeys(NOTICED, 0))
            now = asdict(tier.counts)
            for name in NOTICED:
                counts[name] += now[name]


def _made_patient(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a runtime's settings as in the gate: no tier that is well misses a deadline."""
    tiers = [{**tier, **PATIENT_TIER} for tier in settings["secondary_tiers"]]
    return {**settings, "lease_timeout_s": PATIENCE_S, "secondary_tiers": tiers}
