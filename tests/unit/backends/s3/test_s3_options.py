"""What is refused at the door, and that no credential is ever shown."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import BackendContext, Connection, Namespace
from kvtier_backends.s3 import S3Backend
from kvtier_backends.s3.s3_options import Credentials
from tests.support.s3_fault_server import Fault
from tests.support.s3_server import SECRET_KEY, options_for, set_credentials
from tests.unit.backends.s3._s3 import CONTEXT, make_s3, open_s3

if TYPE_CHECKING:
    from tests.support.s3_fault_server import FaultServer

ENDPOINT = "http://127.0.0.1:9"


def refused(**options: Any) -> str:
    given = {key: value for key, value in options.items() if value is not None}
    with pytest.raises(ConfigError) as raised:
        S3Backend.from_options(given, CONTEXT)
    with pytest.raises(ConfigError) as checked:
        S3Backend.check_options(given, BackendContext(0, Namespace({}), "1:s3"))
    assert str(raised.value) == str(checked.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"url": None}, "url is missing"),
        ({"url": "http://host/b"}, "must begin with s3://, gs:// or az://"),
        ({"url": "s3://host:7480/b"}, "has a port"),
        ({"url": "s3:///b"}, "names no bucket"),
        ({"url": "s3://bucket/a b"}, "has a prefix that is not of letters"),
        ({"url": "s3://bucket/../x"}, "has a prefix that is not of letters"),
        ({"url": "s3://bucket/" + 600 * "a"}, "more than 512 characters"),
        ({"endpoint": "host:7480"}, "must be https://host"),
        ({"endpoint": "http://host/path"}, "must be https://host"),
        ({"endpoint": "http://host:99999"}, "must be https://host"),
        ({"allow_http": False}, 'set "allow_http": true'),
        ({"access_key_env": None}, "access_key_env is missing"),
        ({"secret_key_env": None}, "secret_key_env is missing"),
        ({"access_key_env": "NOT_SET"}, "names an environment variable that is not set"),
        (
            {"access_key_env": None, "secret_key_env": None, "session_token_env": "X"},
            "is of no use alone",
        ),
        ({"url": "gs://bucket/p"}, "is for s3:// only"),
        ({"requests_max": 0}, "requests_max=0"),
        ({"request_max": 1}, "did you mean 'requests_max'"),
    ],
)
def test_a_bad_configuration_is_refused_with_key_value_and_remedy(
    change: dict[str, Any], said: str
) -> None:
    assert said in refused(**{**options_for(ENDPOINT, "p"), **change})


@pytest.mark.parametrize("key", ["url", "endpoint"])
@pytest.mark.parametrize("secret", ["user:{}@", "{}@"])
def test_a_url_with_a_credential_is_refused_unseen(key: str, secret: str) -> None:
    scheme = "s3" if key == "url" else "https"
    text = refused(
        **{**options_for(ENDPOINT, "p"), key: f"{scheme}://{secret.format(SECRET_KEY)}host/b"}
    )
    assert "is not shown here" in text
    assert SECRET_KEY not in text


def test_a_query_which_may_be_a_signature_is_refused_unseen() -> None:
    text = refused(**{**options_for(ENDPOINT, "p"), "url": f"az://box/p?sig={SECRET_KEY}"})
    assert SECRET_KEY not in text


def test_without_the_library_its_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert "pip install 'obstore>=" in refused(**options_for(ENDPOINT, "p"))


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({}, "s3://kv-blocks/p at http://127.0.0.1:9"),
        ({"url": "s3://kv-blocks/p/"}, "s3://kv-blocks/p at http://127.0.0.1:9"),
        ({"url": "s3://kv-blocks"}, "s3://kv-blocks at http://127.0.0.1:9"),
        ({"endpoint": "https://Host:443/"}, "s3://kv-blocks/p at https://host:443"),
        ({"endpoint": None}, "s3://kv-blocks/p"),
    ],
)
def test_one_place_has_one_name(change: dict[str, Any], place: str) -> None:
    given = {**options_for(ENDPOINT, "p"), **change}
    given = {key: value for key, value in given.items() if value is not None}
    assert S3Backend.from_options(given, CONTEXT).place == place
    assert S3Backend.check_options(given, BackendContext(0, Namespace({}), "1:s3")) == place


def test_other_clouds_are_taken_with_their_own_credentials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    for url in ("gs://kv-blocks/p", "az://kv-blocks/p"):
        assert S3Backend.check_options({"url": url}, CONTEXT) == url
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    assert "Check the environment variables" in refused(url="az://kv-blocks/p")


def test_a_repr_shows_no_credential() -> None:
    assert repr(Credentials("id", SECRET_KEY, "token")) == "Credentials()"
    backend = make_s3(ENDPOINT, "p")
    everything = f"{backend!r} {vars(backend)!r} {vars(backend._client)!r}"
    assert SECRET_KEY not in everything


@pytest.mark.parametrize(
    ("virtual", "endpoint"),
    [(False, "https://rgw.example:7480"), (True, "https://kv-blocks.rgw.example:7480")],
)
def test_the_bucket_is_named_once_in_each_style(virtual: bool, endpoint: str) -> None:
    """The library puts it into the path, or else nowhere."""
    own = {"endpoint": "https://rgw.example:7480", "virtual_hosted_style": virtual}
    store = S3Backend.from_options({**options_for(ENDPOINT, "p"), **own}, CONTEXT)._client._store
    assert store.config["endpoint"] == endpoint
    assert store.config["bucket"] == "kv-blocks"


def test_options_reach_the_traits() -> None:
    traits = make_s3(ENDPOINT, "p", requests_max=8, presence_ttl_s=30.0).traits
    assert (traits.load_batches_max, traits.store_batches_max) == (8, 8)
    assert (traits.presence_ttl_s, traits.capacity_blocks) == (30.0, None)


@pytest.mark.anyio
@pytest.mark.parametrize("fault", [Fault.DENIED, Fault.NO_BUCKET, Fault.SLOW_DOWN, Fault.SHORT])
async def test_no_log_line_error_or_count_shows_a_credential(
    faulty: tuple[FaultServer, str], fault: Fault, capfd: pytest.CaptureFixture[str]
) -> None:
    server, endpoint = faulty
    set_credentials("kvtier-access", "kvtier-secret")
    texts = []
    with capture_logs() as logs:
        async with open_s3(endpoint, request_timeout_s=0.3) as s3:
            await s3.store(1)
            server.misbehave_always(fault)
            await s3.load(1)
            await s3.store(2)
            try:
                await s3.backend.remove([b"key!"])
            except Exception as error:  # noqa: BLE001 - whatever it is, it shows nothing
                texts.append(f"{error!r} {error.__cause__!r}")
            await s3.until(lambda: s3.states[-1] is not Connection.UP or fault is Fault.SLOW_DOWN)
            texts.append(repr(s3.backend.counters()))
    assert logs
    shown = f"{logs} {texts} {capfd.readouterr()}"
    assert "kvtier-secret" not in shown
    assert "kvtier-access" not in shown
