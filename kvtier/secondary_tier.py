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
from typing import TYPE_CHECKING, Final

from kvtier import messages as m
from kvtier.actor import Actor, Mailbox
from kvtier.backend import Outcome

if TYPE_CHECKING:
    from kvtier.backend import BackendTraits
    from kvtier.messages import Key, RequestId

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
        self.outcomes: list[Outcome | None] = [None] * len(message.keys)
        self.next = 0  # the first block that is in no part yet
        self.unended = len(message.keys)
        self.seconds = 0.0


class _Part:
    """Some blocks of one job, or of one probe, at the backend."""

    __slots__ = ("indices", "job", "probe", "remove", "size")

    def __init__(
        self,
        job: _Job | None,
        indices: list[int],
        *,
        probe: int = 0,
        size: int,
        remove: tuple[Key, ...] = (),
    ) -> None:
        self.job = job
        self.indices = indices
        self.probe = probe
        self.size = size
        self.remove = remove


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
        self._loads: deque[_Job] = deque()
        self._stores: deque[_Job] = deque()
        self._loading_parts = 0
        self._storing_parts = 0
        self._parts: dict[int, _Part] = {}
        self._next_part = 0
        # With a capacity only:
        self._resident: set[Key] = set()
        self._storing: Counter[Key] = Counter()  # in parts that have not ended
        self._removing: set[Key] = set()  # victims that the backend may still have
        self._in_use: Counter[Key] = Counter()  # held at the policy: being loaded, or just stored
        self._making_room: deque[tuple[_Job, list[int], int]] = deque()  # waiting for n victims
        self._victims_asked = 0
        self._batches_found = 0
        self._ended: dict[RequestId, None] = {}  # the last of them, oldest first

    def is_idle(self) -> bool:
        """Tell whether nothing waits and nothing is at the backend."""
        return not (self._parts or self._loads or self._stores or self._making_room)

    # --- what the link asks for ---

    def _probe(self, message: m.Probe) -> None:
        if self._traits.capacity_blocks is not None:
            present = tuple(key in self._resident for key in message.keys)
            self.link.post(m.ProbeAnswer(probe=message.probe, present=present))
            return
        part = self._new_part(_Part(None, [], probe=message.probe, size=len(message.keys)))
        self.driver.post(m.ProbePart(part=part, keys=message.keys))

    def _load_job(self, message: m.LoadJob) -> None:
        job = _Job(message)
        self._hold(job.keys)
        self._loads.append(job)
        self._start_parts()

    def _store_job(self, message: m.StoreJob) -> None:
        self._stores.append(_Job(message))
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
        while self._loads and self._loading_parts < self._traits.load_parts_max:
            free_parts = self._traits.load_parts_max - self._loading_parts
            job, indices = self._next_blocks(self._loads, free_parts)
            self._loading_parts += 1
            part = self._new_part(_Part(job, indices, size=len(indices)))
            self.driver.post(
                m.LoadPart(
                    part=part,
                    keys=tuple(job.keys[i] for i in indices),
                    slots=tuple(job.slots[i] for i in indices),
                )
            )
        while self._stores and self._storing_parts < self._traits.store_parts_max:
            if self._next_key_is_being_removed():
                break
            free_parts = self._traits.store_parts_max - self._storing_parts
            job, indices = self._next_blocks(self._stores, free_parts)
            self._storing_parts += 1
            if self._traits.capacity_blocks is None:
                self._send_store(job, indices, ())
            else:
                self._make_room(job, indices)

    def _next_blocks(self, queue: deque[_Job], free_parts: int) -> tuple[_Job, list[int]]:
        """Take the next part's blocks from the queue's first job.

        What waits is shared out among the parts that may begin now, as evenly as can be.
        """
        waiting = sum(len(job.keys) - job.next for job in queue)
        size = max(1, min(self._traits.part_blocks_max, -(-waiting // free_parts)))
        job = queue[0]
        indices = list(range(job.next, min(job.next + size, len(job.keys))))
        if self._removing and not job.is_load:
            stop = next((i for i in indices if job.keys[i] in self._removing), len(job.keys))
            indices = [i for i in indices if i < stop]
        job.next += len(indices)
        if job.next >= len(job.keys):
            queue.popleft()
        return job, indices

    def _next_key_is_being_removed(self) -> bool:
        """Tell whether a store must wait, lest the removal of an older copy takes its own."""
        job = self._stores[0]
        return job.keys[job.next] in self._removing

    def _send_store(self, job: _Job, indices: list[int], remove: tuple[Key, ...]) -> None:
        self._removing.update(remove)
        part = self._new_part(_Part(job, indices, size=len(indices), remove=remove))
        self.driver.post(
            m.StorePart(
                part=part,
                keys=tuple(job.keys[i] for i in indices),
                slots=tuple(job.slots[i] for i in indices),
                remove=remove,
            )
        )

    def _part_ended(self, message: m.PartEnded) -> None:
        part = self._parts.pop(message.part, None)
        if part is None:
            return
        outcomes = message.outcomes
        if len(outcomes) != part.size:
            outcomes = (Outcome.FAILED,) * part.size
        if part.job is None:
            present = tuple(outcome is Outcome.DONE for outcome in outcomes)
            self.link.post(m.ProbeAnswer(probe=part.probe, present=present))
            return
        if part.job.is_load:
            self._loading_parts -= 1
        else:
            self._storing_parts -= 1
        self._removing.difference_update(part.remove)
        part.job.seconds += message.seconds
        self._settle(part.job, part.indices, outcomes)
        self._start_parts()

    def _settle(self, job: _Job, indices: list[int], outcomes: tuple[Outcome, ...]) -> None:
        """Note outcomes of some of a job's blocks, and answer the job once all have one."""
        for index, outcome in zip(indices, outcomes, strict=True):
            job.outcomes[index] = outcome
        job.unended -= len(indices)
        if self._traits.capacity_blocks is not None:
            self._note_contents(job, indices, outcomes)
        if job.unended:
            return
        final = tuple(Outcome.FAILED if each is None else each for each in job.outcomes)
        self.link.post(m.JobEnded(job=job.id, outcomes=final, seconds=job.seconds))
        if self._traits.capacity_blocks is not None:
            done = [k for k, o in zip(job.keys, final, strict=True) if o is Outcome.DONE]
            self._let_go(job.keys if job.is_load else done)
            if not job.is_load:
                # What a load found damaged meanwhile was lost before it was announced.
                lost = tuple(key for key in done if key not in self._resident)
                if lost:
                    self.link.post(m.PresenceChanged(added=(), removed=lost))
                if job.request in self._ended:
                    # The policy was told before that the request is over, and so once more.
                    self.policy.post(m.RequestEnded(request=job.request, order=None))

    def _new_part(self, part: _Part) -> int:
        self._next_part += 1
        self._parts[self._next_part] = part
        return self._next_part

    # --- contents, where there is a capacity ---

    def _make_room(self, job: _Job, indices: list[int]) -> None:
        """Have victims chosen for what doesn't fit; the part goes on in ``_victims``."""
        capacity = self._traits.capacity_blocks
        assert capacity is not None
        keys = [job.keys[i] for i in indices]
        self._storing.update(keys)
        self._hold(keys)
        fresh = len(self._storing) - sum(map(self._resident.__contains__, self._storing))
        used = len(self._resident) + fresh - self._victims_asked
        missing = max(0, used - capacity)
        self._making_room.append((job, indices, missing))
        self._victims_asked += missing
        # Asked even for none: a part must not overtake one that waits for its victims.
        self.policy.post(m.ChooseVictims(count=missing, spare=frozenset()))

    def _victims(self, message: m.Victims) -> None:
        # Answers come in the order of the questions: both mailboxes are queues.
        job, indices, asked = self._making_room.popleft()
        self._victims_asked -= asked
        # The policy may have chosen before it knew what is in use now.
        spared = tuple(key for key in message.keys if key in self._in_use and key in self._resident)
        if spared:
            self.policy.post(m.Spared(keys=spared))
        victims = tuple(key for key in message.keys if key not in self._in_use)
        self._resident.difference_update(victims)
        if victims:
            self.link.post(m.PresenceChanged(added=(), removed=victims))
        self._send_store(job, indices, victims)

    def _note_contents(self, job: _Job, indices: list[int], outcomes: tuple[Outcome, ...]) -> None:
        done: list[Key] = []
        not_done: list[Key] = []
        for index, outcome in zip(indices, outcomes, strict=True):
            (done if outcome is Outcome.DONE else not_done).append(job.keys[index])
        if not job.is_load:
            for index in indices:
                _count_down(self._storing, job.keys[index])
            fresh = tuple(key for key in dict.fromkeys(done) if key not in self._resident)
            if fresh:
                self._resident.update(fresh)
                self.policy.post(m.Admitted(keys=fresh, request=job.request, held=True))
            self._let_go(not_done)
            return
        lost = tuple(
            key
            for index, key in ((i, job.keys[i]) for i in indices)
            if job.outcomes[index] in (Outcome.ABSENT, Outcome.DAMAGED) and key in self._resident
        )
        self._lose(lost)

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
        self._resident.update(fresh)
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
            self._resident.difference_update(keys)
            self.policy.post(m.Gone(keys=keys))
            self.link.post(m.PresenceChanged(added=(), removed=keys))

    def _hold(self, keys: tuple[Key, ...] | list[Key]) -> None:
        """Keep keys from being chosen while they are loaded, stored, or not yet reported."""
        if self._traits.capacity_blocks is None or not keys:
            return
        self._in_use.update(keys)
        self.policy.post(m.Held(keys=tuple(keys)))

    def _let_go(self, keys: tuple[Key, ...] | list[Key]) -> None:
        loose = [key for key in keys if _count_down(self._in_use, key)]
        if loose:
            self.policy.post(m.Unheld(keys=tuple(loose)))


def _count_down(counter: Counter[Key], key: Key) -> bool:
    """Count one less of ``key``. True: that was the last one."""
    left = counter[key] - 1
    if left > 0:
        counter[key] = left
        return False
    del counter[key]
    return True
