"""The ``mooncake`` backend: blocks in the memory of a Mooncake store, which engines share."""

from kvtier_backends.mooncake.backend import MooncakeBackend as MooncakeBackend

__all__ = ["MooncakeBackend"]
