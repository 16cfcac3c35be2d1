"""Folders for the indexes of a corpus. An index is built once and found again while the corpus is
the same; a build may be killed at any moment.

    CORPUS.jsonl.dense/          beside the corpus, or elsewhere
        current.json             size, time and checksum of the corpus, and the folder of its index
        3f9c.../                 the files of one index, named after everything they depend on
        .lock                    held while an index is built

`current.json` is written last, so a folder that it does not name is unfinished: its files may be
reused, and it is removed once another is finished.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from treegraft.core.errors import SettingError
from treegraft.core.files import open_own, write_atomically
from treegraft.tools.search.corpus import checksum

SMALL_BYTES = 1 << 26
"""Corpora up to this size are compared by their contents; larger ones by size and time first."""

_log = logging.getLogger(__name__)


def index_home(corpus: Path, kind: str, index_dir: str) -> Path:
    """Returns the folder for the indexes of this kind over a corpus; it exists and is writable.

    Args:
        index_dir: the user's choice; empty means beside the corpus, or where that is read-only in
            the user's cache folder.

    Raises:
        SettingError: the user's choice cannot be written to.
    """
    name = f"{corpus.name}.{kind}"
    if index_dir:
        places = [Path(os.path.expanduser(os.path.expandvars(index_dir))) / name]
    else:
        beside = corpus.parent / name
        # An index beside the corpus serves also where nothing can be written.
        if (beside / "current.json").exists():
            return beside
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treegraft"
        # Corpora of one name in two folders must not share a place.
        places = [beside, cache / f"{name}-{_digest(str(corpus.resolve()), 4)}"]
    for place in places:
        if _is_writable(place):
            return place
    raise SettingError(
        f"the index of '{corpus}' cannot be written to"
        f" {' or '.join(repr(str(place)) for place in places)}; name a writable folder with"
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
    with open_own(home / ".lock") as lock:
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
        folder.mkdir(exist_ok=True)
        make(folder)
        current = {
            "size": state.st_size,
            "mtime_ns": state.st_mtime_ns,
            "content": content,
            "recipe": dict(recipe),
            "folder": folder.name,
        }
        write_atomically(home / "current.json", json.dumps(current, indent=2))
        for other in home.iterdir():
            # A process that has mapped their files keeps them.
            if other.is_dir() and other != folder:
                shutil.rmtree(other, ignore_errors=True)
        return folder


def _find(corpus: Path, home: Path, recipe: Mapping[str, Any]) -> Path | None:
    place = home / "current.json"
    try:
        current = json.loads(place.read_text(encoding="utf-8"))
        state = corpus.stat()
        folder = home / str(current["folder"])
        is_same_time = current["mtime_ns"] == state.st_mtime_ns
        is_same = (
            current["recipe"] == dict(recipe)
            and current["size"] == state.st_size
            and folder.is_dir()
            # Reading tens of gigabytes at each start takes minutes; there the time has to do.
            and (
                (is_same_time and state.st_size > SMALL_BYTES)
                or current["content"] == checksum(corpus)
            )
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none there, or damaged: the index is built again
    if is_same and not is_same_time:
        # A copied corpus is read once; the next start goes by its new time.
        with contextlib.suppress(OSError):
            write_atomically(place, json.dumps(current | {"mtime_ns": state.st_mtime_ns}, indent=2))
    return folder if is_same else None


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
