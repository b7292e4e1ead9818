"""The actor that hosts an eviction policy.

Its host is the owner of the blocks: the primary tier in the engine cell, or a
secondary tier in its own. Only ``ChooseVictims`` is answered.

A policy may be third-party code. One that raises, or whose victims are unusable for
the host, is replaced by a fallback, ``lru``: a tier that can't evict any more would store nothing
until its engine ends.
The host is asked for the resident keys. Until it answers, its earlier messages
are ignored, since the answer includes their effect; only requests for
victims are kept.

A policy that raised for lack of memory is not at fault: after a while another of its kind
replaces the fallback, and learns the resident keys in the same way.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, Final

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.core.actor import Actor, Mailbox
from kvtier.errors import InternalError
from kvtier.plugin_api.log import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.core.wire import Message
    from kvtier.plugin_api.eviction_policy import EvictionPolicy

    _Calls = dict[type[Any], Callable[[Any], None]]


POLICY_TIME_S: Final = 1.0
"""Shortest interval between two reports of the time to a policy."""

RUN_KEYS: Final = 64
"""Keys in one run of those that a new policy gets, each run as if of one request."""


TICKS_WITHOUT_MEMORY: Final = 60
"""Number of ``Tick``s after which a policy that lacked memory is tried again: a minute of use."""


def new_policy(tier: str, message: wire.PolicyBroke | wire.PolicyReturned) -> m.Notice:
    """Return the notice about an eviction policy that replaced another."""
    if isinstance(message, wire.PolicyBroke):
        event, detail = "eviction policy broke, lru takes its place", message.error
    else:
        event, detail = "eviction policy is back, which had no memory", ""
    return m.Notice(event=event, tier=tier, detail=detail)


class PolicyActor(Actor):
    """Turns messages into calls on one ``EvictionPolicy``."""

    def __init__(
        self,
        name: str,
        policy: EvictionPolicy,
        fallback: Callable[[int], EvictionPolicy],
        host: Mailbox,
    ) -> None:
        """``fallback`` makes the replacement of a policy that broke, from its capacity.

        ``host``: the owner of the blocks.
        """
        self.policy = policy
        self._fallback = fallback
        self.host = host
        self._kind = type(policy)
        self._ticks_left = 0  # until another of that kind is tried; 0: not planned
        self._waiting: list[m.ChooseVictims] = []  # for Residents
        super().__init__(name, self._guarded(self._calls()))

    def _calls(self) -> _Calls:
        """Return the handler of each message, for the current policy."""
        policy = self.policy
        return {
            m.Admitted: lambda x: policy.admit(x.keys, x.request, held=x.held),
            m.Touched: self._touched,
            m.Held: lambda x: policy.hold(x.keys),
            m.Unheld: lambda x: policy.unhold(x.keys),
            m.Gone: lambda x: policy.forget(x.keys),
            wire.RequestEnded: lambda x: policy.end_request(x.request, x.order),
            m.ChooseVictims: self._choose_victims,
            m.Restored: lambda x: policy.restore(x.keys),
            wire.Tick: self._tick,
            m.Cleared: lambda _: policy.clear(),
            m.ReplacePolicy: lambda x: self._replace(x.error, x),
        }

    def _guarded(self, calls: _Calls) -> _Calls:
        def guard(call: Callable[[Any], None]) -> Callable[[Any], None]:
            def guarded(message: Message) -> None:
                try:
                    call(message)
                except Exception as error:  # noqa: BLE001 - a policy may be anybody's
                    self._ticks_left = TICKS_WITHOUT_MEMORY if _is_lack_of_memory(error) else 0
                    self._replace(f"it raised {type(error).__name__}: {error}", message)

            return guarded

        return {kind: guard(call) for kind, call in calls.items()}

    def _touched(self, message: m.Touched) -> None:
        self.policy.touch(message.keys, message.request)
        if message.held:
            self.policy.hold(message.keys)

    def _choose_victims(self, message: m.ChooseVictims) -> None:
        victims = tuple(self.policy.choose_victims(message.count, message.excluded))
        if any(type(key) is not bytes for key in victims):
            raise InternalError("choose_victims returned something that is not a key")
        self.host.post(m.Victims(keys=victims))

    def _tick(self, message: wire.Tick) -> None:
        self.policy.pass_time(message.now)
        if self._ticks_left:
            self._ticks_left -= 1
            if not self._ticks_left:
                self._return()

    # --- a policy that raised, or can't be used ---

    def _replace(self, error: str, message: Message) -> None:
        """Replace the policy with the fallback; it knows nothing until the host has answered."""
        broken = type(self.policy).__name__
        if isinstance(message, m.ChooseVictims):
            self._waiting.append(message)
        # Not guarded: if the fallback raises, the fault is ours.
        self._restart(self._fallback(self.policy.capacity), guarded=lambda calls: calls)
        self.host.post(wire.PolicyBroke(error=printable(f"{broken}: {error}")))

    def _return(self) -> None:
        """Replace the fallback with a policy of the original kind, or retry later."""
        try:
            policy = self._kind(self.policy.capacity)
        except Exception:  # noqa: BLE001 - a policy may be anybody's
            self._ticks_left = TICKS_WITHOUT_MEMORY
            return
        self._restart(policy, self._guarded)
        self.host.post(wire.PolicyReturned())

    def _restart(self, policy: EvictionPolicy, guarded: Callable[[_Calls], _Calls]) -> None:
        """Install a policy that knows nothing. The host must then be asked for its residents."""
        self.policy = policy
        self._restore_handlers(dict.fromkeys(self._calls(), lambda _: None))
        self.handlers[m.ChooseVictims] = self._waiting.append
        self.handlers.update(guarded({m.Residents: lambda x: self._residents(x, guarded)}))

    def _residents(self, message: m.Residents, guarded: Callable[[_Calls], _Calls]) -> None:
        # Their requests are no longer known. Keys that arrived together are mostly neighbours.
        for start in range(0, len(message.keys), RUN_KEYS):
            self.policy.admit(message.keys[start : start + RUN_KEYS], "", held=False)
            self.policy.end_request("", None)
        self.policy.hold(message.held)
        while self._waiting:
            self._choose_victims(self._waiting[0])
            del self._waiting[0]
        self._restore_handlers(guarded(self._calls()))

    def _restore_handlers(self, calls: _Calls) -> None:
        self.handlers.clear()
        self.handlers.update(calls)


def _is_lack_of_memory(error: Exception) -> bool:
    no_memory = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return no_memory or isinstance(error, MemoryError)
