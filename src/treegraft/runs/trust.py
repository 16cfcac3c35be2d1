"""Trust on first use: the settings in a run folder or checkpoint name commands and Python objects,
so it is a program. One that this user did not make is asked about before it acts.

What Treegraft writes carries a mark: HMAC-SHA256 of the settings (and, of a checkpoint, of the
checksums of all its files) under a key in the user's configuration folder.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from treegraft.core.addresses import redacted
from treegraft.core.errors import CheckpointError
from treegraft.core.files import parse_json, write_atomically
from treegraft.core.text import plain

KEY_PATH = "TREEGRAFT_TRUST_KEY"
"""Environment variable: the key's file, for machines that share run folders but no home."""
_TRUSTED = "TREEGRAFT_TRUSTED"
"""Environment variable: what this process trusts beside the marks, for processes that it starts."""
RUN = ("config.json",)
CHECKPOINT = ("treegraft/config.json", "treegraft/state.json")
"""Files that a mark is of. The state of a checkpoint holds the checksums of its other files."""
Marked = tuple[str, ...]
_MOST_SHOWN = 4000
"""Characters of a list in a question: about a screen. The beginning of more would scroll away."""
_accepts = False


def key_path() -> Path:
    """Returns where this user's key lies, or will lie."""
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(os.environ.get(KEY_PATH) or f"{folder}/treegraft/trust.key").expanduser()


def _key() -> bytes:
    """The key, made where there is none. Raises OSError: it cannot be made, or others can read
    it."""
    path = key_path()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Made aside and linked: two processes that begin at once get one key, and a whole one.
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        with suppress(FileExistsError):
            os.link(partial, path)
        partial.unlink()
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(
                f"'{path}' can be read by others; expected mode 600 and you as its owner. Make a"
                " new one: remove it"
            )
        key = file.read()
    if len(key) < 32:
        raise OSError(f"'{path}' holds {len(key)} bytes; expected 32. Remove it")
    return key


def key_problem() -> str:
    """Returns a sentence for a user whose key cannot be made or read; "" where all is well."""
    try:
        _key()
    except (OSError, RuntimeError) as error:
        return (
            f"run folders get no mark of yours ({error}), so going on with them needs --trust."
            f" {KEY_PATH} names another file for the key"
        )
    return ""


def _mark_path(folder: Path, of: Marked) -> Path:
    return (folder / of[0]).with_name(".trust")


def _read(path: Path) -> bytes:
    """Returns what a plain file holds. Raises OSError: it is none; a pipe would keep us waiting."""
    if not path.is_file():
        raise FileNotFoundError(path)
    return path.read_bytes()


def _content(folder: Path, of: Marked) -> bytes:
    return b"".join(
        hashlib.sha256(f"{name}\0".encode() + _read(folder / name)).digest() for name in of
    )


def _sign(path: Path, content: bytes) -> None:
    """Writes a mark; without a key, or where nothing can be written, there is none."""
    with suppress(OSError, RuntimeError):
        write_atomically(path, hmac.new(_key(), content, "sha256").hexdigest())


def mark(folder: Path, of: Marked) -> None:
    """Marks a folder that this process has written; without a key it stays without a mark."""
    with suppress(OSError):
        _sign(_mark_path(folder, of), _content(folder, of))


def is_trusted(folder: Path, of: Marked) -> bool:
    """Returns whether this user made the folder or has trusted it, and nothing has changed since.
    Raises OSError: it has no such files."""
    content = _content(folder, of)
    if hashlib.sha256(content).hexdigest() in os.environ.get(_TRUSTED, "").split():
        return True
    with suppress(OSError, RuntimeError, ValueError):
        found = _read(_mark_path(folder, of)).decode("ascii")
        return hmac.compare_digest(found, hmac.new(_key(), content, "sha256").hexdigest())
    return False


