"""Serves one tier to another program, whose primary tier takes the place of kvtier's own.

The other program (vLLM's tiering) has slots of its own, gives them to a job, and takes them
back when the job has finished. It waits for that without a deadline, and has no quarantine.
So storage never touches its slots: between them and the tier lie kvtier's own staging slots,
and one of kvtier's threads copies::

    load:   tier → staging slot → copy → the program's slot → finished
    store:  the program's slot → copy → staging slot → tier → finished

A copy within memory ends soon, whatever the storage does. So a job can be finished at any moment
when no copy of it runs: its tier may then still read or write staging slots only, which are not
reused until the tier releases them.

- A job has a deadline, counted from its submission. Blocks that have not arrived by then fail.
- A load's bytes are copied once the tier's driver has checked them against their digest.
- The tier writes a store's bytes as they were when copied, whenever it writes them.
- Stores hold no more than a part of the staging slots, so that loads find free ones.

# Invariant: the program's slot of a block is touched by a copy only, and a job with a
#            copy under way is not finished. Checked: _end, allocate,
#            a_slot_of_the_program_is_touched_by_a_copy_of_a_running_job_only.
# Invariant: every job is finished once, at its deadline at the latest but for copies. Checked:
#            end_block, stop_waiting, what_is_late_has_finished_but_for_its_copies.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from kvtier.core import messages as m
from kvtier.core import staging_messages as s
from kvtier.core import wire
from kvtier.core.actor import Actor, Mailbox
from kvtier.core.block_state import BlockState
from kvtier.engine.decide.load_decision import ASKING, NOWHERE
from kvtier.engine.primary.tier_directory import TierDirectory
from kvtier.engine.staged.staging_slots import StagedBlock, StagedTransfer, StagingSlots
from kvtier.plugin_api.backend import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtier.engine.primary.tier_directory import Search
    from kvtier.plugin_api.keys import RequestId
    from kvtier.settings.runtime_config import RuntimeConfig

TIER: Final = 0
"""The number of the one tier."""


class StagedTier(Actor):
    """Carries out jobs between the program's slots and one tier's link."""

    def __init__(
        self,
        config: RuntimeConfig,
        *,
        waiting_stores_max: int,
        link: Mailbox,
        copier: Mailbox,
        reply: Callable[[object], None],
    ) -> None:
        """``config``: of one tier; its slots are the staging slots.

        ``waiting_stores_max``: blocks that may wait for a staging slot, pinned by the program.
        """
        super().__init__(f"staged:{config.tiers[TIER].name}", self._all_handlers())
        self.link = link
        self.copier = copier
        self.reply = reply
        self._tier = config.tiers[TIER]
        self._wait_timeout_s = config.wait_timeout_s
        self._waiting_stores_max = waiting_stores_max
        self._staged_stores_max = config.cascade_slots_max
        self._slots = StagingSlots(config.slot_count)
        self._directory = TierDirectory(1, config.directory_keys_max)
        self._searches: dict[RequestId, Search] = {}
        self._transfers: dict[int, StagedTransfer] = {}
        self._loads: deque[StagedBlock] = deque()  # waiting for a staging slot
        self._stores: deque[StagedBlock] = deque()
        self._copies: dict[int, tuple[int, ...]] = {}  # under way: the staging slots of each
        self._next_copy = 0
        self._finished: list[s.Finished] = []
        self._from_before: set[RequestId] = set()  # requests whose blocks older weights computed
        self._epoch = 0  # when the generation began; each reset with a mark begins one
        self._usable = True
        self._now = 0.0

    def _all_handlers(self) -> dict[type[Any], Callable[[Any], None]]:
        return {
            m.RequestStarted: self._request_started,
            m.RequestFinished: self._request_finished,
            m.Lookup: self._lookup,
            m.Touch: lambda x: self._tell(wire.TouchKeys(x.keys, x.request)),
            m.StepEnd: self._step_end,
            wire.Tick: self._tick,
            m.Reset: self._reset,
            s.SubmitLoad: self._submit_load,
            s.SubmitStore: self._submit_store,
            s.BlocksCopied: self._copied,
            s.GiveUp: lambda _: self._give_up(self._transfers.values()),
            s.DrainFinished: self._drain_finished,
            m.ProbeEnded: self._probe_ended,
            m.PromotionEnded: self._promotion_ended,
            m.PromotionAbandoned: self._promotion_abandoned,
            m.PromotionLate: lambda x: self._slots_released(m.SlotsReleased(x.slots)),
            m.SlotsReleased: self._slots_released,
            m.CascadeEnded: self._cascade_ended,
            m.CascadeDeferred: self._cascade_ended,  # reported to the other program as failed
            m.StoresWanted: lambda _: self._tell(m.StoresOffered(is_all=True, lost=0)),
            m.PresenceLearned: self._presence_learned,
            m.TierUsable: lambda x: self._set_usable(usable=x.usable, answers=x.answers),
            m.LoadCostLearned: lambda _: None,  # the other program decides what to load
            m.TierForgotten: lambda _: self._directory.forget_tier(TIER),
            m.LinkFailed: self._link_failed,
        }

    def free_slots(self) -> int:
        """Return how many staging slots are free: all of them if idle."""
        return self._slots.free_count

    # --- requests and lookups ---

    def _request_started(self, message: m.RequestStarted) -> None:
        self._searches[message.request] = self._directory.start(message.request, 1 << TIER)

    def _request_finished(self, message: m.RequestFinished) -> None:
        if self._searches.pop(message.request, None) is not None:
            self._directory.end(message.request)
        self._from_before.discard(message.request)
        self._tell(wire.RequestEnded(message.request, message.order))

    def _lookup(self, message: m.Lookup) -> None:
        """Reply READY (the tier has it), PROBING or ABSENT."""
        self._from_before.discard(message.request)  # it waits, so it has no block on the GPU
        search = self._searches.get(message.request)
        where = NOWHERE if search is None else self._directory.find(message.key, search)
        if where == NOWHERE:
            self.reply(BlockState.ABSENT)
        else:
            self.reply(BlockState.PROBING if where == ASKING else BlockState.READY)

    def _probe_ended(self, message: m.ProbeEnded) -> None:
        self._directory.answered(TIER, message.keys, message.present)

    def _presence_learned(self, message: m.PresenceLearned) -> None:
        if message.since == self._epoch:
            self._directory.learn(TIER, message.added, message.removed)

    def _tell(self, message: wire.TouchKeys | wire.RequestEnded | m.StoresOffered) -> None:
        self.link.post(message)

    # --- jobs ---

    def _submit_load(self, message: s.SubmitLoad) -> None:
        blocks = self._begin(message, self._now + self._wait_timeout_s)
        if self._usable:
            self._loads.extend(blocks)
            self._go_on()
        else:
            self._fail(blocks)

    def _submit_store(self, message: s.SubmitStore) -> None:
        blocks = self._begin(message, self._now + self._tier.store_timeout_s)
        if self._tier.read_only or message.request in self._from_before:
            self._end_all(blocks)
            return
        held = [block for block in blocks if self._directory.knows(block.key, TIER)]
        self._end_all(held)
        new = [block for block in blocks if block.is_wanted]
        room = self._waiting_stores_max - len(self._stores) if self._usable else 0
        self._stores.extend(new[: max(0, room)])
        self._fail(new[max(0, room) :])
        self._go_on()

    def _begin(self, message: s.SubmitLoad | s.SubmitStore, deadline: float) -> list[StagedBlock]:
        transfer = StagedTransfer(
            message.job,
            message.request,
            message.keys,
            message.slots,
            is_load=isinstance(message, s.SubmitLoad),
            epoch=self._epoch,
            deadline=deadline,
        )
        assert message.job not in self._transfers, "a job has the number of one under way"
        self._transfers[message.job] = transfer
        if not message.keys:
            self._finish(transfer)
        return [StagedBlock(transfer, index) for index in range(len(message.keys))]

    def _go_on(self) -> None:
        """Give staging slots to waiting blocks: loads first."""
        while self._loads and self._slots.free_count:
            blocks = self._pop(self._loads, self._slots.free_count, of_one=True)
            if blocks:
                staging = self._slots.allocate(blocks)
                keys = tuple(block.key for block in blocks)
                self.link.post(m.Promote(keys, staging, blocks[0].transfer.epoch))
        room = min(self._slots.free_count, self._staged_stores_max - self._slots.store_count)
        blocks = self._pop(self._stores, room, of_one=False)
        if blocks:
            self._copy(self._slots.allocate(blocks), to_staging=True)

    def _pop(self, waiting: deque[StagedBlock], room: int, *, of_one: bool) -> list[StagedBlock]:
        """Return the next blocks that are still wanted; ``of_one``: of a single transfer."""
        blocks: list[StagedBlock] = []
        while waiting and len(blocks) < room:
            if waiting[0].is_wanted:
                if of_one and blocks and waiting[0].transfer is not blocks[0].transfer:
                    break
                blocks.append(waiting.popleft())
            else:
                waiting.popleft()
        return blocks

    # --- copies ---

    def _copy(self, staging: tuple[int, ...], *, to_staging: bool) -> None:
        blocks = self._slots.holders(staging)
        for block in blocks:
            block.begin_copy()
        self._next_copy += 1
        self._copies[self._next_copy] = staging
        slots = tuple(block.slot for block in blocks)
        self.copier.post(s.CopyBlocks(self._next_copy, to_staging, slots, staging))

    def _copied(self, message: s.BlocksCopied) -> None:
        staging = self._copies.pop(message.copy)
        blocks = self._slots.holders(staging)
        for block in blocks:
            block.end_copy()
        if not message.success:
            self._slots.free(staging)
            self._fail(blocks)
        elif blocks[0].transfer.is_load:
            self._slots.free(staging)
            self._end_all(blocks, moved=True)
        else:
            self._send_stores(staging, blocks)
        self._go_on()

    def _send_stores(self, staging: Sequence[int], blocks: Sequence[StagedBlock]) -> None:
        """Have the tier store the copied blocks, with one message for each transfer."""
        batches: dict[StagedTransfer, list[tuple[StagedBlock, int]]] = {}
        for slot, block in zip(staging, blocks, strict=True):
            batches.setdefault(block.transfer, []).append((block, slot))
        for transfer, batch in batches.items():
            slots = tuple(slot for _, slot in batch)
            if transfer.is_given_up:
                self._slots.free(slots)
                self._fail(block for block, _ in batch)
                continue
            keys = tuple(block.key for block, _ in batch)
            self.link.post(m.Cascade(transfer.request, keys, slots, transfer.epoch))

    # --- answers of the link ---

    def _promotion_ended(self, message: m.PromotionEnded) -> None:
        blocks = self._slots.holders(message.slots)
        arrived: list[int] = []
        for slot, block, outcome in zip(message.slots, blocks, message.outcomes, strict=True):
            if outcome is Outcome.DONE and block.is_wanted:
                arrived.append(slot)
            else:
                self._slots.free((slot,))
                if outcome is not Outcome.DONE:
                    self._miss(block)
        if arrived:
            self._copy(tuple(arrived), to_staging=False)
        self._go_on()

    def _promotion_abandoned(self, message: m.PromotionAbandoned) -> None:
        # The slots stay held: the tier may still write them.
        for block in self._slots.holders(message.slots):
            self._miss(block)

    def _slots_released(self, message: m.SlotsReleased) -> None:
        self._slots.free(message.slots)
        self._go_on()

    def _cascade_ended(self, message: m.CascadeEnded | m.CascadeDeferred) -> None:
        blocks = self._slots.holders(message.slots)
        self._slots.free(message.slots)
        # Stored blocks were announced just before.
        done = [block for block in blocks if self._directory.knows(block.key, TIER)]
        self._end_all([block for block in done if block.is_wanted], moved=True)
        self._fail(blocks)
        self._go_on()

    def _set_usable(self, *, usable: bool, answers: bool = True) -> None:
        self._usable = usable
        self._directory.set_usable(TIER, usable=usable, answers=answers)
        if not usable:
            waiting = [*self._loads, *self._stores]
            self._loads.clear()
            self._stores.clear()
            self._fail(waiting)

    def _link_failed(self, _message: m.LinkFailed) -> None:
        """End blocks that get no answer. Slots at the tier are lost: it may still touch them."""
        self._set_usable(usable=False)
        self._directory.give_up(TIER)
        self._fail([block for block in self._slots.held() if not block.is_copying])

    # --- time, resets, the end of jobs ---

    def _step_end(self, message: m.StepEnd) -> None:
        self._tick(wire.Tick(message.now))
        for _, name, keys in self._directory.pop_unsent():
            self.link.post(m.ProbeKeys(tuple(keys), asker=name))
        self._directory.end_step()

    def _tick(self, message: wire.Tick) -> None:
        self._now = message.now
        self.link.post(message)
        late = [each for each in self._transfers.values() if self._now >= each.deadline]
        if late:
            self._give_up(late)

    def _reset(self, message: m.Reset) -> None:
        """Begin the generation with the message's mark. All jobs have finished before."""
        if message.mark is None:
            return
        self._epoch += 1
        self._from_before = set(self._searches)
        self._directory.forget_all()
        self._directory.reset()
        self.link.post(wire.GenerationBegan(self._epoch, message.mark))

    def _give_up(self, transfers: Iterable[StagedTransfer]) -> None:
        """End all blocks of these transfers, except those being copied, which end soon."""
        given_up = {transfer for transfer in transfers if not transfer.is_given_up}
        for transfer in given_up:
            transfer.give_up()
        blocks = [*self._loads, *self._stores, *self._slots.held()]
        for block in blocks:
            if block.transfer in given_up and block.is_wanted and not block.is_copying:
                self._miss(block)
        self._loads = deque(block for block in self._loads if block.is_wanted)
        self._stores = deque(block for block in self._stores if block.is_wanted)

    def _miss(self, block: StagedBlock) -> None:
        """End a block that did not arrive: its request does not look for it there again."""
        if block.is_wanted:
            if block.transfer.is_load:
                self._directory.failed(block.key, block.transfer.request, TIER)
            self._end(block, success=False)

    def _fail(self, blocks: Iterable[StagedBlock]) -> None:
        for block in list(blocks):
            self._miss(block)

    def _end_all(self, blocks: Iterable[StagedBlock], *, moved: bool = False) -> None:
        for block in blocks:
            self._end(block, success=True, moved=moved)

    def _end(self, block: StagedBlock, *, success: bool, moved: bool = False) -> None:
        assert not block.is_copying, "a block ends while it is copied"
        block.stop_waiting()
        transfer = block.transfer
        if transfer.end_block(block.key, success=success, moved=moved):
            self._finish(transfer)

    def _finish(self, transfer: StagedTransfer) -> None:
        del self._transfers[transfer.number]
        self._finished.append(
            s.Finished(
                transfer.number,
                transfer.is_load,
                transfer.failed,
                transfer.succeeded,
                transfer.moved,
            )
        )

    def _drain_finished(self, _message: s.DrainFinished) -> None:
        finished, self._finished = self._finished, []
        self.reply(finished)
