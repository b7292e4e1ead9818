"""``kvtier check`` warns of addresses that other engines are told and can't reach."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.settings.runtime_config import TierConfig
from kvtier.tools.checking.announced import P2P_HOST_ENV, doubts_of_address

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.tools._shell import Shell

REACHED = ["10.0.0.7", "kv1", "kv1.example.org", "fd00::7", "2001:db8::7", "localhosts"]
NOT_REACHED = [
    ("0.0.0.0", "no address at all"),
    ("::", "no address at all"),
    ("localhost", "reaches itself only"),
    ("LocalHost.", "reaches itself only"),
    ("localhost.localdomain", "reaches itself only"),
    ("127.0.0.1", "reaches itself only"),
    ("127.3.2.1", "reaches itself only"),
    ("::1", "reaches itself only"),
    ("::ffff:127.0.0.1", "reaches itself only"),
    ("169.254.0.7", "link-local"),
    ("fe80::7", "link-local"),
    ("fe80::7%eth0", "link-local"),
]


def p2p(**options: Any) -> list[str]:
    tier = {"type": "p2p", "port": 5710, **options}
    return [each.text for each in doubts_of_address(TierConfig("vllm", "1:vllm", {"tier": tier}))]


def mooncake(**options: Any) -> list[str]:
    given = {"master": "10.0.0.1:50051", **options}
    return [each.text for each in doubts_of_address(TierConfig("mooncake", "1:mooncake", given))]


@pytest.mark.parametrize(("host", "why"), NOT_REACHED)
def test_a_host_that_others_do_not_reach_is_told_of(host: str, why: str) -> None:
    bracketed = f"[{host}]" if ":" in host else host
    for key, doubts in (
        ("host", p2p(host=host)),
        ("host", p2p(host=bracketed)),
        ("local_hostname", mooncake(local_hostname=host)),
        ("local_hostname", mooncake(local_hostname=f"{bracketed}:50052")),
    ):
        (text,) = doubts
        assert text.startswith(f"{key}='")
        assert why in text
        assert f"Set {key} to an address of this host that they reach" in text


@pytest.mark.parametrize("host", REACHED)
def test_a_host_that_others_may_reach_is_not(host: str) -> None:
    bracketed = f"[{host}]" if ":" in host else host
    assert p2p(host=host) == p2p(host=bracketed) == []
    assert mooncake(local_hostname=host) == mooncake(local_hostname=f"{bracketed}:1") == []


def test_what_vllm_announces_without_a_host_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(P2P_HOST_ENV, raising=False)
    (text,) = p2p()
    assert text.startswith(f"host (not given, and 'localhost' by {P2P_HOST_ENV} here)")
    monkeypatch.setenv(P2P_HOST_ENV, "10.0.0.7")
    assert p2p() == []


def test_a_client_of_a_store_that_has_memory_for_others_is_called_by_them() -> None:
    assert mooncake(master="127.0.0.1:50051") == [], "nobody calls a client that gives none"
    (text,) = mooncake(master="127.0.0.1:50051", segment_bytes="1GiB")
    assert text.startswith("local_hostname (not given, and as master='127.0.0.1:50051' has it)")
    assert mooncake(segment_bytes="1GiB") == []
    (text,) = mooncake(master="etcd://localhost:2379;kv1:2379", segment_bytes="1GiB")
    assert "master='etcd://localhost:2379;kv1:2379'" in text
    assert mooncake(master="127.0.0.1:50051", segment_bytes="much") == [], "refused elsewhere"


def test_other_tiers_announce_nothing() -> None:
    assert [*doubts_of_address(TierConfig("redis", "1:redis", {"url": "redis://localhost"}))] == []
    hosted = {"tier": {"type": "fs", "host": "localhost"}}
    assert [*doubts_of_address(TierConfig("vllm", "1:vllm", hosted))] == []
    assert [*doubts_of_address(TierConfig("vllm", "1:vllm", {"tier": 3}))] == []


def test_the_command_tells_it(tmp_path: Path, kvtier: Shell) -> None:
    tier = {"type": "mooncake", "master": "10.0.0.1:50051", "local_hostname": "0.0.0.0"}
    file = tmp_path / "kv.json"
    file.write_text(json.dumps({"cpu_bytes_to_use": "1MiB", "secondary_tiers": [tier]}))
    (text,) = kvtier("check", file, status=1)["warned"]
    assert text.startswith("secondary tier 1:mooncake: local_hostname='0.0.0.0' is the address")
