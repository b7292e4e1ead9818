"""A cluster: blocks are spread over its nodes, which may change hands, be moving or be gone."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import pytest
from valkey.crc import key_slot

from kvtier.plugin_api.backend import Connection, Outcome
from kvtier.plugin_api.offline import Selection
from kvtier_backends.redis.batches import Target, redirected
from kvtier_backends.redis.offline import RedisStorage
from kvtier_backends.redis.redis_options import Address
from kvtier_backends.redis.resp import Command, Reply, ReplyKind
from tests.support.patience import until, until_true
from tests.support.redis_servers import HOST, Cluster
from tests.unit.backends.redis._redis import CONTEXT, Tier, key_of, open_redis
from tests.unit.backends.redis.test_redis_login import ACL_OF_A_CLUSTER, SECRET

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.anyio
DONE, ABSENT, FAILED = Outcome.DONE, Outcome.ABSENT, Outcome.FAILED
MANY = range(1, 31)
"""Blocks all over the cluster."""


@pytest.fixture
def cluster(formed: Cluster) -> Cluster:
    """Give it empty."""
    for node in formed.nodes:
        node.ask("FLUSHALL")
    return formed


def node_of(cluster: Cluster, slot: int) -> RedisServer:
    """Return the node that a hash slot belonged to when the cluster was formed."""
    return cluster.nodes[min(2, slot * 3 // 16384)]


async def test_blocks_are_spread_over_the_nodes_of_a_cluster(cluster: Cluster) -> None:
    async with open_redis(cluster.url, mode="cluster") as tier:
        assert await tier.store(*MANY) == [DONE] * 30
        assert await tier.load(*MANY) == [DONE] * 30
        assert await tier.probe(*MANY, 31) == [True] * 30 + [False]
        assert all(node.ask("DBSIZE") > 2 for node in cluster.nodes)
        await tier.backend.remove([*map(key_of, MANY)])
        assert await tier.load(*MANY) == [ABSENT] * 30
    first = cluster.nodes[0]
    async with open_redis(first.url, mode="cluster") as tier:  # the others are found
        assert await tier.store(*MANY) == [DONE] * 30


async def test_what_all_nodes_have_is_listed_and_removed(cluster: Cluster) -> None:
    async with open_redis(cluster.url, mode="cluster") as tier:
        assert await tier.store(*MANY) == [DONE] * 30
        storage = RedisStorage(tier.backend._watch._client, tier.backend._given)
        (blocks,) = (await storage._list(lambda _: None)).values()
        assert (blocks.blocks, blocks.facts) == (30, CONTEXT.namespace.facts)
        gone, failed = await storage._remove(Selection(), lambda _: None, dry=False)
        assert ([each.blocks for each in gone.values()], failed) == ([30], 0)
        assert await tier.load(*MANY) == [ABSENT] * 30
        assert await storage._list(lambda _: None) == {}


async def test_a_node_that_is_gone_costs_its_own_blocks_alone(cluster: Cluster) -> None:
    async with open_redis(cluster.url, mode="cluster") as tier:
        assert await tier.store(*MANY) == [DONE] * 30
        kept = node_of(cluster, key_slot(tier.backend._description.name))
        dead = next(node for node in cluster.nodes if node is not kept)
        mine = [node_of(cluster, key_slot(tier.name(number))) is dead for number in MANY]
        dead.kill()
        wanted = [FAILED if each else DONE for each in mine]
        assert await tier.load(*MANY) == wanted
        assert await tier.probe(*MANY) == [not each for each in mine]
        assert tier.is_in(Connection.UP)
        dead.start()  # empty
        until(lambda: cluster.is_ready)
        wanted = [ABSENT if each else DONE for each in mine]
        assert await tier.load(*MANY) == wanted


async def test_a_server_that_is_no_cluster_is_not_taken_for_one(
    valkey_server: RedisServer,
) -> None:
    async with open_redis(valkey_server.url, mode="cluster") as tier:
        assert await tier.store(1) == [FAILED]
        assert tier.states == [Connection.CONNECTING]


# --- hash slots that move ---


class Move(NamedTuple):
    """A hash slot on its way."""

    slot: int
    source: RedisServer
    target: RedisServer

    def carry(self, name: bytes) -> None:
        """Bring what is called so to the target."""
        self.source.ask("MIGRATE", HOST, self.target.port, name, 0, 60_000)

    def finish(self, cluster: Cluster) -> None:
        owner = self.target.ask("CLUSTER", "MYID")
        for node in (self.target, self.source, *cluster.nodes):
            node.ask("CLUSTER", "SETSLOT", self.slot, "NODE", owner)


@contextmanager
def moving(cluster: Cluster, slot: int, *, is_imported: bool = True) -> Iterator[Move]:
    """Begin to move a hash slot; leave it where it was in the end, and the cluster empty."""
    source = node_of(cluster, slot)
    target = next(node for node in cluster.nodes if node is not source)
    move = Move(slot, source, target)
    try:
        if is_imported:
            target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.ask("CLUSTER", "MYID"))
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.ask("CLUSTER", "MYID"))
        yield move
    finally:
        for node in cluster.nodes:
            node.ask("FLUSHALL")
        Move(slot, target, source).finish(cluster)


def of_one_slot(tier: Tier, how_many: int) -> tuple[int, ...]:
    """Return the numbers of blocks that share a hash slot."""
    by_slot: dict[int, list[int]] = defaultdict(list)
    for number in count(100):
        found = by_slot[key_slot(tier.name(number))]
        found.append(number)
        if len(found) == how_many:
            return tuple(found)
    raise AssertionError


def server_of(tier: Tier, number: int) -> Address | None:
    """Return what the tier takes for a block's node."""
    topology = tier.backend._watch._topology
    assert topology is not None
    return topology.server_of(tier.name(number))


