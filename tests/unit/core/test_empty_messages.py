"""A message about no block is one like any other: each actor takes it, and answers it if it asks.

The messages are found by looking at what each actor takes, so that a new one is tested too.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.core.policy_actor import PolicyActor
from kvtier.engine.link.admission_gate import AdmissionGate
from kvtier.plugin_api.admission_policy import AdmissionContext
from kvtier.plugin_api.backend import BackendTraits
from kvtier.policies.eviction.lru import LRUPolicy
from kvtier.settings.plugins import fallback_policy, make_admission, make_policy
from kvtier.settings.runtime_config import RuntimeConfig, TierConfig
from kvtier.tier import driver_messages as d
from tests.support.cell import TestCell, TestTier, build_test_engine
from tests.support.mailboxes import KeptMessages

if TYPE_CHECKING:
    from kvtier.core.actor import Actor
    from kvtier.core.wire import Message

TIER = TierConfig("t", "1:t")
CONFIG = RuntimeConfig(slot_count=8, block_bytes=8, tiers=(TIER,))
COLLECTIONS = {"tuple": (), "list": [], "frozenset": frozenset(), "Collection": ()}
PLAIN = {"int": 1, "str": "r", "float": 1.0, "bool": True, "RequestId": "r"}

ANSWERS = (m.Victims, d.BatchEnded)
"""To a question of the actor's own: without it they mean nothing."""


def empty(kind: type[Any]) -> Any:
    """Return a message of this kind about no block; None if it isn't about blocks."""
    hints = {field.name: str(field.type) for field in msgspec.structs.fields(kind)}
    if "keys" not in hints:
        return None
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        name = str(getattr(field.type, "__name__", field.type)).partition("[")[0]
        if field.default is not msgspec.NODEFAULT:
            continue
        if name in COLLECTIONS:
            values[field.name] = COLLECTIONS[name]
        elif name in PLAIN:
            values[field.name] = PLAIN[name]
        else:
            values[field.name] = None
    return kind(**values)


def empties_of(actor: Actor) -> list[Message]:
    found = [empty(kind) for kind in actor.handlers if kind not in ANSWERS]
    about_blocks = [message for message in found if message is not None]
    assert about_blocks, f"{actor.name} takes no message about blocks"
    return about_blocks


@pytest.mark.parametrize("capacity", [None, 8])
def test_a_tier_answers_empty_jobs_and_probes_and_lives(capacity: int | None) -> None:
    """Such a job broke its cell once: the division of no blocks into batches."""
    cell = TestCell()
    engine = build_test_engine(cell, CONFIG, LRUPolicy(8))
    policy = None if capacity is None else LRUPolicy(capacity)
    tier = TestTier(cell, engine.links[0], BackendTraits(4, 4, capacity), policy)
    for message in empties_of(tier.actor):
        if not (isinstance(message, d.ContentsFound | d.ContentsAnnounced) and capacity is None):
            tier.actor.receive(message)
    while waiting := [each for each in tier.mailboxes if each.waiting]:
        cell.deliver(waiting[0])
    assert tier.actor.is_idle()
    answers = list(tier.inbox.waiting)
    assert wire.ProbeAnswer(probe=1, present=()) in answers
    ended = [each for each in answers if isinstance(each, wire.JobEnded)]
    assert ended == [wire.JobEnded(job=1, outcomes=(), seconds=0.0)] * 2  # the load, the store


def test_the_engine_s_actors_take_empty_messages() -> None:
    """And none of them breaks: a broken actor is deaf for the rest of the engine's life."""
    cell = TestCell()
    engine = build_test_engine(cell, CONFIG, LRUPolicy(8))
    TestTier(cell, engine.links[0], BackendTraits(4, 4), None)
    cell.ask(engine.primary, m.RequestStarted(request="r", tiers=-1))
    for actor in (engine.primary, engine.links[0]):
        for message in empties_of(actor):
            cell.ask(actor, message)
    assert cell.faults == 0


@pytest.mark.parametrize("name", [e.name for e in entry_points(group="kvtier.eviction_policies")])
def test_policies_take_empty_messages(name: str) -> None:
    taken = KeptMessages()
    actor = PolicyActor(name, make_policy(name, 8), fallback_policy(), taken)
    for message in empties_of(actor):
        actor.receive(message)
    assert not any(isinstance(message, wire.PolicyBroke) for message in taken.messages)


@pytest.mark.parametrize("name", [e.name for e in entry_points(group="kvtier.admission_policies")])
def test_admission_takes_empty_messages(name: str) -> None:
    tier = TierConfig("t", "1:t", admission=name)
    policy, taken = make_admission(tier, AdmissionContext(8, 8)), KeptMessages()
    gate = AdmissionGate(0, "1:t", policy, primary=taken, link=taken, log=taken)
    for message in empties_of(gate):
        gate.receive(message)
