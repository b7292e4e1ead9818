from __future__ import annotations

from kvtier.core import messages as m
from kvtier.engine.primary.tier_directory import ASKING, NOWHERE, TierDirectory

G0, G1 = (0).to_bytes(4, "big"), (1).to_bytes(4, "big")
A, B, C = b"a" + G0, b"b" + G0, b"c" + G0
A1 = b"a" + G1
ALL = -1


def asked(tiers: int = 2, directory_keys_max: int = 100) -> TierDirectory:
    found = TierDirectory(tiers, directory_keys_max)
    found.start("r", ALL)
    return found


def unsent(found: TierDirectory) -> dict[int, list[bytes]]:
    """Return what each tier is to be asked, for whomever."""
    asked: dict[int, list[bytes]] = {}
    for tier, _, keys in found.pop_unsent():
        asked.setdefault(tier, []).extend(keys)
    return asked


def find(found: TierDirectory, key: bytes, request: str) -> int:
    return found.find(key, found._searches[request])


def test_a_key_is_asked_for_at_all_tiers_at_once_and_only_once() -> None:
    found = asked()
    assert find(found, A, "r") == ASKING
    assert find(found, A, "r") == ASKING
    assert unsent(found) == {0: [A], 1: [A]}
    assert unsent(found) == {}
    assert A in found.audit().waiters


def test_probing_ends_when_all_have_answered_or_an_earlier_tier_has_the_key() -> None:
    found = asked()
    for key in (A, B):
        find(found, key, "r")
    found.answered(1, [A, B], [True, True])
    assert {A, B} <= found.audit().waiters.keys()
    found.answered(0, [A], [False])
    found.answered(0, [B], [True])
    found.end_step()
    assert (find(found, A, "r"), find(found, B, "r")) == (1, 0)
    find(found, C, "r")
    found.answered(0, [C], [True])  # the later one is not waited for
    found.end_step()
    assert find(found, C, "r") == 0
    found.answered(1, [C], [True])
    assert find(found, C, "r") == 0


def test_the_verdict_of_a_running_request_holds() -> None:
    found = asked()
    find(found, A, "r")
    found.answered(0, [A], [False])
    found.answered(1, [A], [False])
    assert find(found, A, "r") == NOWHERE
    found.learn(1, [A], [])
    assert find(found, A, "r") == NOWHERE
    found.start("new", ALL)
    assert find(found, A, "new") == 1


def test_what_tiers_say_of_their_own_accord_needs_no_probe() -> None:
    found = asked()
    found.learn(1, [A], [])
    found.learn(0, [A], [])
    assert find(found, A, "r") == 0
    found.learn(0, [], [A])
    assert find(found, A, "r") == 1
    assert unsent(found) == {}


def test_a_request_is_served_only_from_its_own_tiers() -> None:
    found = TierDirectory(2, 100)
    found.start("none", 0)
    found.start("second", 0b10)
    found.learn(0, [A], [])
    assert find(found, A, "none") == NOWHERE
    assert find(found, A, "second") == ASKING
    assert unsent(found) == {1: [A]}


def test_a_tier_that_failed_a_request_is_not_asked_by_it_again() -> None:
    found = asked()
    found.learn(0, [A], [])
    assert find(found, A, "r") == 0
    found.failed(A, "r", 0)
    assert find(found, A, "r") == ASKING
    assert unsent(found) == {1: [A]}


def test_nothing_behind_a_gap_is_promoted_in_the_same_step_and_group() -> None:
    found = asked()
    found.learn(0, [B, A1], [])
    assert find(found, A, "r") == ASKING
    assert find(found, B, "r") == ASKING
    assert find(found, A1, "r") == 0
    found.answered(0, [A], [True])
    assert find(found, B, "r") == ASKING
    found.end_step()
    assert find(found, A, "r") == 0
    assert find(found, B, "r") == 0


def test_a_tier_that_is_not_usable_is_not_asked() -> None:
    found = asked(tiers=1)
    found.learn(0, [A], [])
    found.set_usable(0, usable=False)
    assert find(found, A, "r") == NOWHERE
    found.set_usable(0, usable=True)
    assert find(found, A, "r") == 0


def test_a_tier_that_was_given_up_owes_no_answers() -> None:
    """Nor does it to a request that it answers apart from others."""
    found = asked()
    found.start("own", 0b01, apart=True)
    for request in ("r", "own"):
        find(found, A, request)
    found.answered(1, [A], [False])
    found.give_up(0)
    assert A not in found.audit().waiters
    assert unsent(found) == {}, "nobody waits for an answer any more"
    found.end_step()
    assert find(found, A, "own") == NOWHERE


