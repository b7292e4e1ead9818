"""The ``disk`` backend: a bounded, checked, restartable cache on a local disk."""

from kvtier_backends.disk.backend import DiskBackend as DiskBackend

__all__ = ["DiskBackend"]
