"""Folders for the indexes of a corpus. An index is built once and found again while the corpus is
the same; a build may be killed at any moment.

    CORPUS.jsonl.dense/          beside the corpus, or elsewhere
        3f9c.../                 the files of one index, named after everything they depend on
            index.json           the corpus, and once the index is finished its size and checksum
        .lock                    held while an index is built

The files of an unfinished index may be reused. Once an index is finished, all others of the same
corpus are removed. Nothing else is: the folder may be a link to a disk that holds other things, and
corpora of one name may share it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from treegraft import SettingError
from treegraft.extras.search.corpus import checksum
from treegraft.parts import files

SMALL_BYTES = 1 << 26
"""Corpora up to this size are compared by their contents; larger ones by size and time first."""

_RECORD = "index.json"
_FOLDER = re.compile("[0-9a-f]{16}")
"""Names of the folders of indexes."""

_log = logging.getLogger(__name__)


def index_home(corpus: Path, kind: str, index_dir: str) -> Path:
    """Returns the folder for the indexes of this kind over a corpus, which can be written to unless
    it holds an index.

    Args:
        index_dir: the user's choice; empty means beside the corpus.

    Raises:
        SettingError: it cannot be written to.
    """
    parent = Path(os.path.expanduser(os.path.expandvars(index_dir))) if index_dir else corpus.parent
    place = parent / f"{corpus.name}.{kind}"
    if any(place.glob(f"*/{_RECORD}")) or _is_writable(place):
        return place
    raise SettingError(
        f"the index of '{corpus}' cannot be written to '{place}'; name a writable folder with"
        " tools.search.index_dir.",
        code="index-unwritable",
    )


def find_or_make(
    corpus: Path, home: Path, recipe: Mapping[str, Any], make: Callable[[Path], None]
) -> Path:
    """Returns the folder that holds the index of this corpus; where there is none, `make` fills it.

    Only one process builds it; others wait for it.

    Args:
        recipe: everything that the index depends on besides the corpus.
        make: fills the folder it is given, in which an earlier attempt may have left files.
    """
    if found := _find(corpus, home, recipe):
        return found
    with files.open_own(home / ".lock") as lock:
        # The kernel releases the lock when its process dies, so no stale lock can stay.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("waiting for another process that builds the index '%s'", home)
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have built it meanwhile.
        if found := _find(corpus, home, recipe):
            return found
        # Before reading: a corpus that changes from here on no longer matches this time.
        state = corpus.stat()
        content = checksum(corpus)
        folder = home / _digest(json.dumps([content, dict(recipe)], sort_keys=True), 8)
        if any(one.is_symlink() for one in (folder, *folder.glob("*"))):
            # Made by somebody else: writing here would write to what the links lead to.
            files.remove_folder(folder)
        folder.mkdir(exist_ok=True)
        record: dict[str, Any] = {"corpus": str(corpus.resolve()), "recipe": dict(recipe)}
        # Before the files, so that a later build knows whose they are if this one is killed.
        files.write_atomically(folder / _RECORD, json.dumps(record))
        make(folder)
        record |= {"size": state.st_size, "mtime_ns": state.st_mtime_ns, "content": content}
        files.write_atomically(folder / _RECORD, json.dumps(record, indent=2))
        for other in home.iterdir():
            if other != folder and _is_index_of(corpus, other):
                # A process that has mapped their files keeps them.
                shutil.rmtree(other, ignore_errors=True)
        return folder


def _is_index_of(corpus: Path, folder: Path) -> bool:
    """Whether a folder of a home is an index of this corpus, finished or not; a link is none."""
    is_ours = _FOLDER.fullmatch(folder.name) and not folder.is_symlink()
    return bool(is_ours) and _read(folder / _RECORD).get("corpus") == str(corpus.resolve())


def _read(place: Path) -> dict[str, Any]:
    """Returns a record; an empty one for none or a damaged one."""
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _find(corpus: Path, home: Path, recipe: Mapping[str, Any]) -> Path | None:
    records = sorted(home.glob(f"*/{_RECORD}"))
    return next((one.parent for one in records if _describes(one, corpus, recipe)), None)


def _describes(place: Path, corpus: Path, recipe: Mapping[str, Any]) -> bool:
    """Whether a file describes a finished index of this corpus as it is now."""
    record, state = _read(place), corpus.stat()
    if record.get("recipe") != dict(recipe) or record.get("size") != state.st_size:
        return False
    is_same_time = record.get("mtime_ns") == state.st_mtime_ns
    # Reading tens of gigabytes at each start takes minutes; there the time has to do.
    if is_same_time and state.st_size > SMALL_BYTES:
        return True
    if record.get("content") != checksum(corpus):
        return False
    if not is_same_time:
        # A copied corpus is read once; the next start goes by its new time.
        with contextlib.suppress(OSError):
            files.write_atomically(
                place, json.dumps(record | {"mtime_ns": state.st_mtime_ns}, indent=2)
            )
    return True


def _digest(text: str, num_bytes: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=num_bytes).hexdigest()


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Writing is the only sure test: permission bits say nothing about read-only mounts.
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
