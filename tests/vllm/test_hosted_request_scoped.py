"""Tiers of vLLM's whose contents depend on the request: each sees its own, and no other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import LookupResult, OffloadPolicy, ReqContext

from tests.support.patience import until
from tests.vllm.support.tenant_tier import TenantTier
from tests.vllm.test_hosted_tiers import SHORT_S, SLOTS, Engine, block_of, engine, key_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

COMPUTED = {"tenant": "eve", "computed_only": True}
ANN, BOB = {"tenant": "ann"}, {"tenant": "bob"}


def tenants(**settings: Any) -> AbstractContextManager[Engine]:
    tier = {"type": "TenantTier", "module_path": "tests.vllm.support.tenant_tier"}
    return engine({"type": "vllm", "tier": tier, "request_scoped": True, **settings})


def write(played: Engine, numbers: list[int], context: ReqContext) -> list[int]:
    """Have the GPU write blocks of a request; return those that were given a slot."""
    written: list[int] = []

    def is_stored() -> bool:
        played.step()
        grant = played.manager.prepare_store([key_of(number) for number in numbers], context)
        if grant is None:
            return False
        for key, slot in zip(grant.keys_to_store, grant.store_spec.chunk_ids, strict=True):
            written.append(int.from_bytes(key[:-4], "big"))
            played.manager._memory.view(int(slot))[:] = block_of(written[-1])
        return True

    until(is_stored)
    return written


def complete(played: Engine, numbers: list[int], context: ReqContext) -> None:
    played.manager.complete_store([key_of(number) for number in numbers], context)


def store(played: Engine, numbers: list[int], params: dict[str, Any] | None) -> str:
    with played.request(numbers, params) as context:
        complete(played, write(played, numbers, context), context)
    played.settle()
    return context.req_id


def find(played: Engine, numbers: list[int], *contexts: ReqContext) -> list[int]:
    """Look up for several requests in the same steps; return how many blocks each may load."""
    hits: dict[str, int] = {}

    def are_decided() -> bool:
        for context in contexts:
            results = [played.manager.lookup(key_of(number), context) for number in numbers]
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(results):
                hits.setdefault(context.req_id, results.count(LookupResult.HIT))
        played.step()
        return len(hits) == len(contexts)

    until(are_decided)
    return [hits[context.req_id] for context in contexts]


def test_a_tier_sees_the_requests_that_bring_something_for_it_and_their_blocks() -> None:
    with tenants() as played:
        store(played, [1], None)
        request = store(played, [2, 3], ANN)
        tier = TenantTier.last
        until(lambda: (request, "ended") in tier.told)
        assert tier.told == [(request, "began"), (request, "ended")]
        assert tier.of_tenant == {"ann": {key_of(n): block_of(n) for n in (2, 3)}}
        with played.request([9]) as nobody:
            assert find(played, [9], nobody) == [0]
        assert tier.asked == []


def test_what_a_tier_says_to_one_request_is_no_answer_to_another() -> None:
    """Both ask for the same keys in the same steps, and only Ann's are there."""
    with tenants() as played:
        store(played, [1, 2], ANN)
        for first in range(20, 20 + 2 * SLOTS, 2):  # in the places of those
            store(played, [first, first + 1], None)
        with played.request([1, 2], BOB) as bob, played.request([1, 2], ANN) as ann:
            assert find(played, [1, 2], bob, ann) == [0, 2]
            asked = {(request, key) for request, key in TenantTier.last.asked}
            assert {(bob.req_id, key_of(1)), (ann.req_id, key_of(1))} <= asked
            played.manager.prepare_load([key_of(1), key_of(2)], ann)
            played.manager.complete_load([key_of(1), key_of(2)], ann)


def test_a_request_gives_all_its_blocks_also_those_that_were_here() -> None:
    with tenants() as played:
        store(played, [1, 2], None)
        assert TenantTier.last.stored == {}
        params = ReqContext(req_id="x", kv_transfer_params=BOB)
        assert played.manager.on_new_request(params).policy is OffloadPolicy.REQUEST_LEVEL
        played.manager.on_request_finished(params)
        request = store(played, [1, 2, 3], BOB)
        assert sorted(TenantTier.last.stored[request]) == [key_of(n) for n in (1, 2, 3)]


def test_blocks_that_another_request_still_writes_follow_and_then_the_end() -> None:
    with tenants() as played:
        tier = TenantTier.last
        with played.request([1, 2]) as writer:
            assert write(played, [1, 2], writer) == [1, 2]
            with played.request([1, 2, 3], ANN) as reader:
                assert write(played, [1, 2, 3], reader) == [3]
            # It is over, and all its blocks are still being written.
            complete(played, [1, 2], writer)
            until(lambda: played.step() or len(tier.stored.get(reader.req_id, ())) == 2)
            assert tier.told == [(reader.req_id, "began")]
            complete(played, [3], reader)
            until(lambda: played.step() or (reader.req_id, "ended") in tier.told)
        assert sorted(tier.stored[reader.req_id]) == [key_of(n) for n in (1, 2, 3)]
        assert writer.req_id not in tier.stored


def test_a_tier_that_wants_what_a_request_computes_is_not_given_what_was_here() -> None:
    """The tier answers CHUNK_LEVEL, after vLLM was told REQUEST_LEVEL: what it wants counts."""
    with tenants() as played:
        store(played, [1, 2], None)
        request = store(played, [1, 2, 3], COMPUTED)
        assert TenantTier.last.stored == {request: [key_of(3)]}
        store(played, [1, 2, 3], COMPUTED)
        assert TenantTier.last.stored == {request: [key_of(3)]}
        assert played.statistics().tiers[0].breaker == "CLOSED"
        whole = store(played, [1, 2, 3], BOB)
        assert sorted(TenantTier.last.stored[whole]) == [key_of(n) for n in (1, 2, 3)]


def test_a_block_that_another_request_writes_is_none_that_this_one_computes() -> None:
    with tenants() as played:
        tier = TenantTier.last
        with played.request([1]) as writer:
            assert write(played, [1], writer) == [1]
            with played.request([1, 2], COMPUTED) as reader:
                assert write(played, [1, 2], reader) == [2]
                complete(played, [2], reader)
            complete(played, [1], writer)
            until(lambda: played.step() or (reader.req_id, "ended") in tier.told)
        assert tier.stored == {reader.req_id: [key_of(2)]}


def test_a_reset_ends_what_was_waited_for() -> None:
    with tenants() as played:
        tier = TenantTier.last
        with played.request([1], ANN) as context:
            write(played, [1], context)
        played.manager.reset_cache()
        until(lambda: played.step() or (context.req_id, "ended") in tier.told)


def test_a_lookup_that_is_never_resolved_ends_with_its_request() -> None:
    """Else the tier would be asked for a request that it has been told is over."""
    with tenants(**SHORT_S) as played:
        tier = TenantTier.last
        tier.unresolved = True
        with played.request([1], ANN) as context:
            assert find(played, [1], context) == [0]
        until(lambda: played.step() or (context.req_id, "ended") in tier.told)
        last = len(tier.asked)
        store(played, [5], BOB)  # steps of the tier, and other requests
        assert [each for each, _ in tier.asked[last:]].count(context.req_id) == 0


def test_parameters_that_are_no_plain_data_are_as_none() -> None:
    with tenants() as played:
        store(played, [1], {"tenant": object()})
        assert TenantTier.last.told == []
