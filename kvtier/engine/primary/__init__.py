"""The primary tier's actor, and what it is made of."""
