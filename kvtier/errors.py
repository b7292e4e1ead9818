"""Defines kvtier's exceptions, sorted by whose fault they are.

``Misuse`` is the caller's, ``StoreFault`` the medium's, ``InternalError`` ours.
A miss is none of them: it is a value.
"""

from __future__ import annotations


class KVTierError(Exception):
    """Root of every exception that kvtier raises on purpose."""


class Misuse(KVTierError):
    """Raised when *you* called something that the documentation rules out. Fix the call."""


class ConfigError(Misuse, ValueError):
    """Raised at start for a bad setting. The text names key, value and remedy."""

    key: str | None = None  #: the key at fault, if any
    misspelt: str | None = None  #: an unknown key that was meant to be it, if it is missing


class StorageUnusable(ConfigError):
    """Raised at start when storage that a setting names is unusable: it hangs, fails or is missing.

    The setting may be right. Fix the storage, or let the engine start without it.
    """


class Closed(Misuse):
    """Raised when *you* use a runtime after closing it. Open a new one."""


class StoreFault(KVTierError):
    """Raised by a backend when its medium fails. The job fails; the engine does not notice."""


class NamespaceMismatch(ConfigError):
    """Raised at start when a folder holds blocks of another model, layout or format."""


class InternalError(KVTierError):
    """Raised when kvtier broke its own rules. Please report it with the log."""
