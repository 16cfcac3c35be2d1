"""Trust on first use: the settings in a run folder or checkpoint name commands and Python objects,
so it is a program. One that this user neither made nor trusts is asked about before it acts.

The user's configuration folder has a list of checksums, one for each file of settings that is
trusted. Treegraft adds those that it writes.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from treegraft.core.addresses import redacted
from treegraft.core.errors import CheckpointError
from treegraft.core.files import leads_outside, parse_json
from treegraft.core.text import plain

_MOST_SHOWN = 4000
"""Characters of a list in a question: about a screen. The beginning of more would scroll away."""
_trusted_here: set[str] = set()
"""What this process trusts, also if nothing can be written to the user's list."""
_accepts = False


def list_path() -> Path:
    """Returns where the user's list of checksums is, or will be."""
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(folder).expanduser() / "treegraft" / "trusted"


def settings_of(checkpoint: Path) -> Path:
    """Returns the file of a checkpoint's settings."""
    return checkpoint / "treegraft" / "config.json"


def _read(path: Path) -> tuple[str, list[str]]:
    """Returns the checksum of a file of settings and of the code beside it, and what they may do.
    Raises OSError or ValueError: it is no such file."""
    if not path.is_file():  # a pipe would keep us waiting
        raise FileNotFoundError(path)
    data = path.read_bytes()
    settings = parse_json(data)
    acts = what_acts(settings)
    # A model whose code may run brings that code, and names it in its own files.
    if any("model.trust_remote_code" in line for line in acts) and path.parent.name == "treegraft":
        folder = path.parent.parent
        for file in sorted([*folder.rglob("*.py"), *folder.glob("*.json")]):
            checksum = hashlib.sha256(file.read_bytes()).hexdigest()
            acts.append(f"imports: {plain(str(file.relative_to(folder)))!r} ({checksum[:16]})")
            data += checksum.encode()
    return hashlib.sha256(data).hexdigest(), acts


def _remember(checksums: Iterable[str]) -> None:
    with suppress(OSError, RuntimeError):  # no home, or one that cannot be written to
        path = list_path()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("a") as file:
            file.writelines(f"{one}\n" for one in checksums if one not in _trusted_here)
    # Also if nothing could be written: else a run could not open its own folder.
    _trusted_here.update(checksums)


def remember(settings: Path) -> None:
    """Trusts a file of settings that this process has written."""
    with suppress(OSError, ValueError):
        _remember([_read(settings)[0]])


def is_trusted(settings: Path) -> bool:
    """Returns whether this user has made or trusted a file of settings, as it is now, or it does
    nothing. Raises OSError or ValueError: it is no such file."""
    checksum, acts = _read(settings)
    if not acts or checksum in _trusted_here:
        return True
    with suppress(OSError, RuntimeError, UnicodeDecodeError):
        return checksum in list_path().read_text().split()
    return False


def trust(folder: Path | str) -> None:
    """Trusts a run folder with its checkpoints, or a checkpoint, as it is now: what its settings
    name may run. A later change of it is asked about.

    Raises:
        CheckpointError: it is neither.
    """
    # Resolved, so that a link to a run folder trusts the folder and not the link.
    place = Path(folder).expanduser().resolve()
    paths = [settings_of(place)]
    if not paths[0].exists():
        paths = [place / "config.json", *map(settings_of, sorted(place.glob("checkpoints/*")))]
    found = []
    for path in paths:
        # What a link leads to is no part of this folder, and unreadable settings do nothing.
        with suppress(OSError, ValueError):
            if not leads_outside(path, place):
                found.append(_read(path)[0])
    if not found:
        raise CheckpointError(
            f"'{folder}' is neither a run folder nor a checkpoint of Treegraft.",
            code="trust-nothing",
        )
    _remember(found)


def accept(is_given: bool) -> None:
    """Trusts, or not, what the rest of this process opens: the option --trust."""
    global _accepts
    _accepts = is_given


def require_trust(settings: Path) -> None:
    """Returns if a file of settings is trusted, or there is none; asks at a terminal.

    Raises:
        CheckpointError: it is not trusted.
    """
    try:
        if is_trusted(settings):
            return
        checksum, acts = _read(settings)
    except (OSError, ValueError):  # nothing acts; who reads it next says what is missing or damaged
        return
    listed = "".join(f"\n  {line}" for line in acts)
    if is_long := len(listed) > _MOST_SHOWN:
        listed = f" {len(listed):,} characters, too many for a question. Read the file."
    fault = (
        f"{str(settings)!r} was not made by you, or has changed since: it is not in your list"
        f" ('{list_path()}'). What these settings may do:{listed}"
    )
    if _accepts or (not is_long and _says_yes(plain(fault))):
        _remember([checksum])
        # Somebody may have changed the file while the question was read.
        if is_trusted(settings):
            return
    folder = settings.resolve().parent
    if folder.name == "treegraft":
        folder = folder.parent
    raise CheckpointError(
        f"{fault}\nIf you trust where it comes from, say so with `treegraft --trust COMMAND`,"
        f" or in Python with treegraft.trust({str(folder)!r}).",
        code="folder-untrusted",
    )


def _says_yes(fault: str) -> bool:
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(f"{fault}\nGo on, and trust it from now on? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def what_acts(settings: Any) -> list[str]:
    """Returns a line for each value of settings that does something by its declaration, or that
    nothing declares, without repeats; what runs comes first."""
    from treegraft.settings.config import Config
    from treegraft.settings.table import Act, acting

    acts = get_args(Act)
    lines = set()
    whole = settings if isinstance(settings, Mapping) else {"": settings}
    for act, name, value in acting(Config, whole):
        # Also what cannot be printed is told by it.
        shown = redacted(repr(value)) if act == "sends" else repr(value)
        lines.add((acts.index(act), f"{act}: {name} = {shown}"))
    return [line for _, line in sorted(lines)]
