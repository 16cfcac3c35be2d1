"""Atomic writes: a file is complete or absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a rename is atomic only within a file system.
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        # Else a power cut may leave the new name with no contents.
        os.fsync(file.fileno())
    partial.replace(path)


def append_line(path: Path, line: str) -> None:
    """Adds a line to a file; it is on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def whole_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the complete lines, without line breaks, with their numbers from 1; none where there
    is no file."""
    if path.exists():
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                # A last line without its end is the trace of a crash.
                if line.endswith(b"\n"):
                    yield number, line[:-1].decode()


def leads_outside(path: Path, folder: Path) -> bool:
    """Returns whether links on the way lead `path` out of `folder`."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def drop_cut_line(path: Path) -> None:
    """Removes a last line that a crash cut off, so that the next one begins a line of its own."""
    data = path.read_bytes() if path.exists() else b""
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
