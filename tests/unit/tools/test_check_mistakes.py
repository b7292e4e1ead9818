"""Mistakes that people make in a configuration, and the words that must name each of them.

``HERE`` in a configuration stands for a folder that exists, with a model of 32 layers below it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtier.tools.checking import places
from kvtier.tools.cli.main import main

SPEC = {"spec_name": "KVTierOffloadingSpec", "spec_module_path": "kvtier.vllm"}
DISK = {"type": "disk", "path": "HERE/kv", "capacity_bytes": "1GiB"}
FS = {"type": "fs", "root_dir": "HERE/kv"}
REDIS = {"type": "redis", "url": "redis://kv1:6379"}
S3 = {"type": "s3", "url": "s3://bucket/kv"}
MOONCAKE = {"type": "mooncake", "master": "kv1:50051"}
MODEL = ("--model", "HERE/model")
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


class Mistake(NamedTuple):
    """A mistake; ``parts`` must stand in one line, and ``absent`` nowhere."""

    what: str
    given: object  #: the file, as text or as what JSON holds
    parts: tuple[str, ...]
    absent: tuple[str, ...] = ()
    status: int = 1
    options: tuple[str, ...] = ()


def whole(*tiers: dict[str, Any], **keys: object) -> dict[str, Any]:
    """Return a configuration with these tiers, and with these keys besides or instead."""
    return {**SPEC, "cpu_bytes_to_use": "16MiB", "secondary_tiers": list(tiers), **keys}


def without(key: str, **keys: object) -> dict[str, Any]:
    """Return a sound configuration without a key."""
    return {name: value for name, value in whole(DISK, **keys).items() if name != key}


MISTAKES = [
    Mistake(
        "an optional key misspelt",
        whole(DISK, store_treshold=2),
        ("unknown key 'store_treshold' (value 2)", "did you mean 'store_threshold'?"),
        ("Known keys",),
    ),
    Mistake(
        "a tier's optional key misspelt",
        whole({**DISK, "io_dept": 4}),
        ("1:disk", "unknown key 'io_dept' (value 4)", "did you mean 'io_depth'?"),
        ("Known keys",),
    ),
    Mistake(
        "a required key misspelt",
        whole({"type": "disk", "path": "HERE/kv", "capacity_byte": "1GiB"}),
        ("capacity_bytes is missing", "'capacity_byte'", "did you mean 'capacity_bytes'?"),
    ),
    Mistake(
        "a required key misspelt, and another mistake",
        whole({"type": "fs", "rootdir": "HERE/kv", "n_read_threads": 0}),
        ("n_read_threads=0 must be at least 1",),
    ),
    Mistake(
        "the size misspelt",
        without("cpu_bytes_to_use", cpu_byte_to_use="16MiB"),
        ("cpu_bytes_to_use is missing", "'cpu_byte_to_use'"),
    ),
    Mistake(
        "the list of tiers called otherwise",
        without("secondary_tiers", tiers=[DISK]),
        ("unknown key 'tiers'", "did you mean 'secondary_tiers'?"),
    ),
    Mistake("a tier without a type", whole({"path": "/kv"}), ("secondary_tiers[0]: type is mis",)),
    Mistake(
        "a key of another tier's",
        whole({**DISK, "root_dir": "HERE/kv"}),
        ("unknown key 'root_dir'", "Known keys", "capacity_bytes"),
    ),
    Mistake(
        "a text for a flag", whole({**DISK, "direct": "yes"}), ("direct='yes' must be true or",)
    ),
    Mistake("a number in quotes", whole({**DISK, "io_depth": "8"}), ("io_depth='8'", "without qu")),
    Mistake(
        "below zero", whole({**DISK, "capacity_bytes": -1}), ("capacity_bytes=-1", "at least 1")
    ),
    Mistake("zero", whole(DISK, cpu_bytes_to_use=0), ("cpu_bytes_to_use=0", "at least 1")),
    Mistake(
        "a unit that is none",
        whole({**DISK, "capacity_bytes": "1 gig"}),
        ("capacity_bytes='1 gig'", '"8GiB"'),
    ),
    Mistake("no mapping", "[]", ("holds a list", "--kv-transfer-config"), status=2),
    Mistake(
        "a comma missing",
        '{"cpu_bytes_to_use": 1\n"secondary_tiers": []}',
        ("Expecting ',' delimiter: line 2 column 1",),
        status=2,
    ),
    Mistake(
        "YAML",
        "cpu_bytes_to_use: 16MiB\nsecondary_tiers:\n- type: disk\n",
        ("line 1", "JSON, not YAML"),
        status=2,
    ),
    Mistake(
        "the whole command",
        'vllm serve m --kv-transfer-config \'{"kv_connector": "OffloadingConnector"}\'\n',
        ("Keep only", "behind --kv-transfer-config"),
        status=2,
    ),
    Mistake(
        "wrapped", {"kv_transfer_config": {"kv_role": "kv_both"}}, ("cpu_bytes_to_use is mis",)
    ),
    Mistake(
        "wrapped as text",
        {"kv_transfer_config": json.dumps(without("cpu_bytes_to_use"))},
        ("cpu_bytes_to_use is missing",),
        ("unknown key",),
    ),
    Mistake(
        "another spec",
        whole(DISK, spec_name="KVTierSpec"),
        ("spec_name='KVTierSpec'", "'KVTierOffloadingSpec'"),
    ),
    Mistake(
        "another module", whole(DISK, spec_module_path="kvtier"), ("'kvtier'", "'kvtier.vllm'")
    ),
    Mistake(
        "tiers as a mapping", whole(secondary_tiers=DISK), ("secondary_tiers=", "must be a list")
    ),
    Mistake("one place twice", whole(DISK, DISK), ("1:disk and 2:disk both use",)),
    Mistake(
        "a type misspelt",
        whole({**DISK, "type": "disc"}),
        ("type='disc'", "did you mean 'disk'?"),
        ("Known:",),
    ),
    Mistake(
        "a policy misspelt",
        whole(DISK, eviction_policy="lur"),
        ("eviction_policy='lur'", "did you mean 'lru'?"),
    ),
    Mistake(
        "an admission misspelt",
        whole({**DISK, "admission": "second-touch"}),
        ("admission='second-touch'", "did you mean 'second_touch'?"),
    ),
    Mistake(
        "a choice misspelt",
        whole(DISK, on_reset="keeps"),
        ("on_reset='keeps'", "must be one of new_generation, keep", "did you mean 'keep'?"),
    ),
    Mistake(
        "a relative path",
        whole({**DISK, "path": "kv"}),
        ("warning", "path='kv' is relative", "full path"),
        status=0,
    ),
    Mistake("a home that is none", whole({**DISK, "path": "~nobody-x/kv"}), ("home folder",)),
    Mistake(
        "a variable that is not set",
        whole({**DISK, "path": "$KVTIER_UNSET/kv"}),
        ("path='$KVTIER_UNSET/kv'", "KVTIER_UNSET, which is not set"),
    ),
    Mistake(
        "a mount that is missing",
        whole({**DISK, "path": "HERE/nvme/kv"}),
        ("warning", "path='HERE/nvme/kv'", "HERE/nvme does not exist", "mount"),
        status=0,
    ),
    Mistake(
        "more than the filesystem has",
        whole({**DISK, "capacity_bytes": "900TiB"}, cpu_bytes_to_use="16MiB"),
        ("warning", "capacity_bytes='900TiB'", "the filesystem has"),
        status=0,
    ),
    Mistake(
        "more than the filesystem has, in a shared folder",
        whole({**FS, "capacity_bytes": "900TiB"}),
        ("warning", "capacity_bytes='900TiB'", "the filesystem has"),
        status=0,
    ),
    Mistake(
        "memory for no block",
        whole(DISK, cpu_bytes_to_use="1MiB"),
        ("cpu_bytes_to_use='1MiB' holds no block of 2097152 bytes",),
        options=MODEL,
    ),
    Mistake(
        "a disk for no block",
        whole({**DISK, "capacity_bytes": "4MiB"}),
        ("capacity_bytes='4MiB' has no room for", "of blocks of 2097152 bytes", "or more"),
        options=MODEL,
    ),
    Mistake(
        "a region for no block",
        whole({**DISK, "region_bytes": "1MiB"}),
        ("region_bytes='1MiB' has no room for one block of 2097152 bytes",),
        options=MODEL,
    ),
    Mistake(
        "a segment for no block",
        whole({**MOONCAKE, "segment_bytes": "1MiB"}),
        ("segment_bytes='1MiB' has no room for one block of 2097152 bytes",),
        options=MODEL,
    ),
    Mistake(
        "more memory than there is",
        whole(DISK, cpu_bytes_to_use="900TiB"),
        ("cpu_bytes_to_use='900TiB' is more than the", "bytes of memory that there are"),
    ),
    Mistake("a port missing", whole({**MOONCAKE, "master": "kv1"}), ("master='kv1'", "host:50051")),
    Mistake("another scheme", whole({**REDIS, "url": "http://kv1"}), ("'http://kv1'", "redis")),
    Mistake(
        "an address for a bucket", whole({**S3, "url": "https://kv1/b"}), ("begin with s3://",)
    ),
    Mistake(
        "a bucket's name too short",
        whole({**S3, "url": "s3://ab/kv"}),
        ("url='s3://ab/kv'", "'ab'", "3 to 63 characters"),
    ),
    Mistake(
        "a bucket's name with capitals",
        whole({**S3, "url": "s3://MyBucket/kv"}),
        ("'MyBucket'", "lower case"),
    ),
    Mistake(
        "a server in the place of a bucket",
        whole({**S3, "url": "s3://minio:9000/kv"}),
        ("url='s3://minio:9000/kv'", "a port", "endpoint"),
    ),
    Mistake(
        "a key file that is missing",
        whole({**DISK, "encryption_key_file": "HERE/none"}),
        ("encryption_key_file='HERE/none'", "No such file"),
    ),
    Mistake(
        "a key file that others may read",
        whole({**DISK, "encryption_key_file": "HERE/keys"}),
        ("encryption_key_file='HERE/keys'", "chmod 600"),
    ),
    Mistake(
        "a password in the address",
        whole({**REDIS, "url": "redis://u:hunter2@kv1"}),
        ("password_file", "password_env"),
        ("hunter2",),
    ),
    Mistake(
        "a secret where no key takes one",
        whole({**S3, "secret_access_key": "hunter2"}),
        ("unknown key 'secret_access_key'",),
        ("hunter2",),
    ),
    Mistake(
        "days", whole({**DISK, "ttl_s": "7d"}, wait_timeout_s="5m"), ("nothing that",), status=0
    ),
    Mistake(
        "a time that is none",
        whole({**DISK, "ttl_s": "a week"}),
        ("ttl_s='a week'", '"12h"'),
    ),
    Mistake(
        "a connector misspelt",
        {"kv_connector": "OffloadConnector", "kv_role": "kv_both"},
        ("kv_connector='OffloadConnector'", "Set it to 'OffloadingConnector'"),
    ),
    Mistake(
        "a role that is none",
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "both",
            "kv_connector_extra_config": whole(DISK),
        },
        ("kv_role='both'", "'kv_both'"),
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_a_mistake_is_named_with_its_remedy(
    mistake: Mistake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places, "ROOT", str(tmp_path.parent))  # the folder may be mounted itself
    monkeypatch.delenv("KVTIER_UNSET", raising=False)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model/model.safetensors").touch()
    (tmp_path / "keys").write_text("11" * 32)
    (tmp_path / "keys").chmod(0o644)

    def here(text: str) -> str:
        return text.replace("HERE", str(tmp_path))

    given = mistake.given if isinstance(mistake.given, str) else json.dumps(mistake.given)
    Path("kv.json").write_text(here(given))
    status = main(["check", "kv.json", *map(here, mistake.options)])
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert any(all(here(part) in line for part in mistake.parts) for line in text.splitlines()), (
        text
    )
    assert not [part for part in mistake.absent if part in text], text
    assert status == mistake.status, text
