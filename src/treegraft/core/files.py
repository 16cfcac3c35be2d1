"""Files: written whole or not at all, read with limits, and reasons why the system refuses."""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

_OF_STORAGE = {
    getattr(errno, name, None)
    for name in [
        "EACCES",
        "EBUSY",
        "EDQUOT",
        "EEXIST",
        "EFBIG",
        "EIO",
        "EISDIR",
        "ELOOP",
        "EMFILE",
        "ENAMETOOLONG",
        "ENOENT",
        "ENOSPC",
        "ENOTDIR",
        "ENOTEMPTY",
        "EPERM",
        "EROFS",
        "ESTALE",
        "ETXTBSY",
        "EXDEV",
    ]
}
"""Of an OSError about files; others are of networks and processes."""


def storage_fault(error: BaseException) -> str:
    """Returns the reason why a file could not be written or read, such as "No space left on device:
    '/data/x'"; "" for an error of another kind."""
    number = None
    place = ""
    if isinstance(error, BaseExceptionGroup):
        # Tasks that fail together arrive as a group; the reader wants the cause.
        return next(filter(None, map(storage_fault, error.exceptions)), "")
    if isinstance(error, OSError):
        number = error.errno
        name = error.filename
        place = f": '{os.fsdecode(name)}'" if isinstance(name, str | bytes) else ""
    # Libraries in Rust (safetensors, tokenizers) have the number in their text only, and so has
    # the error of a copied folder, which lists those of its files.
    written = r"\[Errno (\d+)\]" if isinstance(error, shutil.Error) else r"\(os error (\d+)\)"
    if number is None and (found := re.search(written, str(error))):
        number = int(found[1])
    if number is None or number not in _OF_STORAGE:
        return ""
    return f"{os.strerror(number)}{place}"


_number = functools.lru_cache(1 << 12)(float)
"""Numbers that are written alike are one object: most of a tree's scores of leaves are."""


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises ValueError for any text that has none, also for one
    that is nested too deeply to be read."""
    try:
        return json.loads(text, parse_float=_number)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def checksum(data: bytes) -> str:
    """Returns the checksum that `file_checksum` computes for a file of these bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def file_checksum(path: Path, size: int | None = None) -> str:
    """Returns a checksum of a file's bytes, of the first `size` where that is given."""
    digest = hashlib.blake2b(digest_size=16)
    left = size
    with path.open("rb") as file:
        while part := file.read(1 << 20 if left is None else min(left, 1 << 20)):
            digest.update(part)
            left = None if left is None else left - len(part)
    return digest.hexdigest()


def _not_following(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def open_own(path: Path, mode: str = "a") -> IO[Any]:
    """Returns a file opened for writing, never another one that a link in its place leads to; with
    the mode "a" nothing in it is lost. Raises OSError where it is a link."""
    buffering = 0 if "b" in mode else -1
    return open(path, mode, buffering, opener=_not_following)


def free_name(path: Path) -> Path:
    """Returns a path where nothing is: `path`, or one with a number at its end."""
    numbers = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain([path], numbers) if not os.path.lexists(one))


def remove_folder(path: Path) -> None:
    """Removes a folder with all that is in it; of a link to one the link alone."""
    # What it leads to may be somebody else's.
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def write_atomically(path: Path, text: str | bytes) -> None:
    """Writes a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a rename is atomic only within a file system.
    partial = path.with_name(f".{path.name}.partial")
    try:
        # What a crash, or somebody else, has left under this name.
        partial.unlink(missing_ok=True)
        with open_own(partial, "xb") as file:
            left = memoryview(text.encode() if isinstance(text, str) else text)
            while left:
                left = left[file.write(left) :]
            # Else a power cut may leave the new name with no contents.
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        # The error of a write names no file.
        if error.errno:
            error.filename = error.filename or str(path)
        # On a full disk its room is needed.
        with suppress(OSError):
            partial.unlink()
        raise


def append_whole(path: Path, data: bytes) -> None:
    """Adds to a file; all of it is on the disk when this returns, and nothing of it where it could
    not be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_own(path, "ab") as file:
        size = file.seek(0, os.SEEK_END)
        try:
            # A disk that fills up takes a part of it.
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(file.fileno())
        except OSError as error:
            if error.errno:
                error.filename = error.filename or str(path)
            with suppress(OSError):
                file.truncate(size)
            raise


class LineFile:
    """A file of one record a line, which a crash leaves readable: what it cut off is no line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: str) -> None:
        """Adds a line, as `append_whole` does."""
        append_whole(self.path, line.encode() + b"\n")

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yields the complete lines, without line breaks, with their numbers from 1; none
        without a file."""
        if self.path.exists():
            with self.path.open("rb") as file:
                # In bytes: a cut-off line may end within a character.
                for number, line in enumerate(file, start=1):
                    # A last line without its end is the trace of a crash.
                    if line.endswith(b"\n"):
                        yield number, line[:-1].decode()

    def drop_cut(self) -> None:
        """Removes a last line that a crash cut off, so that the next one begins a line of its
        own."""
        data = self.path.read_bytes() if self.path.exists() else b""
        if data and not data.endswith(b"\n"):
            os.truncate(self.path, data.rfind(b"\n") + 1)


def leads_outside(path: Path, folder: Path) -> bool:
    """Returns whether links on the way lead `path` out of `folder`."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _not_waiting(name: str, flags: int) -> int:
    # A pipe would keep the reader waiting for its writer.
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def open_inside(path: Path, folder: Path) -> BinaryIO:
    """Returns a file of a folder that others may have made, opened for reading. Raises OSError: it
    is no plain file, or a link leads out of the folder."""
    file = open(path, "rb", opener=_not_waiting)  # noqa: SIM115
    # Where that lies which was opened: a link may have changed since it was looked at.
    opened = f"/proc/self/fd/{file.fileno()}"
    place = os.readlink(opened) if os.path.lexists(opened) else os.path.realpath(path)
    is_inside = Path(place).is_relative_to(os.path.realpath(folder))
    if is_inside and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.ELOOP, f"not a plain file of '{folder}'", str(path))


def read_inside(path: Path, folder: Path, most: int = 64 << 20) -> bytes:
    """Returns the bytes of such a file. Raises OSError, also for more than `most` bytes."""
    with open_inside(path, folder) as file:
        found = file.read(most + 1)
    # One byte more than allowed was asked for, to tell.
    if len(found) > most:
        raise OSError(errno.EFBIG, f"more than {most} bytes", str(path))
    return found


def code_checksum() -> str:
    """Returns a checksum of this package's Python files."""
    # It tells versions apart; nobody has a reason to forge it.
    digest = hashlib.blake2b(digest_size=8)
    root = Path(__file__).parents[1]
    # Sorted: file systems list in orders of their own.
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
