"""A secondary tier's own actor: splits jobs into parts, and feeds the backend.

It runs in the tier cell, next to the driver of its backend. Jobs wait in two
queues. A part is what one call of the backend handles; as many parts run at
once as the backend has threads, so one big job uses them all. Loads and
stores have their own limits, so neither starves the other.

Where the backend has a capacity, the tier belongs to this engine alone: then
this actor knows what is stored, answers probes itself, and makes room by
asking its eviction policy.

# Invariant: every job that came in is answered once, whatever the backend does,
#            unless the backend never returns.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import compress, takewhile
from operator import not_
from typing import TYPE_CHECKING, Final

from kvtier import messages as m
from kvtier.actor import Actor, Mailbox
from kvtier.backend import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.backend import BackendTraits
    from kvtier.messages import Key, RequestId

CRUMB_BLOCKS: Final = 8
"""A smaller part costs more than what it could save by running beside others."""

ENDED_REQUESTS_MAX: Final = 1024
"""So many requests that are over are remembered: their last blocks may be stored afterwards."""


class _Job:
    """One job; parts of it may wait, run or have ended."""

    __slots__ = (
        "id",
        "is_load",
        "keys",
        "next",
        "outcomes",
        "request",
        "seconds",
        "slots",
        "unended",
    )

    def __init__(self, message: m.LoadJob | m.StoreJob) -> None:
        self.id = message.job
        self.is_load = isinstance(message, m.LoadJob)
        self.keys = message.keys
        self.slots = message.slots
        self.request = "" if isinstance(message, m.LoadJob) else message.request
        self.outcomes = [Outcome.FAILED] * len(message.keys)
        self.next = 0  # the first block that is in no part yet
        self.unended = len(message.keys)
        self.seconds = 0.0


class _Queue:
    """Jobs with blocks that are in no part yet."""

    __slots__ = ("blocks", "jobs")

    def __init__(self) -> None:
        self.jobs: deque[_Job] = deque()
        self.blocks = 0  # of all these jobs

    def add(self, job: _Job) -> None:
        self.jobs.append(job)
        self.blocks += len(job.keys)

    def take(self, blocks: int) -> None:
        """Note that the next blocks of the first job are in a part."""
        job = self.jobs[0]
        job.next += blocks
        self.blocks -= blocks
        if job.next >= len(job.keys):
            self.jobs.popleft()


class _Part:
    """Some blocks of one job, or of one probe, at the backend."""

    __slots__ = ("job", "keys", "probe", "remove", "start", "stop")

    def __init__(self, job: _Job | None, keys: tuple[Key, ...], start: int = 0) -> None:
        self.job = job
        self.keys = keys
        self.start = start  # these are the job's blocks from here
        self.stop = start + len(keys)
        self.probe = 0
        self.remove: tuple[Key, ...] = ()


class SecondaryTier(Actor):
    """The tier-cell end of one tier. ``policy`` is used only where there is a capacity."""

    def __init__(self, name: str, traits: BackendTraits) -> None:
        super().__init__(
            f"tier:{name}",
            {
                m.Probe: self._probe,
                m.LoadJob: self._load_job,
                m.StoreJob: self._store_job,
                m.TouchKeys: self._touch_keys,
                m.RequestEnded: self._request_ended,
                m.Tick: self._tick,
                m.PartEnded: self._part_ended,
                m.Victims: self._victims,
                m.ContentsFound: self._contents_found,
                m.ContentsLost: self._contents_lost,
            },
        )
        self.link: Mailbox
        self.driver: Mailbox
        self.policy: Mailbox
        self._traits = traits
        self._loads = _Queue()
        self._stores = _Queue()
        self._loading_parts = 0
        self._storing_parts = 0
        self._parts: dict[int, _Part] = {}
        self._next_part = 0
        # With a capacity only:
        self._resident: set[Key] = set()
        self._storing: Counter[Key] = Counter()  # in parts that have not ended
        # Invariant: _coming is what is in _storing and not in _resident.
        self._coming: set[Key] = set()
        self._removing: set[Key] = set()  # victims that the backend may still have
        self._in_use: Counter[Key] = Counter()  # held at the policy: being loaded, or just stored
        self._making_room: deque[tuple[_Part, int]] = deque()  # waiting for n victims
        self._victims_asked = 0
        self._batches_found = 0
        self._ended: dict[RequestId, None] = {}  # the last of them, oldest first

    def is_idle(self) -> bool:
        """Tell whether nothing waits and nothing is at the backend."""
        waiting = self._loads.jobs or self._stores.jobs
        return not (self._parts or waiting or self._making_room)

    # --- what the link asks for ---

    def _probe(self, message: m.Probe) -> None:
        if self._traits.capacity_blocks is not None:
            present = tuple(key in self._resident for key in message.keys)
            self.link.post(m.ProbeAnswer(probe=message.probe, present=present))
            return
        part = _Part(None, message.keys)
        part.probe = message.probe
        self.driver.post(m.ProbePart(part=self._number(part), keys=message.keys))

    def _load_job(self, message: m.LoadJob) -> None:
        job = _Job(message)
        self._hold(job.keys)
        self._loads.add(job)
        self._start_parts()

    def _store_job(self, message: m.StoreJob) -> None:
        self._stores.add(_Job(message))
        self._start_parts()

    def _touch_keys(self, message: m.TouchKeys) -> None:
        if self._traits.capacity_blocks is not None:
            self.policy.post(m.Touched(keys=message.keys, request=message.request))

    def _request_ended(self, message: m.RequestEnded) -> None:
        if self._traits.capacity_blocks is not None:
            self._ended[message.request] = None
            if len(self._ended) > ENDED_REQUESTS_MAX:
                del self._ended[next(iter(self._ended))]
            self.policy.post(message)

    def _tick(self, message: m.Tick) -> None:
        if self._traits.capacity_blocks is not None:
            self.policy.post(message)

    # --- parts ---

    def _start_parts(self) -> None:
        while self._loads.jobs and self._loading_parts < self._traits.load_parts_max:
            part = self._next_part_of(self._loads, self._loading_parts, self._traits.load_parts_max)
            self._loading_parts += 1
            assert part.job is not None
            slots = part.job.slots[part.start : part.stop]
            self.driver.post(m.LoadPart(part=self._number(part), keys=part.keys, slots=slots))
        while self._stores.jobs and self._storing_parts < self._traits.store_parts_max:
            if self._next_key_is_being_removed():
                break
            part = self._next_part_of(
                self._stores, self._storing_parts, self._traits.store_parts_max
            )
            self._storing_parts += 1
            if self._traits.capacity_blocks is None:
                self._send_store(part)
            else:
                self._make_room(part)

    def _next_part_of(self, queue: _Queue, parts: int, parts_max: int) -> _Part:
        """Take the next part from the queue's first job, while ``parts`` are under way.

        What waits is shared out among all parts that there may be, as evenly as can be. Towards
        the end, where that would be crumbs, it is among those that may begin now.
        """
        share = -(-queue.blocks // parts_max)
        if share < CRUMB_BLOCKS:
            share = min(CRUMB_BLOCKS, -(-queue.blocks // (parts_max - parts)))
        share = max(share, self._traits.part_blocks_min)
        job = queue.jobs[0]
        start = job.next
        left = len(job.keys) - start
        # In equal parts, none of them smaller than its share: the last one would be a crumb.
        size = -(-left // max(left // share, -(-left // self._traits.part_blocks_max)))
        keys = job.keys[start : start + size]
        if not job.is_load and not self._removing.isdisjoint(keys):
            keys = tuple(takewhile(lambda key: key not in self._removing, keys))
        queue.take(len(keys))
        return _Part(job, keys, start)

    def _next_key_is_being_removed(self) -> bool:
        """Tell whether a store must wait, lest the removal of an older copy takes its own."""
        job = self._stores.jobs[0]
        return job.keys[job.next] in self._removing

    def _send_store(self, part: _Part) -> None:
        assert part.job is not None
        self._removing.update(part.remove)
        self.driver.post(
            m.StorePart(
                part=self._number(part),
                keys=part.keys,
                slots=part.job.slots[part.start : part.stop],
                remove=part.remove,
            )
        )

    def _part_ended(self, message: m.PartEnded) -> None:
        part = self._parts.pop(message.part, None)
        if part is None:
            return
        outcomes = message.outcomes
        if len(outcomes) != len(part.keys):
            outcomes = (Outcome.FAILED,) * len(part.keys)
        job = part.job
        if job is None:
            present = tuple(outcome is Outcome.DONE for outcome in outcomes)
            self.link.post(m.ProbeAnswer(probe=part.probe, present=present))
            return
        if job.is_load:
            self._loading_parts -= 1
        else:
            self._storing_parts -= 1
        self._removing.difference_update(part.remove)
        job.seconds += message.seconds
        job.outcomes[part.start : part.stop] = outcomes
        job.unended -= len(outcomes)
        if self._traits.capacity_blocks is not None:
            if job.is_load:
                self._note_loaded(part.keys, outcomes)
            else:
                self._note_stored(job, part.keys, outcomes)
        if not job.unended:
            self._answer(job)
        self._start_parts()

    def _answer(self, job: _Job) -> None:
        """Answer a job, now that each of its blocks has an outcome."""
        self.link.post(m.JobEnded(job=job.id, outcomes=tuple(job.outcomes), seconds=job.seconds))
        if self._traits.capacity_blocks is None:
            return
        if job.is_load:
            self._let_go(job.keys)
            return
        done, _ = _split(job.keys, job.outcomes)
        self._let_go(done)
        if not self._resident.issuperset(done):
            # What a load found damaged meanwhile was lost before it was announced.
            lost = tuple(key for key in done if key not in self._resident)
            self.link.post(m.PresenceChanged(added=(), removed=lost))
        if job.request in self._ended:
            # The policy was told before that the request is over, and so once more.
            self.policy.post(m.RequestEnded(request=job.request, order=None))

    def _number(self, part: _Part) -> int:
        """Return a number for a part that goes to the driver."""
        self._next_part += 1
        self._parts[self._next_part] = part
        return self._next_part

    # --- contents, where there is a capacity ---

    def _make_room(self, part: _Part) -> None:
        """Have victims chosen for what doesn't fit; the part goes on in ``_victims``."""
        capacity = self._traits.capacity_blocks
        assert capacity is not None
        self._storing.update(part.keys)
        self._coming.update(set(part.keys) - self._resident)
        self._hold(part.keys)
        used = len(self._resident) + len(self._coming) - self._victims_asked
        missing = max(0, used - capacity)
        self._making_room.append((part, missing))
        self._victims_asked += missing
        # Asked even for none: a part must not overtake one that waits for its victims.
        self.policy.post(m.ChooseVictims(count=missing, spare=frozenset()))

    def _victims(self, message: m.Victims) -> None:
        # Answers come in the order of the questions: both mailboxes are queues.
        part, asked = self._making_room.popleft()
        self._victims_asked -= asked
        victims = message.keys
        if not self._in_use.keys().isdisjoint(victims):
            # The policy may have chosen before it knew what is in use now.
            in_use = [key for key in victims if key in self._in_use]
            spared = tuple(key for key in in_use if key in self._resident)
            if spared:
                self.policy.post(m.Spared(keys=spared))
            victims = tuple(key for key in victims if key not in self._in_use)
        if victims:
            self._forget(victims)
            self.link.post(m.PresenceChanged(added=(), removed=victims))
        part.remove = victims
        self._send_store(part)

    def _note_stored(self, job: _Job, keys: tuple[Key, ...], outcomes: tuple[Outcome, ...]) -> None:
        done, not_done = _split(keys, outcomes)
        self._coming.difference_update(_count_down(self._storing, keys))
        fresh = tuple(dict.fromkeys(done))
        if not self._resident.isdisjoint(fresh):
            fresh = tuple(key for key in fresh if key not in self._resident)
        if fresh:
            self._add(fresh)
            self.policy.post(m.Admitted(keys=fresh, request=job.request, held=True))
        self._let_go(not_done)

    def _note_loaded(self, keys: tuple[Key, ...], outcomes: tuple[Outcome, ...]) -> None:
        if outcomes.count(Outcome.DONE) == len(outcomes):
            return
        gone = (Outcome.ABSENT, Outcome.DAMAGED)
        self._lose(
            tuple(
                key
                for key, outcome in zip(keys, outcomes, strict=True)
                if outcome in gone and key in self._resident
            )
        )

    def _contents_found(self, message: m.ContentsFound) -> None:
        """Take up blocks from before. Nobody knows whose they were: each batch is a run."""
        capacity = self._traits.capacity_blocks
        assert capacity is not None
        room = capacity - len(self._resident) - len(self._storing) + self._victims_asked
        fresh = tuple(key for key in message.keys if key not in self._resident)[: max(0, room)]
        if not fresh:
            return
        self._batches_found += 1
        request = f"found {self._batches_found}"
        self._add(fresh)
        self.policy.post(m.Admitted(keys=fresh, request=request, held=False))
        held = tuple(key for key in fresh if key in self._in_use)
        if held:
            self.policy.post(m.Held(keys=held))
        self.policy.post(m.RequestEnded(request=request, order=None))
        self.link.post(m.PresenceChanged(added=fresh, removed=()))

    def _contents_lost(self, message: m.ContentsLost) -> None:
        self._lose(tuple(key for key in message.keys if key in self._resident))

    def _lose(self, keys: tuple[Key, ...]) -> None:
        if keys:
            self._forget(keys)
            self.policy.post(m.Gone(keys=keys))
            self.link.post(m.PresenceChanged(added=(), removed=keys))

    def _add(self, keys: tuple[Key, ...]) -> None:
        self._resident.update(keys)
        self._coming.difference_update(keys)

    def _forget(self, keys: tuple[Key, ...]) -> None:
        self._resident.difference_update(keys)
        if not self._storing.keys().isdisjoint(keys):
            self._coming.update(key for key in keys if key in self._storing)

    def _hold(self, keys: tuple[Key, ...]) -> None:
        """Keep keys from being chosen while they are loaded, stored, or not yet reported."""
        if self._traits.capacity_blocks is None or not keys:
            return
        self._in_use.update(keys)
        self.policy.post(m.Held(keys=keys))

    def _let_go(self, keys: tuple[Key, ...]) -> None:
        loose = _count_down(self._in_use, keys)
        if loose:
            self.policy.post(m.Unheld(keys=tuple(loose)))


def _split(
    keys: tuple[Key, ...], outcomes: Sequence[Outcome]
) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
    """Return the keys that are DONE, and the others."""
    if outcomes.count(Outcome.DONE) == len(keys):
        return keys, ()
    done = [outcome is Outcome.DONE for outcome in outcomes]
    return tuple(compress(keys, done)), tuple(compress(keys, map(not_, done)))


def _count_down(counter: Counter[Key], keys: tuple[Key, ...]) -> list[Key]:
    """Count one less of each key. Returns those for which that was the last one."""
    ended = []
    for key in keys:
        left = counter[key] - 1
        if left > 0:
            counter[key] = left
        else:
            counter.pop(key, None)  # in half the time of ``del``, which Counter has its own of
            ended.append(key)
    return ended
