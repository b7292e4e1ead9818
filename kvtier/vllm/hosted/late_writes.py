"""Holds slots that a peer may still write after the load that was to fill them has failed.

With vLLM's ``p2p`` tier the peer writes into this engine's memory. If the tier abandons a load
because it took too long or the peer no longer responds, the peer may still write: one that was
stopped, or cut off, writes when it resumes. Its slots must not be reused until then.

The write counts as ended if:

- the peer itself reports that the load has failed;
- nothing listens at the peer's address any more, or another process does: the peer is gone;
- the peer has been responsive, without a break, for a minute since: its writes have ended.

A peer whose state is unknown keeps the slots. Their number is bounded
(``abandoned_slots_fraction_max``): beyond it, the tier gets no more loads. So that this ends even
without a request, the tier connects to a peer that listens and has no connection.

Slot addresses go only to peers that have responded. Until then no load is given to the tier, which
would keep the slots for as long as it waits for a response.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.kv_offload.base import ReqContext

from kvtier.plugin_api.threads import DaemonThreads
from kvtier.vllm.hosted.request_params import source_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.kv_offload.tiering.p2p.manager import P2PSecondaryTierManager

    from kvtier.vllm.hosted.jobs import HostedJobs

LOOK_S: Final = 1.0
"""Interval between two checks of a peer."""

GONE_S: Final = 2.0
"""Wait after a peer's process has ended: data that it had sent has arrived by then."""

ANSWERS_S: Final = 60.0
"""A peer that has been responsive for this long has finished every write that it had begun."""

PEERS_LOAD_S: Final = 30.0
"""After this the tier abandons a load by itself, so its report is not the peer's."""

UNANSWERED_S: Final = 40.0
"""After this the tier no longer waits for the peer's response to the abandonment."""


class Peers:
    """The peers of one ``p2p`` tier. Loop thread only, except ``held``."""

    def __init__(self, tier: P2PSecondaryTierManager, name: str, jobs: HostedJobs) -> None:
        self.held = 0  #: loads whose slots a peer may still write. Any thread.
        self.jobs = jobs
        self._tier = tier
        self._threads = DaemonThreads(1, f"kvtier-{name}-peers")

    def peer_of(self, context: ReqContext) -> Peer | None:
        """Return the peer that a request loads from, in its current state, or None."""
        source = source_of(context.kv_transfer_params or {})
        if not source:
            return None
        return Peer(self, str(source.get("remote_host")), source.get("remote_port"))

    def session(self, address: str) -> Any:  # noqa: ANN401 - vLLM's own, told apart by identity
        """Return the tier's live session with a peer, if there is one."""
        session = self._tier._sessions.get(address)  # noqa: SLF001 - no other way to know
        return session if session is not None and session.alive else None

    def agent(self, address: str) -> str | None:
        """Return the unique name of the peer's process; None if it isn't known."""
        names: dict[str, str] = self._tier._data._peer_nixl_names  # noqa: SLF001 - as above
        return names.get(address)

    def call(self, host: str, port: Any) -> None:  # noqa: ANN401 - a client's
        """Make the tier connect to a peer, as for a request."""
        source = {"kv_request_id": "kvtier-call", "remote_host": host, "remote_port": port}
        context = ReqContext(req_id="kvtier-call", kv_transfer_params={"remote_kv_source": source})
        self._tier.on_new_request(context)
        self._tier.on_request_finished(context)

    async def listens(self, host: str, port: int) -> bool:
        """Return whether something listens at an address; True if that is uncertain."""
        try:
            return await self._threads.run(lambda: _listens(host, port))
        except OSError:  # no thread could be started
            return True

    def stop(self) -> None:
        """Let the thread end."""
        self._threads.stop()


class Peer:
    """A peer, with its process at the time a load began."""

    def __init__(self, peers: Peers, host: str, port: Any) -> None:  # noqa: ANN401 - a client's
        self._peers = peers
        self._host = host
        self._port = port
        self._address = f"{host}:{port}"
        self._session = peers.session(self._address)
        self._agent = peers.agent(self._address)
        self._began_s = asyncio.get_running_loop().time()

    async def answers(self, is_over: Callable[[], bool]) -> bool:
        """Wait until it has responded; False if it is unreachable, or the request is over.

        The tier gives up after half a minute.
        """

        def look() -> bool:
            self._agent = self._peers.agent(self._address)
            return is_over() or not self._is_connected() or self._is_ready()

        await self._peers.jobs.repeat(look)
        self._began_s = asyncio.get_running_loop().time()
        return not is_over() and self._is_connected() and self._is_ready()

    def has_said_so(self) -> bool:
        """Return whether the peer itself reported that a failed load has failed."""
        return self._is_connected() and self._took_s() < PEERS_LOAD_S

    def end_if_deaf(self) -> None:
        """End the connection if the peer hasn't even responded to the load being abandoned.

        vLLM's tier would use it for all later loads.
        """
        if self._is_connected() and self._took_s() >= UNANSWERED_S:
            self._peers.jobs.goes_well(self._session._conn.mark_dead)  # noqa: SLF001 - as above

    def _is_ready(self) -> bool:
        # vLLM may be connected to the peer before it knows the name of its process.
        return self._session.ready and self._agent is not None

    def _is_connected(self) -> bool:
        return self._session is not None and self._session is self._peers.session(self._address)

    def _took_s(self) -> float:
        return asyncio.get_running_loop().time() - self._began_s

    async def stop_writes(self) -> None:
        """Wait until the peer can't write for an older load any more. This may take forever.

        Nothing that the tier raises ends it: the slots would be reused. If it is cancelled, which
        happens when the tier ends, the load stays counted: the memory must stay mapped.
        """
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
                self._peers.jobs.goes_well(lambda: self._peers.call(self._host, self._port))
        self._peers.held -= 1


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=LOOK_S):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:  # no response: it may be cut off, and alive
        return True
