"""The ``redis`` backend: blocks in the memory of Redis or Valkey servers."""

from kvtier_backends.redis.backend import RedisBackend as RedisBackend

__all__ = ["RedisBackend"]
