"""What is said of a tier whose storage can't be used while the engine starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.errors import StorageUnusable

if TYPE_CHECKING:
    from kvtier.config import TierConfig


def hangs(tier: TierConfig) -> StorageUnusable:
    """Return the refusal of a tier whose storage doesn't answer."""
    places = [
        f" {key}={value!r}"
        for key, value in tier.options.items()
        if isinstance(value, str) and "/" in value and "://" not in value
    ]
    return StorageUnusable(
        f"secondary tier {tier.name}:{','.join(places)} has not answered for "
        f"start_timeout_s={tier.start_timeout_s:g} s: its storage hangs, or is very slow. "
        "Mend the storage, name another, or raise start_timeout_s."
    )


def with_the_way_out(trouble: StorageUnusable) -> StorageUnusable:
    """Return the refusal, with what the user may choose instead."""
    return StorageUnusable(
        f"{trouble} Or set on_unusable='start_without' for this tier: the engine then starts "
        "without it, and takes it up as soon as it can be used."
    )
