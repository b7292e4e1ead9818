from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier.policies.lru import LRUPolicy

KEYS = [bytes([code]) for code in b"abcdefgh"]
REQUESTS = ["r1", "r2", "r3"]


class SlowLRU:
    """The same in the most obvious way: a list of (request, keys), the oldest first."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, list[bytes]]] = []
        self.held: set[bytes] = set()

    def _use(self, keys: list[bytes], request: str, *, admit: bool) -> None:
        known = {key for _, run in self.runs for key in run}
        mine = next((run for who, run in self.runs if who == request), [])
        new = [key for key in keys if (admit or key in known) and key not in mine]
        self.runs = [(who, [k for k in run if k not in new]) for who, run in self.runs]
        self.runs = [each for each in self.runs if each[0] != request]
        self.runs.append((request, mine + list(dict.fromkeys(new))))
        self._drop_empty()

    def _drop_empty(self) -> None:
        self.runs = [each for each in self.runs if each[1]]

    def admit(self, keys: list[bytes], request: str, *, held: bool) -> None:
        self._use(keys, request, admit=True)
        if held:
            self.held |= set(keys)

    def touch(self, keys: list[bytes], request: str) -> None:
        self._use(keys, request, admit=False)

    def forget(self, keys: list[bytes]) -> None:
        self.runs = [(who, [k for k in run if k not in keys]) for who, run in self.runs]
        self._drop_empty()
        self.held -= set(keys)

    def end_request(self, request: str, order: list[bytes] | None) -> None:
        for who, run in list(self.runs):
            if who == request:
                self.runs.remove((who, run))
                if order is not None:
                    last = [key for key in order if key in run]
                    run = [key for key in run if key not in last] + last  # noqa: PLW2901
                self.runs.append((who, run))

    def choose_victims(self, count: int, spare: set[bytes]) -> list[bytes]:
        order = [key for _, run in self.runs for key in reversed(run)]
        victims = [key for key in order if key not in self.held and key not in spare][:count]
        self.runs = [(who, [k for k in run if k not in victims]) for who, run in self.runs]
        self._drop_empty()
        return victims


keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)
requests = st.sampled_from(REQUESTS)
calls = st.one_of(
    st.tuples(st.just("admit"), keys, requests, st.booleans()),
    st.tuples(st.just("touch"), keys, requests),
    st.tuples(st.just("hold"), keys),
    st.tuples(st.just("unhold"), keys),
    st.tuples(st.just("forget"), keys),
    st.tuples(st.just("end_request"), requests, st.none() | keys),
    st.tuples(st.just("choose_victims"), st.integers(0, 4), st.sets(st.sampled_from(KEYS))),
)


@given(st.lists(calls, max_size=40))
def test_it_agrees_with_a_slow_obvious_model(history: list[tuple]) -> None:
    policy, model = LRUPolicy(8), SlowLRU()
    for name, *arguments in history:
        if name == "admit":
            admitted, request, held = arguments
            policy.admit(admitted, request, held=held)
            model.admit(admitted, request, held=held)
        elif name == "hold":
            policy.hold(*arguments)
            model.held |= set(arguments[0])
        elif name == "unhold":
            policy.unhold(*arguments)
            model.held -= set(arguments[0])
        else:
            said = getattr(policy, name)(*arguments)
            assert said == getattr(model, name)(*arguments)
        assert len(policy) == sum(len(run) for _, run in model.runs)


@given(st.lists(calls, max_size=30))
def test_what_is_held_is_never_chosen(history: list[tuple]) -> None:
    policy = LRUPolicy(8)
    held: set[bytes] = set()
    for name, *arguments in history:
        if name == "admit":
            policy.admit(arguments[0], arguments[1], held=arguments[2])
            held |= set(arguments[0]) if arguments[2] else set()
            continue
        said = getattr(policy, name)(*arguments)
        if name == "hold":
            held |= set(arguments[0])
        elif name in {"unhold", "forget"}:
            held -= set(arguments[0])
        elif name == "choose_victims":
            assert not held & set(said)
            assert not arguments[1] & set(said)


def test_tails_go_before_heads_and_old_requests_before_new_ones() -> None:
    policy = LRUPolicy(6)
    policy.admit(KEYS[:3], "old", held=False)
    policy.admit(KEYS[3:6], "new", held=False)
    assert policy.choose_victims(4, set()) == [KEYS[2], KEYS[1], KEYS[0], KEYS[5]]


def test_a_shared_prefix_belongs_to_the_request_that_used_it_last() -> None:
    policy = LRUPolicy(6)
    policy.admit(KEYS[:3], "first", held=False)
    policy.touch(KEYS[:2], "second")
    policy.admit(KEYS[3:4], "second", held=False)
    assert policy.choose_victims(9, set()) == [KEYS[2], KEYS[3], KEYS[1], KEYS[0]]


def test_what_is_taken_back_is_the_next_to_go_in_the_same_order() -> None:
    policy = LRUPolicy(6)
    policy.admit(KEYS[:4], "r", held=False)
    chosen = policy.choose_victims(2, set())
    policy.take_back(chosen)
    assert policy.choose_victims(3, set()) == [*chosen, KEYS[1]]


def test_what_was_admitted_again_is_not_taken_back() -> None:
    policy = LRUPolicy(6)
    policy.admit(KEYS[:1], "r", held=False)
    chosen = policy.choose_victims(1, set())
    policy.admit(chosen, "new", held=False)
    policy.take_back(chosen)
    assert len(policy) == 1
    assert policy.choose_victims(2, set()) == chosen
    assert policy.choose_victims(2, set()) == []


def test_after_clear_nothing_is_known_or_held() -> None:
    policy = LRUPolicy(6)
    policy.admit(KEYS[:2], "r", held=True)
    policy.clear()
    assert len(policy) == 0
    policy.admit(KEYS[:1], "r", held=False)
    assert policy.choose_victims(2, set()) == KEYS[:1]
