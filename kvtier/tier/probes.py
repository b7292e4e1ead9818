"""Cuts a tier's probes into batches, one for each call of the backend.

Storage may take half a millisecond to look up one key, and a probe may have thousands. So a
probe is spread over as many calls as may run at once, and probes take turns, one batch each
(round-robin): a short one behind a long one waits for one batch of it, not for all of it.

# Invariant: a probe is answered once, when each of its keys has been looked up. Checked: end,
#            answer, p8_late_doubled_and_unknown_completions_are_counted_and_otherwise_ignored.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.core import wire
from kvtier.core.generations import marked
from kvtier.plugin_api.backend import Outcome

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from kvtier.plugin_api.backend import BackendTraits
    from kvtier.plugin_api.keys import Key

_UNLIMITED: Final = sys.maxsize


class RunningProbe:
    """One probe; keys of it may be waiting, in a lookup or looked up."""

    __slots__ = ("begun", "deadline", "found", "id", "keys", "request", "unended")

    def __init__(self, message: wire.Probe) -> None:
        self.id = message.probe
        self.keys = marked(message.keys, message.mark)  #: the backend's form of them
        self.request = message.request
        self.deadline = message.deadline
        self.begun = 0  #: number of its first keys that are in a batch
        self.found = [False] * len(message.keys)
        self.unended = len(message.keys)

    def end(self, batch: ProbeSlice, outcomes: tuple[Outcome, ...]) -> None:
        """Note the result of one of its batches."""
        assert batch.probe is self, "a batch of another probe"
        stop = batch.start + len(outcomes)
        self.found[batch.start : stop] = [outcome is Outcome.DONE for outcome in outcomes]
        self.unended -= len(outcomes)
        assert self.unended >= 0, "a key of a probe was looked up twice"

    def claimed(self) -> tuple[Key, ...]:
        """Return the keys that it may report present: those looked up in the backend."""
        return self.keys[: self.begun]

    def answer(self, gone: AbstractSet[Key] = frozenset()) -> wire.ProbeAnswer:
        """Return the answer, once each key was looked up; ``gone`` keys count as absent."""
        assert not self.unended, "a probe is answered before each of its keys was looked up"
        both = zip(self.keys, self.found, strict=True)
        return wire.ProbeAnswer(self.id, tuple(found and key not in gone for key, found in both))


class ProbeSlice(NamedTuple):
    """Neighbouring keys of one probe: a batch, for one call."""

    probe: RunningProbe
    start: int
    keys: tuple[Key, ...]


class ProbeQueue:
    """The probes with keys that are in no batch yet, in round-robin order."""

    def __init__(self, traits: BackendTraits, *, apart: bool = False) -> None:
        """``apart``: the backend is asked for a whole probe at once, whatever else runs."""
        self._running = 0  # batches in flight
        self._asked = 0  # keys in them
        if apart:
            self._batches_max = self._blocks_min = self._blocks_max = _UNLIMITED
        else:
            self._batches_max = traits.probe_batches_max or traits.load_batches_max
            self._blocks_min = max(1, traits.probe_batch_blocks_min)
            self._blocks_max = max(1, traits.probe_batch_blocks_max)
        self._probes: deque[RunningProbe] = deque()
        self._waiting = 0  # keys

    def __bool__(self) -> bool:
        """Return whether any key waits."""
        return bool(self._probes)

    def add(self, probe: RunningProbe) -> None:
        """Queue the probe's keys. It must have some: no batch can be made of none."""
        assert probe.keys, "a probe of no keys"
        self._probes.append(probe)
        self._waiting += len(probe.keys)

    def start_batch(self) -> ProbeSlice | None:
        """Cut off the next batch, which is then in flight; None if none may begin."""
        if not self._probes or self._running >= self._batches_max:
            return None
        probe = self._probes.popleft()
        start = probe.begun
        probe.begun += self._size_of_batch(len(probe.keys) - start)
        batch = ProbeSlice(probe, start, probe.keys[start : probe.begun])
        self._waiting -= len(batch.keys)
        self._asked += len(batch.keys)
        if probe.begun < len(probe.keys):
            self._probes.append(probe)
        self._running += 1
        return batch

    def end_batch(self, batch: ProbeSlice) -> None:
        """Note that this batch is no longer in flight."""
        assert self._running > 0, "a batch of a probe ended that had not begun"
        self._running -= 1
        self._asked -= len(batch.keys)

    def _size_of_batch(self, left: int) -> int:
        """Return how many of a probe's remaining keys one call looks up."""
        # Keys in flight count as well: calls that begin one after the other get equal shares.
        share = max(1, -(-(self._waiting + self._asked) // self._batches_max))
        # In equal batches; one more of them would be too small, one fewer too large.
        batches = min(-(-left // share), left // self._blocks_min)
        return -(-left // max(batches, -(-left // self._blocks_max)))
