"""Folders for the indexes of a corpus. An index is built once and found again while the corpus is
the same; a build may be killed at any moment.

    CORPUS.jsonl.dense/          beside the corpus, or elsewhere
        3f9c.../                 the files of one index, named after everything they depend on
            index.json           written once the index is finished
        .lock                    locked while an index is built

A later build goes on with the files of an unfinished index.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from treegraft import SettingError
from treegraft.extras.search.corpus import checksum
from treegraft.parts import files

SMALL_BYTES = 1 << 26
"""Corpora up to this size are recognised by their contents; larger ones, which it takes minutes to
read, by size and time."""
_RECORD = "index.json"

_log = logging.getLogger(__name__)


def index_home(corpus: Path, kind: str, index_dir: str) -> Path:
    """Returns the folder for the indexes of this kind over a corpus, which can be written to unless
    it holds an index.

    Args:
        index_dir: the user's choice; empty means the folder of the corpus.

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
    """Returns the folder with the index of this corpus; if there is none, `make` fills it.

    Only one process builds it; others wait for it.

    Args:
        recipe: everything that the index depends on, apart from the corpus.
        make: fills the folder it is given, in which an earlier attempt may have left files.
    """
    state = corpus.stat()
    is_small = state.st_size <= SMALL_BYTES
    content = checksum(corpus) if is_small else f"{state.st_size} {state.st_mtime_ns}"
    # Another encoder or layout has a folder of its own, so that old indexes stay usable.
    named = json.dumps([content, dict(recipe)], sort_keys=True)
    folder = home / hashlib.blake2b(named.encode(), digest_size=8).hexdigest()
    if (folder / _RECORD).exists():
        return folder
    with files.open_own(home / ".lock") as lock:
        # The kernel releases the lock when its process dies, so no stale lock can stay.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("waiting for another process that builds the index '%s'", home)
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have built it meanwhile.
        if (folder / _RECORD).exists():
            return folder
        if any(one.is_symlink() for one in (folder, *folder.glob("*"))):
            # Made by somebody else: writing here would write to what the links lead to.
            files.remove_folder(folder)
        folder.mkdir(exist_ok=True)
        make(folder)
        files.write_atomically(folder / _RECORD, json.dumps({"corpus": str(corpus.resolve())}))
    return folder


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Writing is the only sure test: permission bits say nothing about read-only mounts.
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
