"""vLLM's ``p2p`` tier in two managers: blocks cross by NIXL, from one's memory to the other's."""

from __future__ import annotations

import itertools
import socket
import threading
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any

import pytest
from vllm.distributed import nixl_utils
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.p2p.data.nixl import NixlTransport
from vllm.v1.kv_offload.tiering.p2p.session import client
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.errors import ConfigError
from kvtier.vllm.hosted import late_writes
from kvtier.vllm.hosted.backend import HostedBackend
from kvtier.vllm.hosted.request_params import peer_of
from tests.support.patience import PATIENCE_S, pause, until
from tests.support.server_program import free_port
from tests.vllm.support.nixl import let_nixl_rest
from tests.vllm.test_hosted_request_scoped import complete, write
from tests.vllm.test_hosted_tiers import BLOCK, SLOTS, Engine, block_of, engine, key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.v1.kv_offload.base import ReqContext

HOST = "127.0.0.1"
HIT = LookupResult.HIT
GIVEN_UP_S = 0.2
"""vLLM's tier waits at its end for messages to a peer that is gone, and for what nobody fetches."""


@pytest.fixture(autouse=True)
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without telemetry NIXL 1.5 raises whenever vLLM asks which transfers have ended."""
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "y")
    let_nixl_rest()


class Peer(Engine):
    """An engine with a ``p2p`` tier."""

    def __init__(self, played: Any, port: int) -> None:
        super().__init__(played)
        self.port = port

    @property
    def backend(self) -> HostedBackend:
        """What hosts the tier, on its thread."""
        (host,) = self.manager.facade._tiers
        assert isinstance(host._backend, HostedBackend)
        return host._backend

    def as_prefiller(self, name: str) -> dict[str, Any]:
        """Return what llm-d's router tells a decode engine of this one."""
        return {"remote_prefiller": self._source(name)}

    def as_source(self, name: str) -> dict[str, Any]:
        """Return what a request has that may be served from this engine's memory."""
        return {"remote_kv_source": self._source(name)}

    def _source(self, name: str) -> dict[str, Any]:
        return {"kv_request_id": name, "remote_host": HOST, "remote_port": self.port}

    def check(self, numbers: list[int]) -> None:
        """Compare the blocks in memory with what was written."""
        slot_of = self.manager.facade._primary.slot_of
        for number in numbers:
            slot = slot_of(key_of(number))
            assert slot is not None
            assert bytes(self.manager._memory.view(slot)) == block_of(number)

    def resident(self) -> set[int]:
        ready = self.manager.facade._primary.resident()
        return {int.from_bytes(key[:-4], "big") for key in ready}


def for_decoder(name: str) -> dict[str, Any]:
    """Return what llm-d's router tells a prefill engine."""
    return {"remote_decoder": {"kv_request_id": name}}


@contextmanager
def peer(
    promote_timeout_s: float = PATIENCE_S,
    store_reserve_fraction: float = 0.0625,
    slots: int = SLOTS,
    cascade_slots_fraction_max: float = 0.5,
    close_timeout_s: float = PATIENCE_S,
    port: int | None = None,
    **own: Any,
) -> Iterator[Peer]:
    port = port or free_port()
    tier = {
        "type": "vllm",
        "tier": {"type": "p2p", "host": HOST, "port": port, **own},
        "probe_timeout_s": PATIENCE_S,
        "promote_timeout_s": promote_timeout_s,
    }
    settings = {
        "cpu_bytes_to_use": slots * BLOCK,
        "store_reserve_fraction": store_reserve_fraction,
        "cascade_slots_fraction_max": cascade_slots_fraction_max,
        "close_timeout_s": close_timeout_s,
    }
    with engine(tier, **settings) as played:
        yield Peer(played.manager, port)


def prefill(played: Peer, numbers: list[int], name: str) -> None:
    """Compute blocks for a decode engine. They are kept until it has come for them."""
    with played.request(numbers, for_decoder(name)) as context:
        complete(played, write(played, numbers, context), context)


def both(first: Peer, second: Peer, done: Callable[[], object]) -> None:
    """Let both engines step until something is so."""

    def is_so() -> object:
        first.step()
        second.step()
        return done()

    until(is_so, lambda: f"{first.statistics()}, {second.statistics()}")


