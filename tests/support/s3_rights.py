"""Buckets that take back rights and keys: moto's, Ceph's, and one that misbehaves."""

from __future__ import annotations

import json
import secrets
import sys
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from tests.support.ceph_server import ceph_server
from tests.support.patience import PATIENCE_S
from tests.support.s3_fault_server import Fault, FaultServer, fault_server
from tests.support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, client_for, moto_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.ceph_server import CephServer
    from tests.support.s3_server import MotoServer

_NO_PUTS: Final = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Deny",
            "Principal": "*",
            "Action": "s3:PutObject",
            "Resource": f"arn:aws:s3:::{BUCKET}/*",
        }
    ],
}
_ALL: Final = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}],
}
_USER: Final = "engines"


class Keys(NamedTuple):
    """What a user signs with."""

    access: str
    secret: str


class Bucket(Protocol):
    """A bucket, and one user's rights in it."""

    endpoint: str
    keys: Keys  #: those that work, or were the last to

    def refuse_writes(self) -> None:
        """Have it refuse to take objects."""

    def take_writes(self) -> None:
        """Have it take objects again."""

    def end_keys(self) -> None:
        """Have it refuse the keys for good."""

    def renew_keys(self) -> None:
        """Give the user other keys."""


class _Misbehaving:
    """Forgets who may write: nobody may. It ends keys as tokens end."""

    def __init__(self, server: FaultServer, endpoint: str) -> None:
        self._server = server
        self.endpoint = endpoint
        self.keys = Keys("one", "secret")

    def refuse_writes(self) -> None:
        self._server.misbehave(Fault.DENIED, "PUT")

    def take_writes(self) -> None:
        self._server.behave()

    def end_keys(self) -> None:
        self._server.expired.add(self.keys.access)

    def renew_keys(self) -> None:
        self.keys = Keys("two", "secret")


class _WithPolicy:
    """Has a policy of the bucket; the user is its owner."""

    def __init__(self, endpoint: str, keys: Keys) -> None:
        self.endpoint = endpoint
        self.keys = keys

    def refuse_writes(self) -> None:
        self._client().put_bucket_policy(Bucket=BUCKET, Policy=json.dumps(_NO_PUTS))

    def take_writes(self) -> None:
        self._client().delete_bucket_policy(Bucket=BUCKET)

    def _client(self) -> Any:
        return client_for(self.endpoint, *self.keys)


class _Moto(_WithPolicy):
    """Asks for signatures, once it has an administrator and the user."""

    def __init__(self, server: MotoServer) -> None:
        self._users = self._users_of(server.endpoint, Keys(ACCESS_KEY, SECRET_KEY))
        administrator = self._new_user("administrator")
        super().__init__(server.endpoint, self._new_user(_USER))
        self._ask_for_signatures()
        self._users = self._users_of(server.endpoint, administrator)

    def end_keys(self) -> None:
        self._users.delete_access_key(UserName=_USER, AccessKeyId=self.keys.access)

    def renew_keys(self) -> None:
        self.keys = self._new_keys(_USER)

    def _new_user(self, name: str) -> Keys:
        self._users.create_user(UserName=name)
        policy = json.dumps(_ALL)
        self._users.put_user_policy(UserName=name, PolicyName="all", PolicyDocument=policy)
        return self._new_keys(name)

    def _new_keys(self, name: str) -> Keys:
        made = self._users.create_access_key(UserName=name)["AccessKey"]
        return Keys(made["AccessKeyId"], made["SecretAccessKey"])

    def _ask_for_signatures(self) -> None:
        connection = HTTPConnection(urlsplit(self.endpoint).netloc, timeout=PATIENCE_S)
        connection.request("POST", "/moto-api/reset-auth", "0")  # none goes without from now on
        assert connection.getresponse().status == 200
        connection.close()

    @staticmethod
    def _users_of(endpoint: str, keys: Keys) -> Any:
        return client_for(endpoint, *keys, service="iam")


class _Ceph(_WithPolicy):
    """A whole Ceph."""

    def __init__(self, server: CephServer) -> None:
        super().__init__(server.endpoint, Keys(ACCESS_KEY, SECRET_KEY))
        self._server = server

    def end_keys(self) -> None:
        self._server.end_key(self.keys.access)

    def renew_keys(self) -> None:
        self.keys = Keys(f"key-{secrets.token_hex(4)}", secrets.token_hex(16))
        self._server.give_key(*self.keys)


SERVERS: Final = ("misbehaving", "moto", "ceph")


@contextmanager
def bucket_on(server: str, folder: Path) -> Iterator[Bucket]:
    """Give a bucket on one of ``SERVERS``, which runs until the end of the block."""
    with ExitStack() as running:
        if server == "ceph":
            yield _Ceph(running.enter_context(ceph_server(folder / "ceph")))
        elif server == "moto":
            yield _Moto(running.enter_context(moto_server()))
        else:
            yield _Misbehaving(*running.enter_context(fault_server()))


def main(job: dict[str, str]) -> Iterator[dict[str, str]]:
    """Be a bucket beside a soak: give its address and keys, and run until stdin ends."""
    with bucket_on(job["server"], Path(job["folder"])) as bucket:
        yield {"endpoint": bucket.endpoint, **bucket.keys._asdict()}
        sys.stdin.read()
