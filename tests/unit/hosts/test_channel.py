"""Messages cross to another process and back as they were, however the socket cuts them."""

from __future__ import annotations

import os
import socket
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self, get_args

import pytest
from hypothesis import given, strategies

from kvtier import RuntimeConfig
from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.engine.link.tier_link import TierLink
from kvtier.hosts.channel import (
    DRAIN_BYTES_MAX,
    FRAME_MESSAGES_MAX,
    Begin,
    Channel,
    End,
    Level,
    Logged,
    NoMessage,
    Opened,
    Ready,
    Refused,
    SendCount,
    ToEngine,
    ToTier,
)
from kvtier.plugin_api.backend import BackendTraits, Connection, Outcome
from kvtier.plugin_api.deadlines import NEVER
from kvtier.tier import driver_messages
from kvtier.tier.bounded_tier import BoundedTier
from kvtier.tier.unbounded_tier import UnboundedTier

if TYPE_CHECKING:
    from collections.abc import Iterator

NUMBERS = strategies.integers(0, 2**63 - 1)
KEYS = strategies.lists(strategies.binary(max_size=68), max_size=8).map(tuple)
SLOTS = strategies.lists(NUMBERS, max_size=8).map(tuple)
OUTCOMES = strategies.lists(strategies.sampled_from(Outcome), max_size=8).map(tuple)
TEXTS = strategies.text(strategies.characters(exclude_categories=["Cs"]), max_size=20)
SECONDS = strategies.floats(0, 1e9)
POLICYS = (m.Victims, wire.PolicyBroke, wire.PolicyReturned)

TO_TIER = strategies.one_of(
    strategies.builds(Begin),
    strategies.builds(End),
    strategies.builds(wire.Probe, NUMBERS, KEYS, deadline=SECONDS | strategies.just(NEVER)),
    strategies.builds(wire.LoadJob, NUMBERS, KEYS, SLOTS),
    strategies.builds(wire.StoreJob, NUMBERS, TEXTS, KEYS, SLOTS),
    strategies.builds(wire.TouchKeys, KEYS, TEXTS),
    strategies.builds(wire.RequestEnded, TEXTS, strategies.none() | KEYS),
    strategies.builds(wire.RequestOpened, TEXTS, strategies.binary(max_size=20)),
    strategies.builds(wire.RequestClosed, TEXTS),
    strategies.builds(wire.PrefixHits, TEXTS, KEYS),
    strategies.builds(wire.BlocksMissing, TEXTS, KEYS),
    strategies.builds(wire.Tick, SECONDS),
)
TO_ENGINE = strategies.one_of(
    strategies.builds(
        Ready, strategies.builds(BackendTraits, NUMBERS, NUMBERS), strategies.none() | TEXTS
    ),
    strategies.builds(Refused, TEXTS, strategies.booleans()),
    strategies.builds(Opened, strategies.dictionaries(TEXTS, NUMBERS, max_size=4)),
    strategies.builds(
        wire.Counted,
        strategies.dictionaries(TEXTS, NUMBERS, max_size=4),
        strategies.dictionaries(TEXTS, NUMBERS, max_size=4),
    ),
    strategies.builds(
        Logged,
        strategies.sampled_from(get_args(Level)),
        TEXTS,
        strategies.dictionaries(TEXTS, TEXTS | SECONDS | strategies.none()),
    ),
    strategies.builds(
        wire.ProbeAnswer, NUMBERS, strategies.lists(strategies.booleans(), max_size=8).map(tuple)
    ),
    strategies.builds(wire.JobEnded, NUMBERS, OUTCOMES, SECONDS),
    strategies.builds(wire.PresenceChanged, KEYS, KEYS),
    strategies.builds(wire.BlocksWanted, TEXTS, KEYS, NUMBERS),
    strategies.builds(wire.ConnectionChanged, strategies.sampled_from(Connection)),
    strategies.builds(wire.TierBroke, TEXTS),
)


