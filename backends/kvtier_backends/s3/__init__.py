"""The ``s3`` backend: one object per block, in S3, GCS, Azure, or a server that speaks S3."""

from kvtier_backends.s3.backend import S3Backend as S3Backend

__all__ = ["S3Backend"]
