"""The conformance suite of eviction policies, as checks that can fail.

For the author of a policy::

    @pytest.mark.parametrize("check", POLICY_CHECKS, ids=lambda check: check.__name__)
    def test_my_policy_keeps_the_contract(check: PolicyCheck) -> None:
        check(MyPolicy)

or, all at once, ``check_policy(MyPolicy)``. Each check builds policies of its
own. They don't judge a policy's choices: any policy with correct records passes. They need
Hypothesis.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvtier.plugin_api.eviction_policy import EvictionPolicy
from kvtier.testing._workbench import expect

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from kvtier.plugin_api.keys import Key, RequestId

MakePolicy = Callable[[int], EvictionPolicy]
"""Builds a policy for a capacity in blocks. The class itself will do."""

PolicyCheck = Callable[[MakePolicy], None]
"""One check: raises ``AssertionError``, which names the broken promise."""

KEYS_KEPT_MAX: Final = 10
"""Most keys that a policy may keep, evicted ones included, in units of its capacity."""
CAPACITY: Final = 64
EXAMPLES: Final = 300


class Books:
    """A policy, and a simple record of what it must know. Each call is checked."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.resident: set[Key] = set()
        self.held: set[Key] = set()
        self._expect_length("a new policy")

    def admit(self, keys: Sequence[Key], request: RequestId = "r", *, held: bool = False) -> None:
        """Admit keys."""
        self.policy.admit(keys, request, held=held)
        self.resident.update(keys)
        self.held.update(keys if held else ())
        self._expect_length("admit")

    def touch(self, keys: Sequence[Key], request: RequestId = "r") -> None:
        """Touch keys, known or not."""
        self.policy.touch(keys, request)
        self._expect_length("touch")

    def hold(self, keys: Sequence[Key]) -> None:
        """Hold keys, known or not."""
        self.policy.hold(keys)
        self.held.update(keys)
        self._expect_length("hold")

    def unhold(self, keys: Sequence[Key]) -> None:
        """Release keys, held or not."""
        self.policy.unhold(keys)
        self.held.difference_update(keys)
        self._expect_length("unhold")

    def forget(self, keys: Sequence[Key]) -> None:
        """Report keys as gone, known or not."""
        self.policy.forget(keys)
        self.resident.difference_update(keys)
        self.held.difference_update(keys)
        self._expect_length("forget")

    def end(self, request: RequestId, order: Sequence[Key] | None = None) -> None:
        """End a request."""
        self.policy.end_request(request, order)
        self._expect_length("end_request")

    def restore(self, keys: Sequence[Key]) -> None:
        """Restore keys that were chosen."""
        self.policy.restore(keys)
        self.resident.update(keys)
        self._expect_length("restore")

    def clear(self) -> None:
        """Clear the policy."""
        self.policy.clear()
        self.resident.clear()
        self.held.clear()
        self._expect_length("clear")

    def choose(self, count: int, exclude: Collection[Key] = frozenset()) -> list[Key]:
        """Have victims chosen; refuse invalid ones."""
        victims = self.policy.choose_victims(count, exclude)
        expect(len(set(victims)) == len(victims), f"a victim must be chosen once, got {victims}")
        chosen = set(victims)
        expect(chosen <= self.resident, f"not resident: {chosen - self.resident}")
        expect(not chosen & self.held, f"held, and yet chosen: {chosen & self.held}")
        expect(not chosen & set(exclude), f"excluded, and yet chosen: {chosen & set(exclude)}")
        available = len(self.resident - self.held - set(exclude))
        wanted = min(count, available)
        expect(
            len(victims) == wanted,
            f"{count} victims were asked for and {available} keys could be chosen, "
            f"so there must be {wanted} victims, not {len(victims)}",
        )
        self.resident -= chosen
        self._expect_length("choose_victims")
        return victims

    def _expect_length(self, call: str) -> None:
        length, wanted = len(self.policy), len(self.resident)
        expect(length == wanted, f"len after {call} must be {wanted}, is {length}")


def new_keys(count: int, first: int = 0) -> list[Key]:
    """Return distinct keys, as long as those of an engine."""
    return [number.to_bytes(36, "big") for number in range(first, first + count)]


