"""Keys that change while the tier runs: profiles of AWS's files, and commands."""

from __future__ import annotations

import json
from math import inf
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import Connection, Outcome
from kvtier_backends.shared import secrets
from tests.support.s3_fault_server import Fault
from tests.unit.backends.s3._s3 import make_s3, open_s3

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.s3_fault_server import FaultServer

    Faulty = tuple[FaultServer, str]

pytestmark = pytest.mark.anyio
SECRET = "hunter2-hunter2"
NO_KEYS: dict[str, Any] = {"access_key_env": None, "secret_key_env": None}


@pytest.fixture(autouse=True)
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have no keys but those of AWS's files, which are the test's own."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setattr(secrets, "KEPT_S", inf)  # what was printed may have been refused
    return tmp_path


def write_keys(aws: Path, key: str) -> None:
    text = f"[kv]\naws_access_key_id = {key}\naws_secret_access_key = {SECRET}\n"
    (aws / "credentials").write_text(text)


def write_command(aws: Path, key: str) -> str:
    """Return a command that prints this key, until another is written."""
    printed = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": SECRET, "SessionToken": "t"}
    (aws / "printed").write_text(json.dumps(printed))
    return f"/bin/cat {aws / 'printed'}"


@pytest.mark.parametrize("way", ["profile", "AWS_PROFILE", "credential_process", "command"])
async def test_keys_that_change_are_found_once_the_old_ones_are_refused(
    faulty: Faulty, aws: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    server, endpoint = faulty
    command = write_command(aws, "KEY1")
    options: dict[str, Any] = {**NO_KEYS}
    if way == "command":
        options["credentials_command"] = command
    elif way == "credential_process":
        (aws / "config").write_text(f"[profile kv]\ncredential_process = {command}\n")
        options["profile"] = "kv"
    else:
        write_keys(aws, "KEY1")
        if way == "profile":
            options["profile"] = "kv"
        else:
            monkeypatch.setenv("AWS_PROFILE", "kv")
    with capture_logs() as lines:
        async with open_s3(endpoint, **options) as s3:
            assert await s3.store(1) == [Outcome.DONE]
            assert set(server.keys) == {"KEY1"}
            server.misbehave_always(Fault.EXPIRED)
            assert await s3.load(1) == [Outcome.FAILED]
            await s3.until_state(Connection.GONE)
            write_command(aws, "KEY2")
            if way in ("profile", "AWS_PROFILE"):
                write_keys(aws, "KEY2")
            server.behave()
            await s3.until(lambda: server.keys[-1] == "KEY2")
            await s3.until_state(Connection.UP)
            assert await s3.load(1) == [Outcome.DONE]
    assert SECRET not in str(lines)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"profile": "missing"}, "is in none of AWS's files"),
        ({"profile": "sso"}, "has neither keys nor a credential_process"),
        ({"profile": "kv", "credentials_command": "true"}, "excludes profile"),
        ({"credentials_command": "/bin/false"}, "ended with status 1"),
        ({"credentials_command": "/bin/echo " + SECRET}, "prints no JSON"),
        ({"credentials_command": "/no/such/program"}, "No such file"),
        ({"credentials_command": "it's"}, "quotes are not closed"),
    ],
)
def test_what_leads_to_no_keys_is_refused_at_the_door(
    aws: Path, options: dict[str, Any], said: str
) -> None:
    (aws / "config").write_text("[profile sso]\nsso_session = x\n")
    with pytest.raises(ConfigError, match=said) as refused:
        make_s3("https://s3.example", "p", **NO_KEYS, **options)
    assert SECRET not in str(refused.value)


def test_a_profile_of_the_environment_without_keys_is_left_to_the_library(
    aws: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds those of the instance, as it did before."""
    monkeypatch.setenv("AWS_PROFILE", "sso")
    (aws / "config").write_text("[profile sso]\nsso_session = x\n")
    make_s3("https://s3.example", "p", **NO_KEYS)
