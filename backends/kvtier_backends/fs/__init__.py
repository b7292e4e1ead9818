"""The ``fs`` backend: one file per block, in a folder that engines may share."""

from kvtier_backends.fs.backend import FsBackend as FsBackend

__all__ = ["FsBackend"]