def _seen(folder: Path) -> list[tuple[Path, bytes, Any]]:
    """Of a run folder with its checkpoints, or of a checkpoint: where each mark goes, what it is
    of, and the settings. Unreadable ones are left out, and what a link in the folder leads to."""
    place = folder.resolve()
    found = []
    of = CHECKPOINT if (place / CHECKPOINT[1]).exists() else RUN
    below = [(one, CHECKPOINT) for one in sorted(place.glob("checkpoints/*"))]
    for one, names in [(place, of), *below]:
        path = _mark_path(one, names)
        with suppress(OSError, ValueError):
            if path.parent == path.parent.resolve():
                settings = parse_json(_read(one / names[0]))
                found.append((path, _content(one, names), settings))
    return found


def trust(folder: Path | str) -> None:
    """Trusts a run folder with its checkpoints, or a checkpoint, as it is now: what its settings
    name may run. A later change of it is asked about.

    Raises:
        CheckpointError: it is neither.
    """
    seen = _seen(Path(folder).expanduser())
    if not seen:
        raise CheckpointError(
            f"'{folder}' is neither a run folder nor a checkpoint of Treegraft.",
            code="trust-nothing",
        )
    _trust(seen)


def _trust(seen: Sequence[tuple[Path, bytes, Any]]) -> None:
    for path, content, _ in seen:
        digest = hashlib.sha256(content).hexdigest()
        # Also where the folder cannot be written to, and in the processes that this one starts.
        os.environ[_TRUSTED] = f"{os.environ.get(_TRUSTED, '')} {digest}".strip()
        _sign(path, content)


def accept(is_given: bool) -> bool:
    """Trusts, or not, what the rest of this process opens: the option --trust; returns it."""
    global _accepts
    _accepts = is_given
    return is_given


def require_trust(folder: Path, of: Marked) -> None:
    """Returns where a folder is trusted, or has no settings; asks at a terminal.

    Raises:
        CheckpointError: it is not trusted.
    """
    try:
        if is_trusted(folder, of):
            return
        parse_json(_read(folder / of[0]))
    except (OSError, ValueError):  # nothing acts; who reads it next says what is missing or damaged
        return
    whole = folder.resolve()
    run = whole.parent.parent
    if of == CHECKPOINT and whole.parent.name == "checkpoints" and (run / RUN[0]).is_file():
        whole = run
    # What is trusted together is read once, and shown together.
    seen = _seen(whole)
    listed = "".join(f"\n  {line}" for line in what_acts(*(settings for _, _, settings in seen)))
    if is_long := len(listed) > _MOST_SHOWN:
        listed = f" {len(listed):,} characters, too many for a question. Read it in config.json"
        listed += " there, and in treegraft/config.json of each checkpoint."
    fault = (
        f"{str(folder)!r} was not made by you, or has changed since: it has no mark under your key"
        f" ('{key_path()}'). What the settings in {str(whole)!r} and its checkpoints may do:"
        f"{listed or ' nothing.'}"
    )
    if _accepts or (not is_long and _says_yes(plain(fault))):
        _trust(seen)
        if is_trusted(folder, of):
            return
    raise CheckpointError(
        f"{fault}\nIf you trust where it comes from, say so with --trust, or in Python with"
        f" treegraft.trust({str(whole)!r}).",
        code="folder-untrusted",
    )


def _says_yes(fault: str) -> bool:
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(f"{fault}\nGo on, and trust it from now on? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def what_acts(*settings: Any) -> list[str]:
    """Returns a line for each value of settings that does something by its declaration, or that
    nothing declares, without repeats; what runs comes first."""
    from treegraft.settings.config import Config
    from treegraft.settings.table import Act, acting

    acts, found = get_args(Act), set()
    for one in settings:
        for act, name, value in acting(Config, one if isinstance(one, Mapping) else {"": one}):
            # Also what cannot be printed is told by it.
            shown = redacted(repr(value)) if act == "sends" else repr(value)
            found.add((acts.index(act), f"{act}: {name} = {shown}"))
    return [line for _, line in sorted(found)]