def check_policy(make: MakePolicy) -> None:
    """Run every check. Raises ``NotConforming`` at the first broken promise."""
    for check in POLICY_CHECKS:
        check(make)


# --- victims ---


def held_keys_are_never_chosen(make: MakePolicy) -> None:
    """Held at admission or later; held twice is held once; released keys may be chosen."""
    books = Books(make(8))
    keys = new_keys(8)
    books.admit(keys[:3], held=True)
    books.admit(keys[3:], "s")
    books.hold(keys[2:5])
    books.hold(keys[2:5])
    books.choose(8)
    books.unhold(keys[1:4])
    books.choose(1)
    books.choose(8)
    books.unhold(keys)
    books.choose(8)
    expect(not books.resident, "all keys that were released must be chosen in the end")


def excluded_keys_are_never_chosen(make: MakePolicy) -> None:
    """A key is excluded for one call, and may be an unknown one."""
    books = Books(make(8))
    keys = new_keys(8)
    books.admit(keys)
    for exclude in (frozenset(keys), frozenset(keys[2:]), frozenset(new_keys(4, 100))):
        books.choose(1, exclude)
    books.choose(8, frozenset(keys[:5]))
    books.choose(8)
    expect(not books.resident, "keys that were excluded must be chosen by a later call")


def no_key_is_chosen_twice(make: MakePolicy) -> None:
    """Neither in one result nor in two, unless it was admitted again."""
    books = Books(make(8))
    keys = new_keys(8)
    for number in range(4):
        books.admit(keys, f"r{number}")
        books.touch(keys, "s")
        books.choose(3)
        books.choose(3)
        books.choose(3)