def find(played: Peer, numbers: list[int], context: ReqContext, beside: Peer) -> list[bytes]:
    """Look up until it is decided what the request may load; return that."""
    hits: list[bytes] = []

    def is_decided() -> bool:
        keys = [key_of(number) for number in numbers]
        results = [played.manager.lookup(key, context) for key in keys]
        hits[:] = [key for key, each in zip(keys, results, strict=True) if each is HIT]
        return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(results)

    both(played, beside, is_decided)
    return hits


def read(played: Peer, numbers: list[int], params: dict[str, Any], beside: Peer) -> int:
    """Load what there is of the blocks, and compare the bytes; return how many there were."""
    with played.request(numbers, params) as context:
        hits = find(played, numbers, context, beside)
        for key in hits:
            played.manager.lookup(key, context)
        played.check(numbers[: len(hits)])
        if hits:
            assert played.manager.get_load_source(hits[0], context) is CacheHitSource.P2P
            played.manager.prepare_load(hits, context)
            played.manager.complete_load(hits, context)
    return len(hits)


class SlowLink:
    """The way out of an engine: what is sent waits until ``arrive``, whatever the engine does."""

    def __init__(self, played: Peer) -> None:
        self.sent: list[Any] = []
        self._real = played.backend._tier._data._agent
        played.backend._tier._data._agent = self

    def transfer(self, handle: Any) -> None:
        self.sent.append(handle)

    def check_xfer_state(self, handle: Any) -> str:
        return "PROC" if handle in self.sent else str(self._real.check_xfer_state(handle))

    def release_xfer_handle(self, handle: Any) -> None:
        if handle not in self.sent:
            self._real.release_xfer_handle(handle)

    def arrive(self) -> None:
        """Write what was sent into the other engine's memory."""
        for handle in self.sent:
            self._real.transfer(handle)
            until(lambda handle=handle: self._real.check_xfer_state(handle) == "DONE")
        self.sent.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def calling_threads(played: Peer, *methods: str) -> dict[str, set[str]]:
    """Note from now on, by method, which threads call the tier."""
    tier = played.backend._tier
    threads: dict[str, set[str]] = {}

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return real(*arguments)

        return call

    for name in methods:
        setattr(tier, name, noted(name, getattr(tier, name)))
    return threads


def pinned(played: Peer) -> int:
    return int(played.statistics().primary.pinned_slots)


def quarantined(played: Peer) -> int:
    return int(played.statistics().primary.quarantined_slots)


# --- prefill and decode ---


def test_a_decode_engine_gets_what_a_prefill_engine_computed() -> None:
    """Peers are served on the thread that calls all else: vLLM 0.33 has tiers that rely on it."""
    methods = ("serve_external_requests", "get_finished_jobs", "submit_store", "on_schedule_end")
    with peer() as first, peer() as second:
        threads = calling_threads(first, *methods)
        prefill(first, [1, 2, 3], "k")
        assert pinned(first) == 3
        assert read(second, [1, 2, 3], first.as_prefiller("k"), first) == 3
        both(first, second, lambda: not pinned(first))
        for played in (first, second):
            (tier,) = played.statistics().tiers
            assert (tier.counts.failed, tier.breaker) == (0, "CLOSED")
        assert threads.keys() == {*methods}
        (own,) = set.union(*threads.values())
        assert own != threading.current_thread().name


def test_a_long_prompt_comes_in_one_load() -> None:
    """vLLM's tier releases what it kept for a request with the first one."""
    numbers = list(range(1, 201))
    with peer(slots=256, cascade_slots_fraction_max=1.0) as first, peer(slots=256) as second:
        prefill(first, numbers, "k")
        assert read(second, numbers, first.as_prefiller("k"), first) == len(numbers)
        assert second.statistics().tiers[0].counts.promotion_jobs == 1
        both(first, second, lambda: not pinned(first))


def test_what_a_decode_engine_did_not_ask_for_at_first_it_computes() -> None:
    """Not after half a minute, in which vLLM's tier would hope for an answer."""
    with peer() as first, peer() as second:
        prefill(first, [1, 2, 3], "k")
        with second.request([1], first.as_prefiller("k")) as context:
            assert find(second, [1], context, first) == [key_of(1)]
            loads = second.backend._jobs._next_id
            assert find(second, [1, 2, 3], context, first) == [key_of(1)]
            assert second.backend._jobs._next_id == loads
        both(first, second, lambda: not pinned(first))


