"""Slots that a peer may still write, though the load that was to fill them has failed.

With vLLM's ``p2p`` tier the peer writes into this engine's memory. A load that the tier gives up,
because it took too long or because the peer no longer answers, says nothing about the peer: one
that was stopped, or cut off, writes when it goes on. Its slots must be nobody else's until then.

What is taken for an end of it:

- the peer itself says that the load has failed;
- nothing listens at the peer's address any more, or another process does: it is gone;
- the peer has answered, without a break, for a minute since: what it had begun has ended.

A peer of which nothing is known keeps them. How many there may be is bounded
(``abandoned_slots_fraction_max``): beyond, the tier gets no more loads. So that this ends without
a request, too, a peer that listens and has no connection is called.

Slot addresses go only to peers that have responded. Until then no load is given to the tier, which
would keep the slots for as long as it hopes for an answer.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.kv_offload.base import ReqContext

from kvtier.plugin_api.threads import DaemonThreads
from kvtier.vllm.request_params import source_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from vllm.v1.kv_offload.tiering.p2p.manager import P2PSecondaryTierManager

LOOK_S: Final = 1.0
"""Between two looks at a peer."""

GONE_S: Final = 2.0
"""After a process has ended: what it had sent is taken in by then."""

ANSWERS_S: Final = 60.0
"""A peer that has answered for so long has sent all that it had begun to send."""

PEERS_LOAD_S: Final = 30.0
"""After this the tier gives a load up by itself, and what it reports is not the peer's word."""

UNANSWERED_S: Final = 40.0
"""After this the tier no longer hopes for an answer to that."""


class Peers:
    """Knows the peers of one ``p2p`` tier. Loop thread only, but ``held``."""

    def __init__(self, tier: P2PSecondaryTierManager, name: str) -> None:
        self.held = 0  #: loads whose slots a peer may still write. Any thread.
        self._tier = tier
        self._threads = DaemonThreads(1, f"kvtier-{name}-peers")

    def peer_of(self, context: ReqContext) -> Peer | None:
        """Return the peer that a request loads from, as it is now; None if it names none."""
        source = source_of(context.kv_transfer_params or {})
        if not source:
            return None
        return Peer(self, str(source.get("remote_host")), source.get("remote_port"))

    def session(self, address: str) -> Any:  # noqa: ANN401 - vLLM's own, told apart by identity
        """Return the tier's session with a peer, if there is one that is alive."""
        session = self._tier._sessions.get(address)  # noqa: SLF001 - no other way to know
        return session if session is not None and session.alive else None

    def agent(self, address: str) -> str | None:
        """Return the name of the peer's process, which no other has; None if it isn't known."""
        names: dict[str, str] = self._tier._data._peer_nixl_names  # noqa: SLF001 - as above
        return names.get(address)

    def call(self, host: str, port: Any) -> None:  # noqa: ANN401 - anybody's
        """Have the tier connect to a peer, as for a request."""
        source = {"kv_request_id": "kvtier-call", "remote_host": host, "remote_port": port}
        context = ReqContext(req_id="kvtier-call", kv_transfer_params={"remote_kv_source": source})
        self._tier.on_new_request(context)
        self._tier.on_request_finished(context)

    async def listens(self, host: str, port: int) -> bool:
        """Tell whether something listens at an address; yes if that is not certain."""
        return await self._threads.run(lambda: _listens(host, port))

    def stop(self) -> None:
        """Let the thread end."""
        self._threads.stop()


class Peer:
    """A peer, and the process that it was when a load began."""

    def __init__(self, peers: Peers, host: str, port: Any) -> None:  # noqa: ANN401 - anybody's
        self._peers = peers
        self._host = host
        self._port = port
        self._address = f"{host}:{port}"
        self._session = peers.session(self._address)
        self._agent = peers.agent(self._address)
        self._began_s = asyncio.get_running_loop().time()

    async def answers(
        self, next_step: Callable[[], Awaitable[object]], is_over: Callable[[], bool]
    ) -> bool:
        """Wait until it has answered; False if there is no way to it, or nobody waits any more.

        ``next_step``: waits for the tier's next step. The tier gives up after half a minute.
        """
        while self._session is not None and not is_over():
            if self._peers.session(self._address) is not self._session:
                return False
            self._agent = self._peers.agent(self._address)
            # vLLM 0.33 may be heard by the peer before it knows the peer's process by name.
            if self._session.ready and self._agent is not None:
                self._began_s = asyncio.get_running_loop().time()
                return True
            await next_step()
        return False

    def has_said_so(self) -> bool:
        """Tell whether a load that has failed did so by the peer's own word."""
        return self._is_connected() and self._took_s() < PEERS_LOAD_S

    def end_if_deaf(self) -> None:
        """End the connection if the peer hasn't even answered that the load was given up.

        vLLM's tier would use it for all later loads.
        """
        if self._is_connected() and self._took_s() >= UNANSWERED_S:
            self._session._conn.mark_dead()  # noqa: SLF001 - no other way to end it

    def _is_connected(self) -> bool:
        return self._session is not None and self._session is self._peers.session(self._address)

    def _took_s(self) -> float:
        return asyncio.get_running_loop().time() - self._began_s

    async def stop_writes(self) -> None:
        """Wait until the peer can write nothing of an older load. It may be for good."""
        self._peers.held += 1
        answering: Any = None
        answers_since = 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            now = asyncio.get_running_loop().time()
            session = self._peers.session(self._address)
            if session is None or session is not answering or not session.ready:
                answering, answers_since = session, now
            if answering is not None and now - answers_since >= ANSWERS_S:
                break
            agent = self._peers.agent(self._address)
            if self._agent is not None and agent not in (None, self._agent):
                break
            if not await self._peers.listens(self._host, int(self._port)):
                await asyncio.sleep(GONE_S)
                break
            if session is None:
                self._peers.call(self._host, self._port)
        self._peers.held -= 1


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=LOOK_S):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:  # nobody answers: it may be cut off, and alive
        return True