def test_what_nobody_waits_for_any_more_is_not_asked() -> None:
    """A probe is there for a decision, and ends with it."""
    found = asked()
    found.start("s", ALL)
    find(found, A, "r")
    find(found, B, "r")
    find(found, B, "s")
    found.stop_waiting("r")
    assert unsent(found) == {0: [B], 1: [B]}
    assert A not in found.audit().waiters
    found.answered(0, [A, B], [True, True])
    found.end_step()
    assert find(found, A, "r") == ASKING, "it may ask again"
    assert find(found, B, "s") == 0


def test_a_probe_that_was_sent_may_be_joined_though_nobody_waits() -> None:
    found = asked(tiers=1)
    find(found, A, "r")
    assert unsent(found) == {0: [A]}
    found.stop_waiting("r")
    assert A in found.audit().waiters
    found.start("s", ALL)
    assert find(found, A, "s") == ASKING
    assert unsent(found) == {}
    found.answered(0, [A], [True])
    found.end_step()
    assert find(found, A, "s") == 0


def test_a_reset_forgets_probes_and_ignores_their_answers() -> None:
    found = asked()
    find(found, A, "r")
    found.reset()
    assert A not in found.audit().waiters
    assert unsent(found) == {}
    found.answered(0, [A], [True])
    found.end_step()
    assert find(found, A, "r") == ASKING


def test_what_is_known_is_bounded_and_the_oldest_go_first() -> None:
    found = asked(tiers=1, directory_keys_max=2)
    found.learn(0, [A, B, C], [])
    assert find(found, C, "r") == 0
    assert find(found, B, "r") == 0
    assert find(found, A, "r") == ASKING


def test_a_restarted_tier_is_known_to_have_nothing() -> None:
    found = asked()
    found.learn(0, [A, B], [])
    found.learn(1, [B], [])
    found.forget_tier(0)
    assert find(found, B, "r") == 1
    assert find(found, A, "r") == ASKING


def test_a_request_that_tiers_answer_apart_asks_for_itself_and_tells_nobody() -> None:
    found = asked()
    found.start("own", ALL, apart=True)
    assert (find(found, A, "r"), find(found, A, "own")) == (ASKING, ASKING)
    assert unsent(found) == {0: [A], 1: [A]}
    assert list(found.pop_unsent_apart()) == [("own", 0, [A]), ("own", 1, [A])]
    for tier in (0, 1):
        found.answered(tier, [A], [tier == 1], "own")
    found.end_step()
    assert find(found, A, "own") == 1
    assert find(found, A, "r") == ASKING
    for tier in (0, 1):
        found.answered(tier, [A], [False])
    found.end_step()
    assert (find(found, A, "own"), find(found, A, "r")) == (1, NOWHERE)


def test_answers_for_a_request_that_is_over_are_ignored() -> None:
    found = asked()
    found.start("own", ALL, apart=True)
    find(found, A, "own")
    found.end("own")
    assert list(found.pop_unsent_apart()) == []
    found.answered(0, [A], [True], "own")
    assert found.audit().waiters == {}


def test_what_is_being_filled_is_asked_for_by_nobody() -> None:
    found = asked()
    found.start("own", ALL, apart=True)
    for request in ("r", "own"):
        find(found, A, request)
    found.stop_probing([A])
    assert (unsent(found), list(found.pop_unsent_apart())) == ({}, [])
    assert found.audit().waiters == {}
    found.answered(0, [A], [True])


def test_what_nobody_waits_for_is_withdrawn_and_what_others_wait_for_is_asked_for_them() -> None:
    found = asked(1)
    for name in ("second", "third"):
        found.start(name, ALL)
    find(found, A, "r")
    find(found, B, "r")
    find(found, B, "second")
    assert list(found.pop_unsent()) == [(0, "r", [A, B])]
    assert found.stop_waiting("r") == {A}
    assert found.stop_waiting("r") == frozenset(), "it is told once"
    find(found, A, "third")  # before the link has released the key
    found.handlers()[m.ProbesWithdrawn](m.ProbesWithdrawn(0, (A,), ""))
    assert list(found.pop_unsent()) == [(0, "third", [A])], "B is asked for as it was"
    assert found.stop_waiting("third") == {A}
    found.handlers()[m.ProbesWithdrawn](m.ProbesWithdrawn(0, (A,), ""))
    assert set(found.audit().waiters) == {B}


def test_each_request_asks_for_itself() -> None:
    found = asked(1)
    found.start("second", ALL)
    find(found, A, "r")
    find(found, A, "second")
    find(found, B, "second")
    assert list(found.pop_unsent()) == [(0, "r", [A]), (0, "second", [B])]


def test_the_oldest_keys_are_forgotten_a_share_of_them_at_once() -> None:
    """One by one, each would take as long as a million were deleted before it."""
    found = asked(tiers=1, directory_keys_max=640)
    keys = [bytes([number >> 8, number & 255]) + G0 for number in range(641)]
    found.learn(0, keys[:640], ())
    assert list(found.audit().known) == keys[:640]
    found.learn(0, keys[640:], ())
    assert list(found.audit().known) == keys[11:]
