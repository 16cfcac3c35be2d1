"""Lines that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from treegraft.core.files import (
    LineFile,
    file_checksum,
    open_own,
    parse_json,
    storage_fault,
    write_atomically,
)


def test_a_line_that_was_cut_off_is_neither_read_nor_joined(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lines.jsonl"
    LineFile(path).drop_cut()
    assert list(LineFile(path).lines()) == [] and not path.exists()
    LineFile(path).append("one")
    with path.open("ab") as file:
        file.write("tw\u00f6".encode())
    assert list(LineFile(path).lines()) == [(1, "one")]
    LineFile(path).drop_cut()
    LineFile(path).append("two")
    assert list(LineFile(path).lines()) == [(1, "one"), (2, "two")]
    path.write_bytes(b"cut")
    LineFile(path).drop_cut()
    assert path.read_bytes() == b""


@contextmanager
def full_disk() -> Iterator[None]:
    """Files end at 10 bytes; around writes alone, since the report of the tests is a file too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    write_atomically(tmp_path / "whole", "1234567890")
    LineFile(tmp_path / "lines").append("1234")
    with pytest.raises(OSError, match="File too large") as whole, full_disk():
        write_atomically(tmp_path / "whole", "12345678901")
    with pytest.raises(OSError) as lines, full_disk():
        LineFile(tmp_path / "lines").append("123456")
    # The system names no file where a write fails.
    assert storage_fault(whole.value).endswith(f": '{tmp_path / 'whole'}'")
    assert storage_fault(lines.value).endswith(f": '{tmp_path / 'lines'}'")
    assert (tmp_path / "whole").read_text() == "1234567890"
    assert (tmp_path / "lines").read_text() == "1234\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["lines", "whole"]


def test_reasons_of_the_system() -> None:
    text = "No space left on device"
    assert storage_fault(OSError(errno.ENOSPC, text, "/data/x")) == f"{text}: '/data/x'"
    assert storage_fault(RuntimeError(f"I/O error: {text} (os error 28)")) == text
    copied = shutil.Error([("a", "b", str(OSError(errno.ENOSPC, text, "a", None, "b")))])
    assert storage_fault(copied) == text
    group = ExceptionGroup("two", [ValueError("x"), OSError(errno.EROFS, "read-only", "b")])
    assert storage_fault(ExceptionGroup("one", [group])).endswith(": 'b'")
    for other in (ConnectionResetError(errno.ECONNRESET, "reset"), ValueError("x"), OSError("x")):
        assert storage_fault(other) == ""


def test_json_that_cannot_be_read_is_a_value_error() -> None:
    assert parse_json(b'{"a": 1}') == {"a": 1}
    for text in ("[" * 100_000, b"\xff", "", "9" * 5000):
        with pytest.raises(ValueError):
            parse_json(text)


def test_the_checksum_of_a_beginning(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(os.urandom(3 << 20))
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes()[: (1 << 20) + 5])
    assert file_checksum(tmp_path / "a", (1 << 20) + 5) == file_checksum(tmp_path / "b")
    assert file_checksum(tmp_path / "a") == file_checksum(tmp_path / "a", 3 << 20)


def test_a_link_is_never_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name, write in {
        ".lock": lambda path: open_own(path).close(),
        "metrics.jsonl": lambda path: LineFile(path).append("{}"),
        "new": lambda path: open_own(path, "xb").close(),
    }.items():
        (tmp_path / name).symlink_to(victim)
        with pytest.raises(OSError):
            write(tmp_path / name)
        assert victim.read_text() == "mine"


def test_a_link_in_the_place_of_the_partial_file_is_removed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".config.json.partial").symlink_to(victim)
    write_atomically(tmp_path / "config.json", "new")
    assert victim.read_text() == "mine" and (tmp_path / "config.json").read_text() == "new"
    assert not (tmp_path / "config.json").is_symlink()
    assert not (tmp_path / ".config.json.partial").exists()


def test_a_lock_keeps_what_is_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("text")
    with open_own(tmp_path / "lock"):
        pass
    assert (tmp_path / "lock").read_text() == "text"
