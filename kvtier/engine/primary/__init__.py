"""The primary tier's actor, and its parts."""
