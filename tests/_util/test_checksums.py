"""Checksums of folders and JSON notice every change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnnautoscale._util import checksums_of, damaged_file, is_unchanged, with_checksum


def test_every_flipped_bit_of_a_folder_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "inner" / "b").write_bytes(bytes(range(8)))
    known = checksums_of(tmp_path)
    assert list(known) == ["a", "inner/b"]
    assert damaged_file(tmp_path, known) is None
    content = (tmp_path / "inner" / "b").read_bytes()
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "inner" / "b").write_bytes(changed)
        assert damaged_file(tmp_path, known) == "inner/b"
    (tmp_path / "inner" / "b").unlink()
    with pytest.raises(FileNotFoundError):
        damaged_file(tmp_path, known)


def test_changed_values_of_json_are_noticed() -> None:
    sealed = json.loads(json.dumps(with_checksum({"a": 1.5, "b": {10: "x", 9: [1, None]}})))
    assert is_unchanged(sealed)
    assert not is_unchanged({**sealed, "a": 1.25})
    assert not is_unchanged({**sealed, "c": None})
    assert not is_unchanged({"a": 1.5})
