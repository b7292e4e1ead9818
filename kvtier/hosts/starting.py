"""Reports at the start whether a tier can be used, or why not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kvtier.core import wire
from kvtier.errors import StorageUnusable
from kvtier.plugin_api.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.core.actor import Mailbox
    from kvtier.hosts.life import Life
    from kvtier.plugin_api.backend import BackendTraits, Isolation
    from kvtier.settings.runtime_config import TierConfig


REMEDY: Final = (
    "kvtier restarts the tier by itself. If the reason names its storage or memory, fix that; "
    "otherwise report this log"
)


class Opening:
    """Logs that a tier can be used, at the start and at each return, or that it can't.

    The link is notified of the start too. Its owner lets one thread at a time call it.
    """

    def __init__(self, name: str, isolation: Isolation, link: Mailbox) -> None:
        self._began_s = time.monotonic()  # when the tier was begun, or broke
        self._name = name
        self._isolation = isolation
        self._link = link
        self.is_open = False
        self._was_away = False
        self._lost_blocks: Callable[[], Mapping[str, int]] = dict  # since the tier last worked

    def report_losses_by(self, lost_blocks: Callable[[], Mapping[str, int]]) -> None:
        """Set what counts the lost blocks, for the line that the tier is back."""
        self._lost_blocks = lost_blocks

    def begin_away(self, reason: str | None, life: Life, retry_s: float) -> None:
        """Report, at the start, that the tier can't be used yet. Nothing of it runs."""
        reason = reason or "it has no backend"
        self.broke(reason, retry_s, is_news=True)
        life.begin_away(reason)
        self._link.post(wire.TierBroke(reason=reason))
        self._link.post(wire.TierFenced())

    def broke(self, reason: str, retry_s: float, *, is_news: bool) -> None:
        """Log that the tier can't be used, or, if the reason is new, why it still can't.

        ``retry_s``: the pause before it is tried again, once nothing of it runs.
        """
        event = "tier is still disabled"
        if self.is_open or not self._was_away:
            self.is_open, self._was_away = False, True
            self._began_s = time.monotonic()
            event = "tier disabled"
        if is_news:
            log.error(event, tier=self._name, reason=reason, retry_s=retry_s, remedy=REMEDY)

    def opened(
        self, place: str | None, traits: BackendTraits | None, gauges: Mapping[str, int]
    ) -> None:
        """Log that the tier is open, with its place, its backend's contents and the duration.

        ``gauges``: the backend's. Does nothing
        if it has been logged since the tier last broke.
        """
        if self.is_open:
            return
        self.is_open = True
        fields: dict[str, object] = {"tier": self._name, "isolation": self._isolation}
        if place is not None:
            fields["place"] = place
        if traits is not None and traits.capacity_blocks is not None:
            fields["capacity_blocks"] = traits.capacity_blocks
        fields.update(gauges, seconds=round(time.monotonic() - self._began_s, 3))
        if self._was_away:
            log.info("tier is back", **fields, **self._lost_blocks())
        else:
            log.info("tier is open", **fields)
            self._link.post(wire.TierOpened())


def hangs(tier: TierConfig) -> StorageUnusable:
    """Return the refusal of a tier whose storage doesn't respond."""
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
    """Return the refusal, with the user's alternative."""
    return StorageUnusable(
        f"{trouble} Or set on_unusable='skip' for this tier: the engine then starts "
        "with the tier disabled, and enables it as soon as its storage can be used."
    )
