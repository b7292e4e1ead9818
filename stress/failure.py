"""What a soak run ends with if a promise was broken."""

from __future__ import annotations


class Failure(Exception):
    """A promise was broken."""
