"""Passwords, ACL users, TLS and Unix sockets; and that no log line shows a password."""

from __future__ import annotations

import datetime as dt
import ipaddress
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from structlog.testing import capture_logs

from kvtier.plugin_api.backend import Connection, Outcome
from tests.support.patience import PATIENCE_S, looks, until_true
from tests.support.redis_servers import HOST, free_port, running
from tests.unit.backends.redis._redis import open_redis

if TYPE_CHECKING:
    from tests.support.redis_servers import RedisServer
    from tests.unit.backends.redis._redis import Tier

pytestmark = pytest.mark.anyio
SECRET = "hunter2-hunter2"
PEM = serialization.Encoding.PEM
ACL = ("on", f">{SECRET}", "~kvtier:*", "+get", "+set", "+mset", "+exists", "+unlink")
"""All that the tier needs; in a cluster it needs more."""
ACL_OF_A_CLUSTER = (*ACL, "+cluster|slots", "+asking")


@pytest.fixture
def password(tmp_path: Path) -> str:
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    return str(file)


async def test_a_user_with_the_least_rights_that_the_docs_name_is_enough(
    server: RedisServer, password: str
) -> None:
    server.ask("ACL", "SETUSER", "kv", *ACL)
    async with open_redis(server.url, username="kv", password_file=password) as tier:
        assert await tier.store(1) == [Outcome.DONE]
        assert await tier.probe(1) == [True]
        assert await tier.load(1) == [Outcome.DONE]
        await tier.backend.remove([])
        assert tier.is_in(Connection.UP)


async def test_a_user_who_may_only_read_is_served(
    valkey_server: RedisServer, password: str
) -> None:
    async with open_redis(valkey_server.url) as writer:
        assert await writer.store(1) == [Outcome.DONE]
    rights = [right for right in ACL if right not in ("+set", "+mset", "+unlink")]
    valkey_server.ask("ACL", "SETUSER", "kv", *rights)
    async with open_redis(valkey_server.url, username="kv", password_file=password) as tier:
        assert await tier.load(1) == [Outcome.DONE]
        assert await tier.store(2) == [Outcome.FAILED]
        assert tier.count("stores_failed") == 1


