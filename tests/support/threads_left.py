"""Which threads a test has to see the end of."""

from __future__ import annotations

import threading

from kvtier.hosts.spawning import THREAD_NAME


def ending_threads() -> set[threading.Thread]:
    """Return all threads that run now, but the one that lives as long as its process."""
    return {each for each in threading.enumerate() if each.name != THREAD_NAME}
