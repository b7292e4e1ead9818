"""How much every container has that kvtier keeps below an object: what only grows shows there."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any


def container_sizes(*roots: object) -> dict[str, int]:
    """Return the sizes of all containers, added up by the class and the attribute that has them.

    It walks the attributes of kvtier's own objects, and what is in containers.
    """
    sizes: Counter[str] = Counter()
    seen: set[int] = set()
    left: list[tuple[str, Any]] = [(type(root).__name__, root) for root in roots]
    while left:
        name, found = left.pop()
        if id(found) in seen:
            continue
        if isinstance(found, dict | list | tuple | set | frozenset | deque):
            seen.add(id(found))
            sizes[name] += len(found)
            parts = [*found, *found.values()] if isinstance(found, dict) else list(found)
            left += [(f"{name}[]", part) for part in parts if not isinstance(part, str | bytes)]
        if type(found).__module__.startswith(("kvtier", "tests.support.cell")):
            seen.add(id(found))
            left += [
                (f"{type(found).__name__}.{each}", getattr(found, each)) for each in _of(found)
            ]
    return dict(sizes)


def grown(before: dict[str, int], after: dict[str, int], by: int) -> dict[str, tuple[int, int]]:
    """Return which containers have at least ``by`` more than before, with both sizes."""
    return {
        name: (before.get(name, 0), size)
        for name, size in sorted(after.items())
        if size >= before.get(name, 0) + by
    }


def _of(found: object) -> list[str]:
    names = list(getattr(found, "__dict__", ()))
    for each in type(found).__mro__:
        slots = getattr(each, "__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if hasattr(found, name)]
