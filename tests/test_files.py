"""Lines that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from treegraft.core.files import append_line, drop_cut_line, whole_lines


def test_a_line_that_was_cut_off_is_neither_read_nor_joined(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lines.jsonl"
    drop_cut_line(path)
    assert list(whole_lines(path)) == [] and not path.exists()
    append_line(path, "one")
    with path.open("ab") as file:
        file.write("tw\u00f6".encode())
    assert list(whole_lines(path)) == [(1, "one")]
    drop_cut_line(path)
    append_line(path, "two")
    assert list(whole_lines(path)) == [(1, "one"), (2, "two")]
    path.write_bytes(b"cut")
    drop_cut_line(path)
    assert path.read_bytes() == b""
