"""Keys that cannot be had are refused at the start, with the option and the remedy, and no key."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from kvtier.errors import ConfigError
from kvtier_backends.shared.record_trailer import Form
from tests.unit.backends.shared._keys import NEW, OLD, block_of, key_file, loaded, made, stored

if TYPE_CHECKING:
    from pathlib import Path

BOTH_KINDS = pytest.mark.parametrize("kind", ["auth_key", "encryption_key"])


@BOTH_KINDS
def test_keys_come_from_a_file_or_from_the_environment(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_KEYS", f"{NEW}\n{OLD}")
    from_file = made(**{f"{kind}_file": key_file(tmp_path / "keys", OLD)})
    from_environment = made(**{f"{kind}_env": "KVTIER_KEYS"})
    assert loaded(from_environment, *stored(from_file, block_of(1))) == block_of(1).buffer
    assert from_file.form is {"auth_key": Form.SIGNED, "encryption_key": Form.ENCRYPTED}[kind]


def test_without_keys_records_are_plain() -> None:
    assert made().form is Form.PLAIN


@BOTH_KINDS
def test_keys_that_cannot_be_had_are_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_SHORT", OLD[:-2])
    monkeypatch.setenv("KVTIER_MANY", "\n".join([OLD] * 17))
    public = key_file(tmp_path / "public", OLD)
    (tmp_path / "public").chmod(0o644)
    for options, names in (
        ({f"{kind}_file": str(tmp_path / "missing")}, "No such file"),
        ({f"{kind}_file": public}, "chmod 600"),
        ({f"{kind}_env": "KVTIER_NO_SUCH"}, "there must be 1 to 16 keys, not 0"),
        ({f"{kind}_env": "KVTIER_MANY"}, "there must be 1 to 16 keys, not 17"),
        ({f"{kind}_env": "KVTIER_SHORT"}, "key 1 is not 64 hex digits"),
        ({f"{kind}_env": "A", f"{kind}_file": "B"}, "give one of them"),
    ):
        with pytest.raises(ConfigError, match=names) as refused:
            made(**options)
        assert next(iter(options)) in str(refused.value)
        assert OLD[:-2] not in str(refused.value)


@BOTH_KINDS
def test_a_key_written_where_its_name_belongs_is_not_repeated(kind: str) -> None:
    for option in (f"{kind}_env", f"{kind}_file"):
        with pytest.raises(ConfigError, match="gives no keys") as refused:
            made(**{option: OLD})
        assert OLD not in str(refused.value)
        assert option in str(refused.value)


def test_keys_that_sign_are_refused_beside_keys_that_encrypt(tmp_path: Path) -> None:
    keys = key_file(tmp_path / "keys", OLD)
    with pytest.raises(ConfigError, match=r"auth_key_file.*encryption_key_file.*Remove it"):
        made(auth_key_file=keys, encryption_key_file=keys)


@BOTH_KINDS
def test_keys_without_the_library_are_refused_with_what_to_install(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in list(sys.modules):
        if module.startswith("cryptography.hazmat.primitives.ciphers"):
            monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"{kind}_file.*pip install 'cryptography>=47'"):
        made(**{f"{kind}_file": key_file(tmp_path / "keys", OLD)})
