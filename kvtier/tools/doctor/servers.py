"""Rules of a tier's servers: whether they respond, and the namespaces stored there.

Nothing is written there; ``kvtier check --connect`` tries a tier's other operations.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError, StoreFault
from kvtier.plugin_api.threads import BoundedCall
from kvtier.settings.plugins import offline_classes
from kvtier.tools.checking.rules import TRIAL_FAILED
from kvtier.tools.doctor.namespaces import namespaces_apart
from kvtier_backends.shared.server_storage import ServerStorage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvtier.settings.runtime_config import TierConfig
    from kvtier.tools.checking.findings import Findings

REMEDY: Final = (
    "Start the server, let this host reach it, or name another; kvtier check --connect tries all "
    "that the tier does there."
)


def look_at_servers(tiers: Sequence[TierConfig], wait_s: float, findings: Findings) -> None:
    """Check the servers of all tiers at once, and note the faults of each."""
    classes = offline_classes()
    looks = [
        _Look(tier, found, findings)
        for tier in tiers
        if (found := classes.get(tier.type)) and issubclass(found, ServerStorage)
    ]
    ends_at = time.monotonic() + wait_s
    for look in looks:
        look.note_result(max(0.0, ends_at - time.monotonic()), wait_s)


class _Look:
    """Check of one tier's servers, in a thread that may hang as they do."""

    def __init__(self, tier: TierConfig, offline: type[ServerStorage], findings: Findings) -> None:
        self._where = f"secondary tier {tier.name}"
        self._findings = findings
        self._has_answered = False
        self._place = ""
        call = partial(self._describe, tier, offline)
        self._running = BoundedCall(call, f"kvtier-{tier.name}-doctor")

    def _describe(
        self, tier: TierConfig, offline: type[ServerStorage]
    ) -> Mapping[str, Mapping[str, Any]]:
        try:
            storage = offline.from_options(tier.options)
        except ConfigError:  # refused already
            return {}
        self._place = storage.place
        return storage.describe(self._progress)

    @contextmanager
    def _progress(self, label: str, total: int | None) -> Iterator[_Look]:  # noqa: ARG002 - shown nowhere
        yield self

    def advance(self, count: int = 1) -> None:  # noqa: ARG002 - that there is one is enough
        """See ``Progress.advance``: any progress shows that the server responds."""
        self._has_answered = True

    def note_result(self, left_s: float, wait_s: float) -> None:
        """Note the faults, once the check is over, or has taken ``wait_s``."""
        unknown = f"which namespaces {self._where.removeprefix('secondary ')} has"
        if not self._running.wait(left_s):
            if self._has_answered:
                self._findings.not_checked.append(f"{unknown}: {self._place} has too many names")
            else:
                self._fail(f"it has not answered for {wait_s:g} s")
            return
        try:
            found = self._running.result()
        except ConfigError as refused:
            self._findings.not_checked.append(f"{unknown} ({refused})")
        except (StoreFault, OSError) as problem:
            self._fail(str(problem).rstrip("."))
        else:
            in_order = [found[name] for name in sorted(found)]
            self._findings.extend(namespaces_apart(self._place, in_order), self._where)

    def _fail(self, why: str) -> None:
        about = f"{self._place}: " if self._place else ""
        self._findings.add(TRIAL_FAILED, f"{self._where}: {about}{why}.", REMEDY)
