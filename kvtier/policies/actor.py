"""The actor that hosts an eviction policy.

Its host is whoever owns the blocks: the primary tier in the engine cell, or a
secondary tier in its own. Only ``ChooseVictims`` is answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier import messages as m
from kvtier.actor import Actor, Mailbox

if TYPE_CHECKING:
    from kvtier.policies.base import EvictionPolicy


POLICY_TIME_S: Final = 1.0
"""How often a policy is told the time, at most."""


class PolicyActor(Actor):
    """Turns messages into calls on one ``EvictionPolicy``."""

    def __init__(self, name: str, policy: EvictionPolicy) -> None:
        super().__init__(
            name,
            {
                m.Admitted: lambda x: policy.admit(x.keys, x.request, held=x.held),
                m.Touched: self._touched,
                m.Held: lambda x: policy.hold(x.keys),
                m.Unheld: lambda x: policy.unhold(x.keys),
                m.Gone: lambda x: policy.forget(x.keys),
                m.RequestEnded: lambda x: policy.end_request(x.request, x.order),
                m.ChooseVictims: self._choose_victims,
                m.Spared: lambda x: policy.take_back(x.keys),
                m.Tick: lambda x: policy.pass_time(x.now),
                m.Cleared: lambda _: policy.clear(),
            },
        )
        self.policy = policy
        self.host: Mailbox

    def _touched(self, message: m.Touched) -> None:
        self.policy.touch(message.keys, message.request)
        if message.held:
            self.policy.hold(message.keys)

    def _choose_victims(self, message: m.ChooseVictims) -> None:
        victims = self.policy.choose_victims(message.count, message.spare)
        self.host.post(m.Victims(keys=tuple(victims)))
