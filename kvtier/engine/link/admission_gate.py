"""The actor that hosts an admission policy, between the primary tier and one tier's link.

A tier without an admission policy has no gate: its link gets all cascades.

# Invariant: each block of each Cascade goes on to the link once, as a Cascade or as
#            refused, whatever the policy does. Checked: _cascade, unpin, _end_one.
"""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, TypeVar

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.core.actor import Actor, Mailbox
from kvtier.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.plugin_api.admission_policy import AdmissionPolicy

T = TypeVar("T")


class AdmissionGate(Actor):
    """Passes on the blocks that the policy of tier number ``tier`` admits."""

    def __init__(
        self,
        tier: int,
        name: str,
        policy: AdmissionPolicy,
        *,
        primary: Mailbox,
        link: Mailbox,
        log: Mailbox,
    ) -> None:
        super().__init__(
            f"gate:{name}",
            {
                m.Cascade: self._cascade,
                wire.RequestEnded: self._request_ended,
                m.Touched: self._touched,
                wire.Tick: self._tick,
            },
        )
        self.primary = primary
        self.link = link
        self.log = log
        self.tier = tier
        self._policy = policy
        self._tier_name = name
        self._broke = False

    def _cascade(self, message: m.Cascade) -> None:
        admitted = [True] if message.is_admitted else self._admit(message)
        if all(admitted):
            self.link.post(message)
            return
        assert len(admitted) == len(message.keys), "a block would be read for ever"
        refused = [not each for each in admitted]
        every, places = message.keys, message.slots
        keys, slots = tuple(compress(every, refused)), tuple(compress(places, refused))
        self.primary.post(m.NotAdmitted(tier=self.tier, keys=keys))
        self.link.post(m.CascadeRefused(keys=keys, slots=slots, epoch=message.epoch))
        if any(admitted):
            keys, slots = tuple(compress(every, admitted)), tuple(compress(places, admitted))
            self.link.post(m.Cascade(message.request, keys, slots, message.epoch))

    def _request_ended(self, message: wire.RequestEnded) -> None:
        ended, order = message.request, message.order
        wanted = self._ask(lambda: tuple(self._policy.end_request(ended, order) or ()))
        if wanted:
            self.primary.post(m.CascadeWanted(tier=self.tier, keys=wanted, request=ended))

    def _touched(self, message: m.Touched) -> None:
        self._ask(lambda: self._policy.touch(message.keys, message.request))

    def _tick(self, message: wire.Tick) -> None:
        self._ask(lambda: self._policy.pass_time(message.now))

    def _admit(self, message: m.Cascade) -> list[bool]:
        """Return one decision for each key, whatever the policy does."""
        keys, request = message.keys, message.request
        admitted = self._ask(lambda: [bool(each) for each in self._policy.admit(keys, request)])
        if admitted is not None and len(admitted) != len(keys):
            wrong = f"{len(admitted)} answers for {len(keys)} keys"
            self._note_broken(InternalError(wrong))
            admitted = None
        return [True] * len(keys) if admitted is None else admitted

    def _ask(self, call: Callable[[], T]) -> T | None:
        """Return the policy's result; None from its first exception on."""
        if not self._broke:
            try:
                return call()
            except Exception as error:  # noqa: BLE001 - a policy may be third-party code
                self._note_broken(error)
        return None

    def _note_broken(self, error: Exception) -> None:
        """Admit everything from now on: losing the policy must not lose blocks."""
        self._broke = True
        self.log.post(m.Notice("admission policy broke", self._tier_name, repr(error)))