def as_many_victims_as_asked_for_if_there_are(make: MakePolicy) -> None:
    """A store waits for them: none for 0, all for more than there are, also when touched."""
    for capacity in (1, 2, CAPACITY):
        books = Books(make(capacity))
        books.choose(0)
        books.choose(3)
        keys = new_keys(capacity)
        books.admit(keys)
        for request in "stu":
            books.touch(keys, request)
            books.end(request, keys)
        books.choose(0)
        books.choose(capacity // 2)
        books.choose(2 * capacity)


def what_was_chosen_is_forgotten(make: MakePolicy) -> None:
    """Touching it, or naming it as a request ends, does not bring it back."""
    books = Books(make(8))
    keys = new_keys(8)
    books.admit(keys)
    chosen = books.choose(4)
    books.touch(chosen, "s")
    books.end("s", keys)
    books.unhold(chosen)
    books.choose(8)
    expect(not books.resident, "the remaining keys must be chosen")


def what_is_restored_goes_next(make: MakePolicy) -> None:
    """All of it or a part; not while it is held; not twice if it was admitted again."""
    keys = new_keys(12)
    books = Books(make(12))
    books.admit(keys[:6], "r")
    books.admit(keys[6:], "s")
    books.touch(keys[:6], "s")
    for back in (slice(None), slice(1, None)):
        chosen = books.choose(4)[back]
        books.restore(chosen)
        again = books.choose(len(chosen))
        expect(set(again) == set(chosen), f"{chosen} must go next, and {again} did")
        books.restore(again)
    held = books.choose(2)
    books.hold(held)
    books.restore(held)
    books.choose(2)
    books.unhold(held)
    twice = books.choose(1)
    books.admit(twice, "t")
    books.restore(twice)
    books.choose(12)


def another_may_go_instead(make: MakePolicy) -> None:
    """A running request's tail goes, and the chosen head is restored, again and again."""
    books = Books(make(8))
    keys = new_keys(8)
    books.admit(keys[:1], "r")
    books.end("r", keys[:1])
    books.admit(keys[1:], "s")
    books.touch(keys[:1], "s")
    while len(books.resident) > 1:
        (chosen,) = books.choose(1)
        last = max(books.resident | {chosen})
        if last != chosen:
            books.forget([last])
            books.restore([chosen])
    expect(books.resident == {keys[0]}, "the head must be left")
    books.choose(2)


# --- known keys ---


def what_is_forgotten_is_gone(make: MakePolicy) -> None:
    """Never chosen, not held any more, and new if it is admitted again."""
    books = Books(make(8))
    keys = new_keys(8)
    books.admit(keys, held=True)
    books.forget(keys[:4])
    books.forget(keys[:4])
    books.admit(keys[:2], "s")
    books.choose(8)
    books.unhold(keys)
    books.choose(8)


def clear_forgets_everything(make: MakePolicy) -> None:
    """Keys, and that they were held; requests go on after it."""
    books = Books(make(8))
    keys = new_keys(8)
    books.admit(keys[:6], held=True)
    books.hold(keys[6:])
    books.choose(3)
    books.clear()
    books.choose(3)
    books.end("r", keys)
    books.admit(keys, "s")
    books.choose(8)


def unknown_keys_are_ignored(make: MakePolicy) -> None:
    """The host reports keys that may be gone by now; none of that is an error."""
    books = Books(make(8))
    known, unknown = new_keys(4), new_keys(4, 100)
    for verb in (books.touch, books.unhold, books.forget, books.hold):
        verb(unknown)
        verb([])
    books.admit([])
    books.admit(known)
    for verb in (books.touch, books.unhold, books.forget):
        verb([*unknown, known[0]])
    books.policy.pass_time(1.0)
    books.choose(8)


def keys_may_be_held_before_they_are_resident(make: MakePolicy) -> None:
    """A tier holds the keys that it is about to store."""
    books = Books(make(8))
    keys = new_keys(8)
    books.hold(keys[:4])
    books.admit(keys)
    books.choose(8)
    books.unhold(keys[:4])
    books.choose(8)


def length_is_how_many_are_resident(make: MakePolicy) -> None:
    """Not the number of calls, and without remembered keys that were evicted."""
    books = Books(make(8))
    keys = new_keys(8)
    for _ in range(3):
        books.admit(keys[:4])
        books.admit(keys[2:], "s")
        books.touch(keys, "t")
        books.choose(5)
        books.forget(keys[:3])
    books.clear()


# --- requests ---


def requests_may_end_in_any_way(make: MakePolicy) -> None:
    """Unknown, twice, without an order, and with others' keys, unknown or repeated keys in it."""
    books = Books(make(16))
    keys = new_keys(16)
    for number, order in enumerate(
        (None, [], keys, keys[::-1], keys[:4] * 2, new_keys(4, 100), [*keys[8:], *keys[:8]])
    ):
        request = f"r{number}"
        books.end(request, order)
        books.admit(keys[number : number + 4], request)
        books.touch(keys, request)
        books.end(request, order)
        books.end(request, order)
        books.admit(keys[:2], request)
        books.choose(3)
    books.choose(16)


def an_ended_request_leaves_nothing_behind(make: MakePolicy) -> None:
    """Data kept for a request goes at its end, even if its blocks stay resident for ever."""
    policy = make(CAPACITY)
    keys = new_keys(CAPACITY)
    policy.admit(keys, "first", held=False)
    policy.end_request("first", keys)

    def one_more(number: int) -> None:
        request = f"request {number}"
        policy.touch(keys[: number % CAPACITY], request)
        policy.end_request(request, (None, keys[: number % CAPACITY], [])[number % 3])

    _expect_no_growth(policy, one_more, "requests that used resident blocks and ended")


def memory_is_bounded_by_the_capacity(make: MakePolicy) -> None:
    """Blocks come and go for ever; at most ``KEYS_KEPT_MAX`` of their keys are remembered."""
    policy = make(CAPACITY)
    came: set[Key] = set()

    def one_more(number: int) -> None:
        request = f"request {number}"
        keys = new_keys(4, 4 * number)
        came.update(keys)
        surplus = len(policy) + len(keys) - CAPACITY
        if surplus > 0:
            policy.choose_victims(surplus, frozenset(keys))
        policy.admit(keys, request, held=number % 3 == 0)
        if number % 3 == 0:
            policy.unhold(keys)
        if number % 5 == 0:
            policy.hold(keys)
            policy.forget(keys[:2])
            policy.unhold(keys)
        policy.touch(keys, f"reader {number}")
        policy.end_request(f"reader {number}", None)
        policy.end_request(request, keys)
        policy.pass_time(float(number))

    _expect_no_growth(policy, one_more, "blocks that came and went")
    kept = sum(each in came for each in _reachable(policy) if type(each) is bytes)
    most = KEYS_KEPT_MAX * CAPACITY
    expect(kept <= most, f"with {CAPACITY} blocks resident, {kept} keys are kept: over {most}")


def _expect_no_growth(policy: EvictionPolicy, step: Callable[[int], None], what: str) -> None:
    """Run steps; expect ten times as many of them to need no more memory. Dicts come in sizes."""
    few, many, samples = 500, 5_000, 10
    peaks = [0, 0]
    for number in range(1, many + 1):
        step(number)
        late = number > few
        if number % ((many if late else few) // samples) == 0:
            size = sum(map(sys.getsizeof, _reachable(policy)))
            peaks[late] = max(peaks[late], size)
    expect(
        peaks[1] <= 1.5 * peaks[0] + 4096,
        f"after {few} {what} the policy takes {peaks[0]} bytes, after {many} {peaks[1]}",
    )


def _reachable(root: object) -> Iterable[Any]:
    """Yield all objects that ``root`` leads to, except code."""
    seen: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type | type(sys)) or callable(each):
            continue
        seen.add(id(each))
        yield each
        waiting += gc.get_referents(each)
        # Structs that the garbage collector does not track have no referents.
        waiting += [getattr(each, name) for name in getattr(each, "__struct_fields__", ())]


# --- everything at once ---

_KEYS: Final = new_keys(10)


def books_are_kept_through_any_calls(make: MakePolicy) -> None:
    """Hypothesis looks for calls after which a promise is broken, and shortens them."""
    from hypothesis import given, settings  # noqa: PLC0415 - authors of policies have it

    @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True)
    @given(history=_histories())
    def play(history: list[tuple[Any, ...]]) -> None:
        books = Books(make(8))
        for verb, *arguments in history:
            _play(books, verb, arguments)
        books.unhold(_KEYS)
        books.choose(len(_KEYS))

    play()


