"""Runs the bucket of the manifest ``s3``, on a server that refuses requests without its keys."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from stress.children import start_part

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SERVER: Final = "tests.support.s3_rights"  #: its bucket has the name that the manifest has


class BucketAccess(NamedTuple):
    """Where a bucket is, and what an engine needs to use it."""

    endpoint: str
    files: dict[str, str]  #: texts of the files that its Secrets are made of, by name


NONE: Final = BucketAccess("", {})  #: of a scenario without a bucket


@contextmanager
def bucket_for(scenario: str, folder: Path) -> Iterator[BucketAccess]:
    """Run the scenario's bucket, if it has one, until the end of the block."""
    if scenario != "s3":
        yield NONE
        return
    with start_part(_SERVER, {"server": "moto", "folder": str(folder)}) as server:
        given = server.answer()
        lines = (
            "[default]",
            f"aws_access_key_id = {given['access']}",
            f"aws_secret_access_key = {given['secret']}",
        )
        yield BucketAccess(given["endpoint"], {"credentials": "\n".join(lines) + "\n"})
