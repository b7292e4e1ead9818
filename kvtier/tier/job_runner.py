"""Cuts a tier's jobs into batches, and passes the batches to its backend's driver.

Loads, stores and probes wait in queues of their own (``kvtier/tier/batching.py``,
``kvtier/tier/probes.py``), with their own limits, so none starves another; as many batches run
at once as the backend has threads, so one big job uses them all.

Requests are blocked on loads but not on stores, and both use the same storage. So while anything is
loaded, few stores run: under continuous loads they continue, that many at a time, in order of
arrival. The tier's actor decides which store may begin, and which blocks are
removed first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.plugin_api.backend import Outcome
from kvtier.tier import driver_messages as d
from kvtier.tier.batching import BatchQueue, BlockBatch
from kvtier.tier.probes import ProbeQueue, ProbeSlice

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

    from kvtier.core.actor import Mailbox
    from kvtier.plugin_api.backend import BackendTraits
    from kvtier.plugin_api.keys import Key
    from kvtier.tier.batching import JobSlice, TierJob
    from kvtier.tier.probes import RunningProbe


STORES_BESIDE_LOADS_FRACTION: Final = 0.25
"""Share of the concurrent stores that may run while something is loaded."""


class JobRunner:
    """The waiting jobs, and the batches that are at the backend, by their numbers."""

    def __init__(self, traits: BackendTraits, driver: Mailbox) -> None:
        self._driver = driver
        apart = traits.request_scoped  # each request has calls of its own
        self._loads = BatchQueue(
            traits.load_batches_max,
            traits.load_batch_blocks_min,
            traits.load_batch_blocks_max,
            apart=apart,
        )
        self._stores = BatchQueue(
            traits.store_batches_max,
            traits.store_batch_blocks_min,
            traits.store_batch_blocks_max,
            apart=apart,
        )
        # One request may load what another stores, and wait for it.
        share = 1.0 if apart else STORES_BESIDE_LOADS_FRACTION
        self._stores_beside_loads = max(1, int(traits.store_batches_max * share))
        self._probes = ProbeQueue(traits, apart=apart)
        self._batches: dict[int, BlockBatch | ProbeSlice] = {}
        self._next_batch = 0

    def is_idle(self) -> bool:
        """Return whether no job waits and no batch is at the backend."""
        return not (self._batches or self._loads or self._stores or self._probes)

    def add(self, job: TierJob) -> None:
        """Queue a job, which must have blocks."""
        (self._loads if job.is_load else self._stores).add(job)

    def start_loads(self) -> None:
        """Send the driver as many loads as may run."""
        while self._loads.next_key is not None:
            batch = self._loads.start_batch()
            number = self._number(batch)
            load = d.LoadBatch(number, batch.keys, batch.slots, batch.request, batch.deadline)
            self._driver.post(load)

    def next_store(self, avoid: AbstractSet[Key] = frozenset()) -> BlockBatch | None:
        """Begin a store, which ``send_store`` sends; None if none may begin, or it is to avoid."""
        key = self._stores.next_key
        if key is None or key in avoid or self._must_wait_for_loads():
            return None
        return self._stores.start_batch(avoid)

    def _must_wait_for_loads(self) -> bool:
        """Return whether stores have used up their share, while something is loaded."""
        return self._stores.running >= self._stores_beside_loads and self._loads.is_busy()

    def send_store(self, batch: BlockBatch) -> None:
        """Send the driver a store, with the keys it is to remove first."""
        number = self._number(batch)
        store = d.StoreBatch(
            number, batch.keys, batch.slots, batch.remove, batch.request, batch.deadline
        )
        self._driver.post(store)

    def probe(self, probe: RunningProbe) -> None:
        """Have the probe's keys looked up in the backend, in turn with other probes."""
        self._probes.add(probe)
        self._start_probes()

    def _start_probes(self) -> None:
        while (batch := self._probes.start_batch()) is not None:
            probe, number = batch.probe, self._number(batch)
            self._driver.post(d.ProbeBatch(number, batch.keys, probe.request, probe.deadline))

    def remove(self, keys: tuple[Key, ...]) -> None:
        """Have the backend remove these, beside any store."""
        batch = BlockBatch(keys)
        self._driver.post(d.RemoveBatch(batch=self._number(batch), keys=keys))

    def end(
        self, message: d.BatchEnded
    ) -> tuple[BlockBatch | ProbeSlice, tuple[Outcome, ...]] | None:
        """Return an ended batch, with one outcome per block; None if it had ended before."""
        batch = self._batches.pop(message.batch, None)
        if batch is None:
            return None
        outcomes = message.outcomes
        if len(outcomes) != len(batch.keys):
            outcomes = (Outcome.FAILED,) * len(batch.keys)
        if isinstance(batch, ProbeSlice):
            batch.probe.end(batch, outcomes)
            self._probes.end_batch(batch)
            self._start_probes()
        elif batch.slices:
            (self._loads if batch.slices[0].job.is_load else self._stores).end_batch()
        return batch, outcomes

    def _number(self, batch: BlockBatch | ProbeSlice) -> int:
        """Return a number for a batch that goes to the driver."""
        self._next_batch += 1
        self._batches[self._next_batch] = batch
        return self._next_batch


def end_slices(
    batch: BlockBatch, outcomes: tuple[Outcome, ...], message: d.BatchEnded
) -> Iterator[tuple[JobSlice, tuple[Outcome, ...]]]:
    """Yield the slices of a batch, each once its job has its outcomes and end time."""
    end = 0
    for job_slice in batch.slices:
        start, end = end, end + job_slice.stop - job_slice.start
        share_s = (end - start) / len(outcomes) * message.seconds
        job_slice.job.end(job_slice, outcomes[start:end], share_s, message.at)
        yield job_slice, outcomes[start:end]
