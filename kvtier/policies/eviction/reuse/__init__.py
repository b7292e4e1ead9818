"""The ``reuse`` policy."""
