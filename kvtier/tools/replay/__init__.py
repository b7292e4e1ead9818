"""Plays recorded requests: through the real runtime, or through eviction policies alone."""