@pytest.mark.parametrize("for_others", [0, 2])
def test_what_a_prefill_engine_could_not_keep_it_says_it_has_not(
    monkeypatch: pytest.MonkeyPatch, for_others: int
) -> None:
    """To whoever asks later, too. Else the decode engine would wait for half a minute."""
    monkeypatch.setattr(late_writes.Peer, "stop_writes", None)  # its word is believed
    kept_for_others = {"cascade_slots_fraction_max": 2 / SLOTS, "close_timeout_s": GIVEN_UP_S}
    with peer(**kept_for_others) as first, peer() as second:
        if for_others:
            prefill(first, [8, 9], "others")
        prefill(first, [1, 2, 3], "k")
        both(first, second, lambda: pinned(first) == 2)
        assert read(second, [1, 2, 3], first.as_prefiller("k"), first) == 0
        both(first, second, lambda: pinned(first) == for_others)


def test_a_decode_engine_that_asks_first_waits_for_the_blocks() -> None:
    with peer() as first, peer() as second, second.request([1], first.as_prefiller("k")) as own:
        keys = [key_of(1)]

        def has_asked() -> bool:
            results = [second.manager.lookup(key, own) for key in keys]
            assert HIT not in results
            return "k" in first.backend._tier._kv_to_session

        both(first, second, has_asked)
        prefill(first, [1], "k")
        assert find(second, [1], own, first) == keys
        second.check([1])


def test_blocks_that_no_decode_engine_comes_for_are_let_go_and_the_tier_goes_on() -> None:
    with peer(unbound_store_timeout_s=0.01) as first, peer() as second:
        for number in range(1, 6):
            prefill(first, [number], f"nobody-{number}")
            both(first, second, lambda: not pinned(first))
        (tier,) = first.statistics().tiers
        assert (tier.counts.load_misses, tier.breaker) == (5, "CLOSED")


# --- from another engine's memory ---


def test_a_request_is_served_from_another_engines_memory() -> None:
    with peer() as first, peer() as second:
        first.store([1, 2])
        first.settle()
        assert read(second, [1, 2, 3], first.as_source("k"), first) == 2
        both(first, second, lambda: not pinned(first))


def test_what_was_stored_before_a_reset_is_no_peers() -> None:
    with peer() as first, peer() as second:
        first.store([1])
        first.settle()
        first.manager.reset_cache()
        first.store([2])
        first.settle()
        assert read(second, [1], first.as_source("k"), first) == 0
        assert read(second, [2], first.as_source("l"), first) == 0  # nor what is newer: other names
        assert pinned(first) == 0


def test_a_block_stays_for_as_long_as_a_peer_reads_it() -> None:
    with peer() as first, peer() as second:
        first.store([1])
        first.settle()
        way = SlowLink(first)
        with second.request([1], first.as_source("k")) as context:

            def is_sent() -> bool:
                second.manager.lookup(key_of(1), context)
                return bool(way.sent)

            both(first, second, is_sent)
            for number in range(20, 20 + 2 * SLOTS):
                first.store([number])
            assert pinned(first) == 1
            way.arrive()
            assert find(second, [1], context, first) == [key_of(1)]
            second.check([1])
        both(first, second, lambda: not pinned(first))


def test_what_a_peer_asked_for_and_never_fetches_is_let_go() -> None:
    """Its lookup pins the block; then it has no room for it, and its request ends."""
    with peer() as first, peer(store_reserve_fraction=0.99) as second:
        first.store([1])
        first.settle()
        with second.request([1], first.as_source("k")) as context:
            second.manager.lookup(key_of(1), context)
            both(first, second, lambda: pinned(first))
        both(first, second, lambda: not pinned(first))


# --- peers in trouble ---


