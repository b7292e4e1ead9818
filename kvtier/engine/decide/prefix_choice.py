"""Decides where to cut a prefix of several KV-cache groups, as ``load_decision.py`` does of one.

A prefix of ``n`` tokens needs blocks of all groups up to token ``n``: with full attention every
block, with a window the last ones. Cuts are tried where a group's blocks change from one place to
another, and at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.engine.decide.load_decision import FREE, NOWHERE, Cut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.core.group_messages import GroupKeys
    from kvtier.engine.decide.load_decision import Estimates
    from kvtier.plugin_api.keys import Key

CUTS_MAX: Final = 16
"""Limit on cuts that are tried; of more, the last ones."""


def best_prefix(
    groups: Sequence[GroupKeys],
    tokens: int,
    where: Callable[[Key], int],
    first_token: int,
    estimates: Estimates,
) -> Cut:
    """Return the best cut of a prefix of ``tokens``; its ``keys`` count tokens, 0 for none.

    ``where``: the tier that has a block, or ``FREE``. ``first_token``: the GPU has those before.
    """
    rates = estimates.rates
    ends = [first_token]
    loads: list[tuple[float, dict[int, int]]] = [(0.0, {})]
    for end in (*_changes(groups, tokens, where)[-CUTS_MAX:], tokens):
        load = _load(groups, end, where, estimates)
        if load is not None:
            ends.append(end)
            loads.append(load)
    seconds = [
        estimates.seconds(load_s, rates.seconds(end, tokens))
        for end, (load_s, _) in zip(ends, loads, strict=True)
    ]
    best = min(range(len(ends)), key=lambda number: (seconds[number], -number))
    load_s, counts = loads[best]
    return Cut(
        ends[best] if best else 0,
        tuple(counts.items()),
        load_s,
        rates.seconds(first_token, ends[best]),
        sum(loads[-1][1].values()),
        loads[-1][0],
        rates.seconds(first_token, tokens),
    )


def _changes(groups: Sequence[GroupKeys], tokens: int, where: Callable[[Key], int]) -> list[int]:
    """Return the tokens before which the blocks of a group without a window change place."""
    found: set[int] = set()
    for group in groups:
        if group.window is None:
            places = [where(key) for key in group.keys]
            found.update(
                end
                for end, here, there in zip(group.ends, places, places[1:], strict=False)
                if here != there and end < tokens
            )
    return sorted(found)


def _load(
    groups: Sequence[GroupKeys],
    tokens: int,
    where: Callable[[Key], int],
    estimates: Estimates,
) -> tuple[float, dict[int, int]] | None:
    """Return the seconds to load a prefix, and how many blocks of it are in each tier.

    None: a block that it needs is nowhere.
    """
    counts: dict[int, int] = {}
    for group in groups:
        needed = group.needed(tokens)
        if needed is None:
            return None
        for key in needed:
            tier = where(key)
            if tier == NOWHERE:
                return None
            if tier != FREE:
                counts[tier] = counts.get(tier, 0) + 1
    return estimates.load_s(counts), counts