def _histories() -> SearchStrategy[list[tuple[Any, ...]]]:
    from hypothesis import strategies as st  # noqa: PLC0415 - as above

    keys = st.lists(st.sampled_from(_KEYS), max_size=5, unique=True)
    requests = st.sampled_from(["r", "s", "t"])
    return st.lists(
        st.one_of(
            st.tuples(st.just("admit"), keys, requests, st.booleans()),
            st.tuples(st.sampled_from(["touch", "end"]), keys, requests),
            st.tuples(st.sampled_from(["hold", "unhold", "forget"]), keys),
            st.tuples(st.just("end_somehow"), requests),
            st.tuples(st.just("choose"), st.integers(0, 6), keys),
            st.tuples(st.just("choose_and_restore"), st.integers(0, 6), st.integers(0, 2)),
            st.tuples(st.just("clear")),
        ),
        max_size=40,
    )


def _play(books: Books, verb: str, arguments: list[Any]) -> None:
    if verb == "admit":
        keys, request, held = arguments
        books.admit(keys, request, held=held)
    elif verb == "end":
        keys, request = arguments
        books.end(request, keys)
    elif verb == "end_somehow":
        books.end(*arguments)
    elif verb == "choose_and_restore":
        count, first = arguments
        books.restore(books.choose(count)[first:])
    else:
        getattr(books, verb)(*arguments)


POLICY_CHECKS: Final[tuple[PolicyCheck, ...]] = (
    held_keys_are_never_chosen,
    excluded_keys_are_never_chosen,
    no_key_is_chosen_twice,
    as_many_victims_as_asked_for_if_there_are,
    what_was_chosen_is_forgotten,
    what_is_restored_goes_next,
    another_may_go_instead,
    what_is_forgotten_is_gone,
    clear_forgets_everything,
    unknown_keys_are_ignored,
    keys_may_be_held_before_they_are_resident,
    length_is_how_many_are_resident,
    requests_may_end_in_any_way,
    an_ended_request_leaves_nothing_behind,
    memory_is_bounded_by_the_capacity,
    books_are_kept_through_any_calls,
)
"""The checks that every eviction policy must pass."""
