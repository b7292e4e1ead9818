"""The model: what it writes for a token is a digest of all that the token's KV depends on.

That is every token up to this one, the weights, and the request's adapter and salt. So KV of
another prefix, of other weights, of another layer or of another place in a block
is a wrong number, and so is what was never written.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

VOCABULARY = 6  #: few tokens: prompts that were drawn apart share prefixes all the same
_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15


class Asked(NamedTuple):
    """What else a request was asked with: KV depends on all but ``sample``."""

    salt: str = ""
    adapter: int = 0  #: of LoRA; 0: none
    sample: int = 0  #: which of several of one prompt


class Prefix:
    """The digests of one sequence of tokens, one a token. It grows."""

    def __init__(self, tokens: list[int], weights: int, asked: Asked) -> None:
        self.tokens = tokens
        self._digests: list[int] = []
        salt = int.from_bytes(asked.salt.encode(), "big")
        self._seed = _mixed((weights * 1_009 + asked.adapter) * 1_000_003 + salt + 1)
        self._sample = asked.sample

    def digests(self, end: int) -> NDArray[np.uint64]:
        """Return the digests of the first ``end`` tokens."""
        assert end <= len(self.tokens), "a token that nobody has sampled yet"
        for number in range(len(self._digests), end):
            last = self._digests[-1] if number else self._seed
            self._digests.append(_mixed(last ^ (self.tokens[number] + 1)))
        return np.array(self._digests[:end], dtype=np.uint64)

    def drafted(self, drafts: list[int]) -> Prefix:
        """Return the sequence with these tokens behind it, which may turn out wrong."""
        self.digests(len(self.tokens))
        longer = copy.copy(self)
        longer.tokens, longer._digests = [*self.tokens, *drafts], [*self._digests]
        return longer

    def next_token(self) -> int:
        """Sample what follows."""
        return (int(self.digests(len(self.tokens))[-1]) >> 8 * self._sample) % VOCABULARY

    def sample(self, drafts: list[int]) -> list[int]:
        """Append what follows and return it: the drafts as far as they are right, and one more."""
        sampled: list[int] = []
        for draft in (*drafts, None):
            sampled.append(self.next_token())
            self.tokens.append(sampled[-1])
            if sampled[-1] != draft:
                break
        return sampled

    def propose(self, count: int) -> list[int]:
        """Draft what may follow: each token is right three times in four."""
        guessed = self.drafted([])
        for _ in range(count):
            is_right = guessed.digests(len(guessed.tokens))[-1] & np.uint64(3 << 40)
            guessed.tokens.append((guessed.next_token() + (not is_right)) % VOCABULARY)
        return guessed.tokens[len(self.tokens) :]


def written(digests: NDArray[np.uint64], salts: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return what a layer writes for tokens of these digests. ``salts``: the layer's own.

    A row of ``len(salts)`` words for each token, no two of them the same.
    """
    words = (digests[:, None] ^ salts[None, :]) * np.uint64(_ODD)
    return words ^ (words >> np.uint64(29))


def salts_of(layer: str, first: int, count: int) -> NDArray[np.uint64]:
    """Return the salts of a layer's words, from the word ``first`` of all ranks' words on."""
    seed = int.from_bytes(layer.encode()[-6:], "big") << 12
    return np.array([_mixed(seed + first + n) for n in range(count)], dtype=np.uint64)


def _mixed(value: int) -> int:
    """Mix 64 bits well (SplitMix64)."""
    value = (value * _ODD + 1) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