class Pair:
    """Both ends, in one process."""

    def __init__(self, *, buffer_bytes: int | None = None) -> None:
        engine, tier = socket.socketpair()
        if buffer_bytes is not None:
            engine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        self.raw = engine
        count = SendCount.new_file()
        self.engine: Channel[Any] = Channel(engine, ToEngine, watched=SendCount(count))
        self.tier: Channel[Any] = Channel(tier, ToTier, counted=SendCount(count))
        os.close(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.tier.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair() as made:
        yield made


@given(strategies.lists(TO_TIER, max_size=5), strategies.lists(TO_ENGINE, max_size=5))
def test_all_messages_arrive_as_they_were_sent(there: list[Any], back: list[Any]) -> None:
    """Enum members and tuples too: actors compare outcomes by identity."""
    with Pair() as pair:
        for channel, messages in ((pair.engine, there), (pair.tier, back)):
            for message in messages:
                channel.post(message)
            assert channel.flush()
        assert list(pair.tier.drain()) == there
        came = list(pair.engine.drain())
    assert came == back
    for message in came:
        if isinstance(message, wire.JobEnded):
            assert all(type(outcome) is Outcome for outcome in message.outcomes)


def test_every_message_from_a_link_may_cross() -> None:
    """That is: what a tier understands, and is not told in its own cell."""
    nowhere: Any = None
    of_the_driver = (each for each in vars(driver_messages).values() if isinstance(each, type))
    own = {*of_the_driver, *POLICYS, wire.BlocksWanted}
    bounded, unbounded = BackendTraits(1, 1, capacity_blocks=1), BackendTraits(1, 1)
    understood = {
        *BoundedTier("t", bounded, link=nowhere, driver=nowhere, policy=nowhere).handlers,
        *UnboundedTier("t", unbounded, link=nowhere, driver=nowhere).handlers,
    }
    assert understood - own <= {*ToTier.__args__}


def test_every_message_to_a_link_may_cross() -> None:
    """That is: what a link understands, and is told by no actor of the engine, nor by the host."""
    nowhere: Any = None
    config = RuntimeConfig.from_mapping(
        {"secondary_tiers": [{"type": "memory", "capacity_bytes": 64}]},
        slot_count=8,
        block_bytes=64,
    )
    link = TierLink(
        0,
        config,
        tier=nowhere,
        primary=nowhere,
        log=nowhere,
        collect_events=False,
    )
    from_the_primary_tier = {
        *(wire.GenerationBegan, m.ProbeKeys, m.Promote, m.Cascade, m.CascadeRefused),
        *(wire.RequestOpened, wire.RequestClosed, wire.PrefixHits, wire.BlocksMissing),
        *(m.Withdraw, m.StoresOffered, m.StoresLost, wire.TouchKeys, wire.RequestEnded, wire.Tick),
    }
    from_the_facade = {m.TierBypassed}
    from_the_host = {wire.TierOpened, wire.TierFenced, wire.TierNotRun, wire.TierRestarted}
    from_here = from_the_primary_tier | from_the_facade | from_the_host
    assert {*link.handlers} - from_here <= {*ToEngine.__args__}


@given(strategies.lists(TO_TIER, min_size=1, max_size=4), strategies.data())
def test_a_frame_may_come_in_pieces(messages: list[Any], data: strategies.DataObject) -> None:
    came: list[Any] = []
    with Pair() as pair:
        for message in messages:
            pair.engine.post(message)
            pair.engine.flush()
        raw = pair.tier._end.recv(1 << 20)
        cuts = data.draw(strategies.sets(strategies.integers(1, len(raw)), max_size=9))
        for start, end in pairwise([0, *sorted(cuts), len(raw)]):
            pair.raw.send(raw[start:end])
            came += pair.tier.drain()
    assert came == messages


def test_what_the_socket_does_not_take_goes_later() -> None:
    """The scheduler never waits for a tier that reads nothing."""
    sent = [wire.StoreJob(job, "r", (bytes(36),) * 512, tuple(range(512))) for job in range(64)]
    came: list[Any] = []
    with Pair(buffer_bytes=1) as pair:
        for message in sent:
            pair.engine.post(message)
            pair.engine.flush()
        assert pair.engine.posted > 0
        while not pair.engine.flush():
            came += pair.tier.drain()
        came += pair.tier.drain()
    assert came == sent


def test_one_take_is_bounded(pair: Pair) -> None:
    """After an idle hour a million keys may wait; a step takes in some of them."""
    message = wire.PresenceChanged((bytes(36),) * 512, ())
    for _ in range(100):
        pair.tier.post(message)
        pair.tier.flush()
    takes = []
    while not pair.tier.flush() or not takes or takes[-1]:
        takes.append(list(pair.engine.drain()))
    assert sum(map(len, takes)) == 100
    assert max(map(len, takes)) <= DRAIN_BYTES_MAX // (36 * 512) + FRAME_MESSAGES_MAX


def test_news_are_told_without_asking_the_kernel(pair: Pair) -> None:
    """Until everything has been taken: a take may leave some of what one send brought."""
    assert not pair.engine.has_news
    for _ in range(4 * DRAIN_BYTES_MAX // (36 * 512)):
        pair.tier.post(wire.PresenceChanged((bytes(36),) * 512, ()))
    came = 0
    while not (is_sent := pair.tier.flush()) or pair.engine.has_news:
        assert is_sent or pair.engine.has_news
        came += len(list(pair.engine.drain()))
    assert came == 4 * DRAIN_BYTES_MAX // (36 * 512)
    assert not pair.engine.has_news


def test_the_end_is_seen_after_all_that_was_sent(pair: Pair) -> None:
    pair.tier.post(Opened(gauges={}))
    pair.tier.flush()
    pair.tier.close()
    came = list(pair.engine.drain())
    while not pair.engine.is_ended:
        came += pair.engine.drain()
    assert came == [Opened(gauges={})]
    pair.engine.post(End())
    assert pair.engine.flush(), "nobody is left to wait for"


NO_TEXT = b"\x91\x93\xacRequestEnded\xa1\x9c\xc0"  # of a request named by a byte that is no UTF-8
DEEP = b"\x91" * 10_000


@pytest.mark.parametrize(
    "body", [b"", b"\x91\xc0", b"\x93\x01\x02", b"\xff" * 9, NO_TEXT, DEEP], ids=range(6)
)
def test_what_is_no_message_is_refused(pair: Pair, body: bytes) -> None:
    pair.raw.send(len(body).to_bytes(4, "little") + body)
    with pytest.raises(NoMessage):
        pair.tier.drain()


def test_nothing_to_wait_for_is_not_waited_for(pair: Pair) -> None:
    assert pair.engine.wait(0.0) is False
    pair.tier.post(Opened(gauges={}))
    pair.tier.flush()
    assert pair.engine.wait(None) is True