def test_a_write_that_arrives_when_the_load_was_given_up_is_in_nobodys_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer is stopped in the middle of a write, is taken for dead, and goes on later."""
    monkeypatch.setattr(late_writes, "LOOK_S", 0.01)
    monkeypatch.setattr(late_writes, "GONE_S", 0.01)
    goes_on = threading.Event()
    with peer(close_timeout_s=GIVEN_UP_S) as second:
        with peer(close_timeout_s=GIVEN_UP_S) as first:
            prefill(first, [1], "k")
            way = SlowLink(first)
            slots = set()  # while it is being filled
            with second.request([1], first.as_prefiller("k")) as context:

                def is_sent() -> bool:
                    assert second.manager.lookup(key_of(1), context) is not HIT
                    slots.add(second.manager.facade._primary.slot_of(key_of(1)))
                    return bool(way.sent)

                both(first, second, is_sent)
                stop(first, goes_on)
                # Not a short deadline: it could pass before anything is sent.
                clock = second.manager.facade._clock
                second.manager.facade._clock = lambda: clock() + PATIENCE_S
                assert find(second, [1], context, first) == []
            session = second.backend._tier._sessions[f"{HOST}:{first.port}"]
            session._conn.mark_dead()
            both(first, second, lambda: not second.backend._jobs.under_way)
            others = list(range(20, 20 + SLOTS - 1))  # in all slots that there are
            for number in others:
                second.store([number])
            way.arrive()
            (slot,) = slots - {None}
            assert bytes(second.manager._memory.view(slot)) == block_of(1)
            second.check(others)
            assert quarantined(second) == 1
            goes_on.set()
        # Its process has ended, as far as can be seen.
        until(lambda: second.step() or not quarantined(second))


@pytest.mark.parametrize("is_believed", [True, False])
def test_blocks_that_a_prefill_engine_turns_out_not_to_have_are_a_miss(
    monkeypatch: pytest.MonkeyPatch, is_believed: bool
) -> None:
    """Its word ends the load. Where it is not known to be its word, that it goes on answering."""
    if not is_believed:
        monkeypatch.setattr(late_writes, "PEERS_LOAD_S", 0.0)
        monkeypatch.setattr(late_writes, "LOOK_S", 0.01)
        monkeypatch.setattr(late_writes, "ANSWERS_S", 0.01)
    held: list[late_writes.Peer] = []
    real = late_writes.Peer.stop_writes

    async def noted(self: late_writes.Peer) -> None:
        held.append(self)
        await real(self)

    monkeypatch.setattr(late_writes.Peer, "stop_writes", noted)
    with peer() as first, peer() as second:
        with second.request([1, 2], first.as_prefiller("k")) as own:

            def has_asked() -> bool:
                for number in (1, 2):
                    second.manager.lookup(key_of(number), own)
                return "k" in first.backend._tier._kv_to_session

            both(first, second, has_asked)
            prefill(first, [1], "k")

            def has_failed() -> bool:
                return second.manager.lookup(key_of(1), own) is LookupResult.MISS

            both(first, second, has_failed)
        assert quarantined(second) == 0
    assert len(held) == (not is_believed)


def stop(played: Peer, goes_on: threading.Event) -> None:
    """Have the tier's thread stand still, as if its process had been stopped."""
    tier = played.backend._tier
    stands = threading.Event()
    real = tier.get_finished_jobs

    def stand() -> Any:
        stands.set()
        goes_on.wait()
        return real()

    tier.get_finished_jobs = stand
    until(stands.is_set)


def test_a_peer_that_does_not_answer_costs_its_own_requests_only_and_is_told_of_no_slots() -> None:
    """The tier would keep them for half a minute, in the hope that it does, and then for good."""
    with socket.create_server((HOST, 0)) as mute, peer(promote_timeout_s=0.2) as second:
        address = {"kv_request_id": "k", "remote_host": HOST, "remote_port": mute.getsockname()[1]}
        with second.request([1, 2], {"remote_prefiller": address}) as context:
            assert find(second, [1, 2], context, second) == []
            assert quarantined(second) == 2
        assert set(second.statistics().tiers[0].breakers.values()) == {"CLOSED"}
        loads = second.statistics().tiers[0].counts.promotion_jobs
        with second.request([2], {"remote_prefiller": {**address, "kv_request_id": "l"}}) as again:
            assert find(second, [2], again, second) == []
        assert second.statistics().tiers[0].counts.promotion_jobs == loads, "it is left alone"
        until(lambda: second.step() or not quarantined(second))
        assert not second.backend._tier._sessions[f"{HOST}:{address['remote_port']}"].ready


