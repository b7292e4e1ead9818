"""What the tests of ARC, LRU-2 and S3-FIFO share: stories in letters, and the play beside a model.

In a story each letter is a block, and a word is a prompt from its head to its tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hypothesis import strategies as st

if TYPE_CHECKING:
    from typing import TypeAlias

    from kvtier.policies.eviction.arc import ARCPolicy
    from kvtier.policies.eviction.lru2 import LRU2Policy
    from kvtier.policies.eviction.s3fifo import S3FIFOPolicy

    Policy: TypeAlias = ARCPolicy | LRU2Policy | S3FIFOPolicy

HELD_EVERY = 5
"""One request in so many may hold its blocks: what models hold, they never release."""


def keys_of(text: str) -> list[bytes]:
    """Return the keys of these letters."""
    return [letter.encode() for letter in text]


def admit(policy: Policy, text: str, request: str) -> None:
    """Bring the blocks of these letters in."""
    policy.admit(keys_of(text), request, held=False)


def victims(policy: Policy, count: int) -> str:
    """Have it choose, and return the letters of what it chose."""
    return b"".join(policy.choose_victims(count, frozenset())).decode()


class SlowModel(Protocol):
    """A policy in the most obvious way. Requests come one after the other; held is for good."""

    def resident(self) -> list[bytes]:
        """Return what is there."""
        ...

    def request(self, order: list[bytes], *, held: bool) -> None:
        """Use the blocks that are there, bring the others in, and end."""
        ...

    def choose_victims(self, count: int, exclude: list[bytes]) -> list[bytes]:
        """Release up to ``count`` blocks, neither held nor in ``exclude``."""
        ...


@dataclass(frozen=True)
class Visit:
    """One request, and then the room that must be made."""

    order: list[bytes]  #: the request's keys, from head to tail
    may_hold: bool
    count: int  #: of victims
    exclude: list[bytes]


def histories(blocks: int) -> st.SearchStrategy[list[Visit]]:
    """Return lists of visits that have so many different blocks among them."""
    numbers = st.integers(0, blocks - 1)
    keys = st.lists(numbers.map(lambda number: b"%d" % number), unique=True, max_size=6)
    return st.lists(
        st.builds(Visit, keys, st.booleans(), st.integers(0, 5), keys),
        max_size=40,
    )


def play(policy: Policy, model: SlowModel, number: int, visit: Visit) -> None:
    """Play the visit with this number on both, and insist that they release the same."""
    request, held = f"r{number}", visit.may_hold and number % HELD_EVERY == 0
    new = [key for key in visit.order if key not in policy]
    policy.touch([key for key in visit.order if key in policy], request)
    policy.admit(new, request, held=held)
    policy.end_request(request, visit.order)
    model.request(visit.order, held=held)
    chosen = policy.choose_victims(visit.count, visit.exclude)
    expected = model.choose_victims(visit.count, visit.exclude)
    assert chosen == expected, f"visit {number}: {chosen}, the model {expected}"
    assert len(policy) == len(model.resident()), f"visit {number}"