@pytest.mark.parametrize("wrong", ["password", "user", "none"])
async def test_a_wrong_login_is_logged_once_without_the_password(
    server: RedisServer, password: str, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And the tier is used as soon as it is right."""
    caplog.set_level(logging.DEBUG)
    server.ask("ACL", "SETUSER", "kv", *ACL[:1], ">other", *ACL[2:])
    server.ask("CONFIG", "SET", "requirepass", "other")
    login: dict[str, Any] = {
        "password": {"username": "kv", "password_file": password},
        "user": {"username": "nobody", "password_file": password},
        "none": {},
    }[wrong]
    with capture_logs() as lines:
        async with open_redis(server.url, **login) as tier:
            assert await tier.store(1) == [Outcome.FAILED]
            await until_true(lambda: tier.count("connects_failed") > 2)
            assert tier.states == [Connection.CONNECTING]
            reasons = [line for line in lines if "not connected" in line["event"]]
            assert len(reasons) == 1
            assert "AuthenticationError" in reasons[0]["reason"]
            assert "password_file" in reasons[0]["remedy"]
            assert SECRET not in f"{lines} {caplog.text} {tier.backend!r} {vars(tier.backend)}"
            if wrong == "password":
                server.ask("ACL", "SETUSER", "kv", f">{SECRET}", password="other")
                await tier.until(Connection.UP)
                assert await tier.store(1) == [Outcome.DONE]


def rotate(server: RedisServer, old: str, new: str) -> None:
    """Change the server's password, and end all connections that logged in with the old one."""
    server.ask("CONFIG", "SET", "requirepass", new, password=old)
    server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes", password=new)


async def until_served(tier: Tier) -> None:
    """Wait until the first block is loaded. The connection may be back before it is seen to go."""
    for _ in looks(lambda: tier.states):
        if await tier.load(1) == [Outcome.DONE]:
            return
        await anyio.lowlevel.checkpoint()  # a tier that is not connected answers at once


async def test_a_password_that_changes_is_read_again(server: RedisServer, password: str) -> None:
    """In the file first, as rotations do it, or in the server: the log says which is missing."""
    server.ask("CONFIG", "SET", "requirepass", SECRET)
    with capture_logs() as lines:
        async with open_redis(server.url, password_file=password) as tier:
            assert await tier.store(1) == [Outcome.DONE]
            Path(password).write_text("swordfish")
            rotate(server, SECRET, "swordfish")
            await until_served(tier)
            assert not [line for line in lines if "still has the refused ones" in str(line)]
            rotate(server, "swordfish", "rosebud")
            await until_true(lambda: "still has the refused ones" in str(lines))
            assert password in str(lines)
            Path(password).write_text("rosebud")
            await until_served(tier)
    assert not [each for each in ("swordfish", "rosebud") if each in str(lines)]


async def test_a_password_file_that_others_may_read_by_now_is_not_used(
    valkey_server: RedisServer, password: str
) -> None:
    valkey_server.ask("CONFIG", "SET", "requirepass", SECRET)
    with capture_logs() as lines:
        async with open_redis(valkey_server.url, password_file=password) as tier:
            await tier.until(Connection.UP)
            Path(password).chmod(0o644)
            rotate(valkey_server, SECRET, SECRET)
            await until_true(lambda: "chmod 600" in str(lines))
            Path(password).chmod(0o600)
            await tier.until(Connection.UP)


async def test_a_password_may_be_what_a_command_prints(
    valkey_server: RedisServer, tmp_path: Path
) -> None:
    """A token of a managed server, which lasts for minutes. It runs anew once one is refused."""
    token = tmp_path / "token"
    token.write_text(f"{SECRET}\n")
    valkey_server.ask("CONFIG", "SET", "requirepass", SECRET)
    command = f"/bin/cat '{token}'"
    async with open_redis(valkey_server.url, password_command=command) as tier:
        assert await tier.store(1) == [Outcome.DONE]
        token.write_text("second")
        rotate(valkey_server, SECRET, "second")
        await until_served(tier)


async def test_a_unix_socket_is_as_good(tmp_path: Path) -> None:
    path = tmp_path / "valkey.sock"
    with running("valkey", tmp_path / "server", "--unixsocket", str(path)):
        async with open_redis(f"unix://{path}") as tier:
            assert await tier.store(1) == [Outcome.DONE]
            assert await tier.load(1) == [Outcome.DONE]


USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
SIGNS_CERTIFICATES = x509.KeyUsage(
    **{each: each in ("key_cert_sign", "crl_sign") for each in USAGES}
)


class Authority:
    """A certificate authority of the test's own, and the certificates that it gave."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        own = self._sign(self._name, self._key, HOST, is_ca=True)
        self.file = self._write("authority.pem", own.public_bytes(PEM))

    def give(self, name: str, host: str = HOST) -> tuple[str, str]:
        """Return the files of a certificate and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._sign(subject, key, host, is_ca=False).public_bytes(PEM)
        plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        written = self._write(f"{name}.key", key.private_bytes(PEM, *plain))
        return self._write(f"{name}.pem", certificate), written

    def options(self) -> dict[str, Any]:
        """Return a tier's options: it trusts the authority, and has a certificate of it."""
        certificate, key = self.give("engine")
        return {"tls_ca_file": self.file, "tls_cert_file": certificate, "tls_key_file": key}

    def settings(self, host: str = HOST) -> tuple[int, list[str]]:
        """Return a port, and the settings of a server that listens there with TLS."""
        port = free_port()
        certificate, key = self.give("server", host)
        settings = ["--tls-port", str(port), "--tls-cert-file", certificate, "--tls-key-file", key]
        return port, [*settings, "--tls-ca-cert-file", self.file]

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, host: str, *, is_ca: bool
    ) -> x509.Certificate:
        now, day = dt.datetime.now(dt.UTC), dt.timedelta(days=1)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - day).not_valid_after(now + day)
        # Python 3.13 wants of certificates all that RFC 5280 does: whose key signed them, and
        # of an authority's that it may sign.
        for extension in (
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
            x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
        ):
            builder = builder.add_extension(extension, critical=False)
        if is_ca:
            builder = builder.add_extension(SIGNS_CERTIFICATES, critical=True)
        constraints = x509.BasicConstraints(ca=is_ca, path_length=None)
        return builder.add_extension(constraints, critical=True).sign(self._key, hashes.SHA256())

    def _write(self, name: str, pem: bytes) -> str:
        path = self._folder / name
        path.write_bytes(pem)
        return str(path)


async def test_tls_with_certificates_on_both_sides(tmp_path: Path) -> None:
    """With Redis: the Valkey of these tests is built without TLS."""
    authority = Authority(tmp_path)
    port, settings = authority.settings()
    with running("redis", tmp_path / "server", *settings):
        async with open_redis(f"rediss://{HOST}:{port}", **authority.options()) as tier:
            assert await tier.store(1, 2, 3) == [Outcome.DONE] * 3
            assert await tier.load(1, 2, 3) == [Outcome.DONE] * 3


@pytest.mark.parametrize("wrong", ["authority", "name", "no certificate", "no tls"])
async def test_a_server_that_tls_does_not_vouch_for_gets_nothing(
    tmp_path: Path, wrong: str
) -> None:
    authority = Authority(tmp_path)
    port, settings = authority.settings("127.0.0.2" if wrong == "name" else HOST)
    ours = authority.options()
    if wrong == "authority":
        ours["tls_ca_file"] = Authority(tmp_path / "other").file
    elif wrong == "no certificate":
        del ours["tls_cert_file"], ours["tls_key_file"]
    with running("redis", tmp_path / "server", *settings) as server:
        url = f"rediss://{HOST}:{server.port if wrong == 'no tls' else port}"
        # A server without TLS waits for more of the greeting: there the time runs out.
        limit_s = 0.2 if wrong == "no tls" else PATIENCE_S
        async with open_redis(url, **ours, connect_timeout_s=limit_s) as tier:
            assert await tier.store(1) == [Outcome.FAILED]
            assert tier.states == [Connection.CONNECTING]
        assert server.ask("DBSIZE") == 0
        if wrong == "name":
            async with open_redis(url, **ours, tls_check_hostname=False) as tier:
                assert await tier.store(1) == [Outcome.DONE]