async def test_blocks_of_a_slot_that_is_being_moved_are_found_on_either_side(
    cluster: Cluster,
) -> None:
    async with open_redis(cluster.url, mode="cluster") as tier:
        gone, left, new = of_one_slot(tier, 3)
        assert await tier.store(gone, left, *MANY) == [DONE] * 32
        with moving(cluster, key_slot(tier.name(gone))) as move:
            move.carry(tier.name(gone))
            wanted = [DONE, DONE, ABSENT, *[DONE] * 20]
            assert await tier.load(gone, left, new, *MANY[:20]) == wanted
            assert await tier.probe(gone, left, new) == [True, True, False]
            assert await tier.store(gone, left, new) == [DONE] * 3
            assert await tier.load(new) == [DONE]
            assert move.source.ask("DBSIZE") + move.target.ask("DBSIZE") > 2
            there = move.target.ask("CLUSTER", "COUNTKEYSINSLOT", move.slot)
            assert there == 2  # a new one goes there
            await tier.backend.remove([*map(key_of, (gone, left, new))])
            assert await tier.load(gone, left, new) == [ABSENT] * 3
            assert await tier.probe(*MANY) == [True] * 30
        assert tier.states == [Connection.CONNECTING, Connection.UP]
        assert tier.backend._counters.counts() == {}


async def test_a_slot_that_has_moved_is_followed_before_the_new_map_is_known(
    cluster: Cluster,
) -> None:
    async with open_redis(cluster.url, mode="cluster") as tier:
        one, other = of_one_slot(tier, 2)
        assert await tier.store(one) == [DONE]
        with moving(cluster, key_slot(tier.name(one))) as move:
            move.carry(tier.name(one))
            move.finish(cluster)
            assert await tier.load(one, other) == [DONE, ABSENT]  # MOVED
            assert await tier.store(other) == [DONE]
            new = Address(HOST, move.target.port)
            await until_true(lambda: server_of(tier, one) == new)
            assert await tier.load(one, other) == [DONE] * 2
        assert tier.backend._counters.counts() == {}


async def test_nodes_that_redirect_for_ever_cost_misses_of_that_slot_alone(
    cluster: Cluster,
) -> None:
    """Each names the other: one moves the slot, and the other does not know of it."""
    async with open_redis(cluster.url, mode="cluster") as tier:
        (lost,) = of_one_slot(tier, 1)
        assert await tier.store(*MANY) == [DONE] * 30
        with moving(cluster, key_slot(tier.name(lost)), is_imported=False):
            assert await tier.load(lost, *MANY) == [ABSENT, *[DONE] * 30]
            assert await tier.probe(lost, *MANY) == [False, *[True] * 30]
            assert await tier.store(lost, *MANY) == [FAILED, *[DONE] * 30]
        assert tier.states == [Connection.CONNECTING, Connection.UP]


async def test_a_tier_connects_while_the_slot_of_its_description_is_moved(
    cluster: Cluster,
) -> None:
    """The description is written once that is over."""
    async with open_redis(cluster.url, mode="cluster") as tier:
        await tier.until(Connection.UP)
        name = tier.backend._description.name
    for node in cluster.nodes:
        node.ask("FLUSHALL")
    async with open_redis(cluster.url, mode="cluster") as tier:
        with moving(cluster, key_slot(name)) as move:
            await tier.until(Connection.UP)
            assert await tier.store(*MANY) == [DONE] * 30
            assert move.target.ask("CLUSTER", "COUNTKEYSINSLOT", move.slot) == 0
        tier.backend._watch.doubt()
        await until_true(lambda: move.source.ask("EXISTS", name))
        assert tier.states == [Connection.CONNECTING, Connection.UP]


async def test_the_rights_that_the_docs_name_for_a_cluster_are_enough(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KV_PASSWORD", SECRET)
    for node in cluster.nodes:
        node.ask("ACL", "SETUSER", "kv", *ACL_OF_A_CLUSTER)
    login = {"username": "kv", "password_env": "KV_PASSWORD"}
    async with open_redis(cluster.url, mode="cluster", **login) as tier:
        one, other = of_one_slot(tier, 2)
        assert await tier.store(one) == [DONE]
        with moving(cluster, key_slot(tier.name(one))) as move:
            move.carry(tier.name(one))
            assert await tier.load(one, other) == [DONE, ABSENT]
        assert tier.backend._counters.counts() == {}


ASKED = Target(Address("a", 1))


@pytest.mark.parametrize(
    ("said", "onward"),
    [
        ("ASK 3999 b:6381", Target(Address("b", 6381), is_asked=True)),
        ("MOVED 3999 b:6381", Target(Address("b", 6381))),
        ("ASK 3999 :6381", Target(Address("a", 6381), is_asked=True)),
        ("MOVED 3999 ::1:6381", Target(Address("::1", 6381))),
        ("MOVED 3999 [::1]:6381", Target(Address("::1", 6381))),
        *((said, None) for said in ("ASK", "ASK 1", "ASK 1 b", "ASK 1 b:", "ASK 1 b:x")),
        *((said, None) for said in ("ASK 1 ?:6381", "ASK 1 b:65536", f"ASK 1 b:{'9' * 5000}")),
        *((said, None) for said in ("ASK 1 b:٣", "ASK 1 b:0", "TRYAGAIN", "", "CLUSTERDOWN b:1")),
    ],
)
def test_a_redirection_is_read_whatever_a_server_says(said: str, onward: Target | None) -> None:
    command = Command((b"GET",), reply=Reply(ReplyKind.ERROR, said))
    assert redirected({ASKED: [command]}) == ({} if onward is None else {onward: [command]})
    assert (command.reply is None) is (onward is not None)
