"""A cluster: blocks are spread over its nodes, which may change hands or be gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from valkey.crc import key_slot

from kvtier.plugin_api.backend import Connection, Outcome
from kvtier.plugin_api.offline import Selection
from kvtier_backends.redis.offline import RedisStorage
from tests.support.patience import until, until_true
from tests.unit.backends.redis._redis import CONTEXT, Tier, key_of, open_redis

if TYPE_CHECKING:
    from tests.support.redis_servers import Cluster, RedisServer

pytestmark = pytest.mark.anyio
MANY = range(1, 31)


@pytest.fixture
def cluster(formed: Cluster) -> Cluster:
    """Give it empty."""
    for node in formed.nodes:
        node.ask("FLUSHALL")
    return formed


def node_of(cluster: Cluster, name: bytes) -> RedisServer:
    """Return the node that a name belonged to when the cluster was formed."""
    return cluster.nodes[min(2, key_slot(name) * 3 // 16384)]


async def test_blocks_are_spread_over_the_nodes_of_a_cluster(cluster: Cluster) -> None:
    async with open_redis(cluster.url, mode="cluster") as tier:
        assert await tier.store(*MANY) == [Outcome.DONE] * 30
        assert await tier.load(*MANY) == [Outcome.DONE] * 30
        assert await tier.probe(*MANY, 31) == [True] * 30 + [False]
        assert all(node.ask("DBSIZE") > 2 for node in cluster.nodes)
        await tier.backend.remove([*map(key_of, MANY)])
        assert await tier.load(*MANY) == [Outcome.ABSENT] * 30
    first = cluster.nodes[0]
    async with open_redis(first.url, mode="cluster") as tier:  # the others are found
        assert await tier.store(*MANY) == [Outcome.DONE] * 30


async def test_what_all_nodes_have_is_listed_and_removed(cluster: Cluster) -> None:
    async with open_redis(cluster.url, mode="cluster") as tier:
        assert await tier.store(*MANY) == [Outcome.DONE] * 30
        storage = RedisStorage(tier.backend._watch._client, tier.backend._given)
        (blocks,) = (await storage._list(lambda _: None)).values()
        assert (blocks.blocks, blocks.facts) == (30, CONTEXT.namespace.facts)
        gone, failed = await storage._remove(Selection(), lambda _: None, dry=False)
        assert ([each.blocks for each in gone.values()], failed) == ([30], 0)
        assert await tier.load(*MANY) == [Outcome.ABSENT] * 30
        assert await storage._list(lambda _: None) == {}


async def test_a_hash_slot_that_changes_hands_is_followed(cluster: Cluster) -> None:
    async with open_redis(cluster.url, mode="cluster") as tier:
        await tier.until(Connection.UP)
        moved = MANY[-1] + 1  # its hash slot is no other test's
        name = tier.name(moved)
        old = node_of(cluster, name)
        new = next(node for node in cluster.nodes if node is not old)
        owner = new.ask("CLUSTER", "MYID")
        for node in (new, old, *cluster.nodes):
            node.ask("CLUSTER", "SETSLOT", key_slot(name), "NODE", owner)
        assert await tier.store(moved) == [Outcome.DONE]  # MOVED
        await until_true(lambda: _port_of(tier, name) == new.port)
        assert await tier.load(moved) == [Outcome.DONE]


async def test_a_node_that_is_gone_costs_its_own_blocks_alone(cluster: Cluster) -> None:
    async with open_redis(cluster.url, mode="cluster") as tier:
        assert await tier.store(*MANY) == [Outcome.DONE] * 30
        kept = node_of(cluster, tier.backend._description.name)
        dead = next(node for node in cluster.nodes if node is not kept)
        mine = [node_of(cluster, tier.name(number)) is dead for number in MANY]
        dead.kill()
        wanted = [Outcome.FAILED if each else Outcome.DONE for each in mine]
        assert await tier.load(*MANY) == wanted
        assert await tier.probe(*MANY) == [not each for each in mine]
        assert tier.is_in(Connection.UP)
        dead.start()  # empty
        until(lambda: cluster.is_ready)
        wanted = [Outcome.ABSENT if each else Outcome.DONE for each in mine]
        assert await tier.load(*MANY) == wanted


async def test_a_server_that_is_no_cluster_is_not_taken_for_one(
    valkey_server: RedisServer,
) -> None:
    async with open_redis(valkey_server.url, mode="cluster") as tier:
        assert await tier.store(1) == [Outcome.FAILED]
        assert tier.states == [Connection.CONNECTING]


def _port_of(tier: Tier, name: bytes) -> int:
    topology = tier.backend._watch._topology
    assert topology is not None
    address = topology.server_of(name)
    assert address is not None
    return address.port