@pytest.mark.parametrize(
    ("params", "address"),
    [
        ({"remote_prefiller": {"remote_host": "10.0.0.7", "remote_port": 5710}}, "10.0.0.7:5710"),
        ({"remote_kv_source": {"remote_host": "h", "remote_port": "1"}}, "h:1"),
        ({"remote_prefiller": {"remote_host": "h" * 1000, "remote_port": 1}}, "h" * 300),
        ({"remote_prefiller": {"remote_host": "\ud800", "remote_port": 1}}, "\\ud800:1"),
        ({"remote_prefiller": {"remote_host": "h"}}, ""),
        ({"remote_prefiller": "h:1"}, ""),
        ({"remote_decoder": {"kv_request_id": "k"}}, ""),
    ],
)
def test_the_address_of_a_request_is_read_whatever_a_client_wrote(
    params: dict[str, Any], address: str
) -> None:
    assert peer_of(params) == address


def test_slots_of_a_peer_that_was_restarted_at_once_come_back_without_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its address is never seen to be nobody's. So it is called, and is another process.

    It is known by the name of its process, which vLLM 0.33 may learn after the peer's first answer.
    """
    if hasattr(NixlTransport, "_build_peer_handles"):
        build = NixlTransport._build_peer_handles

        def build_slowly(*arguments: Any) -> Any:
            pause()
            return build(*arguments)

        monkeypatch.setattr(NixlTransport, "_build_peer_handles", build_slowly)
    monkeypatch.setattr(late_writes, "ANSWERS_S", inf)
    monkeypatch.setattr(late_writes, "LOOK_S", 0.01)
    monkeypatch.setattr(late_writes, "_listens", lambda _host, _port: True)
    with peer(promote_timeout_s=0.2) as second:
        with (
            peer(close_timeout_s=GIVEN_UP_S) as first,
            second.request([1], first.as_prefiller("k")) as context,
        ):
            assert find(second, [1], context, first) == []  # it has not been computed
            # On a busy machine the first peer may hear of it later than the second stops waiting.
            both(second, first, lambda: "k" in first.backend._tier._kv_to_session)
        # A call under a name that is still taken is heard by nobody: vLLM waits half a minute for
        # it.
        monkeypatch.setenv("VLLM_P2P_HANDSHAKE_TIMEOUT_S", "1")
        until(lambda: second.step() or not second.backend._jobs.under_way)
        assert quarantined(second) == 1
        with peer(port=first.port) as third:
            both(second, third, lambda: not quarantined(second))


def test_a_peer_that_no_longer_hears_is_connected_to_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's tier would send it the fetches of all later requests, too."""
    monkeypatch.setattr(late_writes, "LOOK_S", 0.01)
    monkeypatch.setattr(late_writes, "ANSWERS_S", 0.01)
    with peer(close_timeout_s=GIVEN_UP_S) as first, peer() as second:

        def is_served(number: int) -> int:
            prefill(first, [number], f"k{number}")
            return read(second, [number], first.as_prefiller(f"k{number}"), first)

        assert is_served(1)
        monkeypatch.setenv("VLLM_P2P_HANDSHAKE_TIMEOUT_S", "1")  # the old name may still be taken
        session = second.backend._tier._sessions[f"{HOST}:{first.port}"]
        monkeypatch.setattr(session._conn, "send", lambda _message: None)
        with monkeypatch.context() as impatient:
            impatient.setattr(client, "_LOAD_TIMEOUT_S", 0.0)
            impatient.setattr(client, "_ABORT_ACK_TIMEOUT_S", 0.0)
            impatient.setattr(late_writes, "PEERS_LOAD_S", 0.0)
            impatient.setattr(late_writes, "UNANSWERED_S", 0.0)
            assert not is_served(2)
        numbers = itertools.count(3)
        until(lambda: is_served(next(numbers)))


def test_a_call_during_the_start_fixes_no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM draws the seed of its block hashes last. vLLM's tier would go on telling another."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    with peer() as played:
        early = played.backend._tier._get_hash_seed()
        monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", "drawn")
        assert played.backend._tier._get_hash_seed() == "drawn" != early
        monkeypatch.setenv("PYTHONHASHSEED", "7")
        assert played.backend._tier._get_hash_seed() == "7"


# --- the door ---


def test_without_nixl_the_tier_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_utils, "NixlWrapper", None)
    with pytest.raises(ConfigError, match="install nixl"), peer():
        pass
