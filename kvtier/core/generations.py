"""Tracks generations: the weights that a block of KV data belongs to, and its mark in tiers.

KV data is only valid with the weights that it was computed with. An engine
begins in generation 0: the weights that it has loaded. A
reset of the whole connector signals that the weights may have changed,
and begins a new generation. Nothing of an older one is served again.

To a backend a generation is a *mark* in each key, just before the index of
the KV-cache group. So it works for every backend, and for data that others keep on
the same storage:

- generation 0 has no mark: every engine with the same weights finds it;
- a generation without a name has a random mark, which is never generated again: no
  other engine, and none after a restart, can find its blocks;
- a named one (``weights_version``) has a mark derived from the name: engines and
  restarts that give the same name share its blocks.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Final

from kvtier.errors import Misuse
from kvtier.plugin_api.keys import GROUP_BYTES, MARK_BYTES, UNNAMED_MARK, mark_start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvtier.plugin_api.keys import Key

ORIGINAL: Final = b""
"""The mark of generation 0."""

_ID_BYTES: Final = 16
_NAMED: Final = b"\xffkvtier="
assert len(_NAMED) + _ID_BYTES == len(UNNAMED_MARK) + _ID_BYTES == MARK_BYTES


def mark_of_name(name: str) -> bytes:
    """Return the mark of the generation with that name; b"" for the empty one."""
    if not name:
        return ORIGINAL
    named = name.encode("utf-8", "surrogatepass")
    return _NAMED + hashlib.blake2b(named, digest_size=_ID_BYTES).digest()


def is_found_again(mark: bytes) -> bool:
    """Return whether a later engine may be in that generation: it has a name, or is the first."""
    return not mark.startswith(UNNAMED_MARK)


def marked(keys: tuple[Key, ...], mark: bytes) -> tuple[Key, ...]:
    """Return the backend's form of these keys in the generation with that mark."""
    if not mark:
        return keys
    return tuple(key[:-GROUP_BYTES] + mark + key[-GROUP_BYTES:] for key in keys)


def unmarked(keys: Iterable[Key], mark: bytes) -> tuple[Key, ...]:
    """Return the engine's form of a backend's keys, which must all have that mark."""
    if not mark:
        return tuple(keys)
    return tuple(key[: mark_start(key)] + key[mark_start(key) + MARK_BYTES :] for key in keys)


def mark_of(key: Key) -> bytes:
    """Return the mark of a backend's key."""
    start = mark_start(key)
    if len(key) > MARK_BYTES and key.startswith((UNNAMED_MARK, _NAMED), start):
        return key[start : start + MARK_BYTES]
    return ORIGINAL


class Generations:
    """Makes the mark for each reset, and holds that of this engine's generation."""

    def __init__(
        self,
        weights_version: str = "",
        *,
        keep: bool = False,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """``keep``: a reset without a name keeps the generation, unless the weights changed."""
        self.mark = mark_of_name(weights_version)
        self._keep = keep
        self._random_bytes = random_bytes

    def begin(self, weights_version: str | None, *, has_changed: bool = False) -> bytes | None:
        """Return the mark of the generation that a reset begins; None if it begins none.

        ``has_changed``: the weights are known to have changed, whatever a reset usually means.
        """
        if weights_version == "":
            raise Misuse(
                "reset with weights_version='': a name has at least one character. Name the "
                "weights, or leave the argument out for weights that only this engine has."
            )
        if weights_version is not None:
            mark = mark_of_name(weights_version)
        elif self._keep and not has_changed:
            return None
        else:
            mark = UNNAMED_MARK + self._random_bytes(_ID_BYTES)
        if mark == self.mark:
            return None
        self.mark = mark
        return mark
