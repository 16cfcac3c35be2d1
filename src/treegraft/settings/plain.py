"""Values of recipes and overrides before their meaning is known: read from TOML or JSON, and within
limits that every setting shares."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treegraft.core.errors import SettingError, nearest
from treegraft.core.shipped import FOLDERS, Kind, by_name

MAX_BYTES = 1_000_000
"""Largest recipe; ours have some thousand."""
MAX_DEPTH = 16
"""Deepest nesting of tables and lists, more than any setting has."""
MAX_SHOWN = 200
"""Characters of a value that a message repeats."""


def shown(value: Any) -> str:
    """Returns a value as Python writes it, cut where it is long."""
    return shortened(repr(value))


def shortened(text: str) -> str:
    """Returns the text, cut where it is long."""
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[:MAX_SHOWN]}… ({len(text):,} characters)"


def faults_of(value: Any, name: str = "") -> Iterator[str]:
    """Yields a phrase for each part of a value that no setting can have: "'run.seed' is an integer
    of more than 64 bits"."""
    left = [(name, value, 0)]
    while left:
        name, value, depth = left.pop()
        said = f"'{shortened(name)}'" if name else "the whole"
        if depth > MAX_DEPTH:
            yield f"{said} is nested more than {MAX_DEPTH} deep"
        elif isinstance(value, Mapping):
            bad = [key for key in value if not is_text(key)]
            yield from (f"{said} has the key {shown(key)}, which is not valid text" for key in bad)
            inner = ((f"{name}.{key}" if name else key, one) for key, one in value.items())
            left += [(path, one, depth + 1) for path, one in inner]
        elif isinstance(value, list):
            left += [(f"{name}[{place}]", one, depth + 1) for place, one in enumerate(value)]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            yield f"{said} is an integer of more than 64 bits"
        elif isinstance(value, str) and not is_text(value):
            yield f"{said} is {shown(value)}, which is not valid text"


def is_text(value: str) -> bool:
    """Returns whether a text can be written: no half of a surrogate pair, as a shell passes for
    bytes that are not UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


_BARE = re.compile(r"(?<![\w.])\.(?=\d+$)")
"""The point of a number without a digit before it, which TOML does not allow."""


_NO_KEYS = re.compile(
    r'''"""(?:[^\\]|\\.)*?(?:"""|\Z)|\'{3}.*?(?:\'{3}|\Z)|"(?:[^"\\\n]|\\.)*"?|\'[^\'\n]*\'?'''
    r"|\#[^\n]*|[\w \t-]+",
    re.DOTALL,
)
"""Texts, comments and names: without them, a dotted key is a row of dots."""


def _parsed(text: str) -> dict[str, Any]:
    """The tables of TOML; raises RecursionError before it reads a key of too many dots, for which
    tomllib takes memory with the square of their number."""
    if "." * (MAX_DEPTH + 1) in _NO_KEYS.sub("", text):
        raise RecursionError
    return tomllib.loads(text)


def parse_value(text: str) -> Any:
    """Returns the value of a TOML literal or of a number such as .5, else the text itself.

    Raises:
        SettingError: numbers too long or lists too deep to be read.
    """
    try:
        parsed = _parsed(f"value = {_BARE.sub('0.', text.strip())}")
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError) as error:
        raise SettingError(f"got {shown(text)}: {_why(error)}.", code="value-unreadable") from error
    # A text with a line break could hold further keys.
    return parsed["value"] if set(parsed) == {"value"} else text


def read_tables(path: Path, kind: Kind = "recipe") -> dict[str, Any]:
    """Returns the tables of a recipe or study (.toml) or of resolved settings (.json).

    Raises:
        SettingError: no such file, one that cannot be read, or other contents.
    """
    language = "JSON" if path.suffix == ".json" else "TOML"
    text = _read(path, kind)
    try:
        data: Any = json.loads(text) if language == "JSON" else _parsed(text)
    except (ValueError, RecursionError) as error:
        raise SettingError(
            f"{kind} '{path}' is not valid {language}: {_why(error)}. Texts need quotes, lists"
            " square brackets.",
            code="file-syntax",
        ) from error
    if not isinstance(data, dict):
        raise SettingError(
            f"{kind} '{path}': got a {type(data).__name__}, expected tables of settings.",
            code="file-no-tables",
        )
    return data


def _read(path: Path, kind: Kind) -> str:
    try:
        if not path.is_file():
            if str(path) not in by_name(kind):
                raise SettingError(f"{kind} '{path}' {_absence(path, kind)}", code="file-missing")
            path = by_name(kind)[str(path)]
        if path.stat().st_size > MAX_BYTES:
            raise SettingError(
                f"{kind} '{path}' has {path.stat().st_size:,} bytes, expected at most"
                f" {MAX_BYTES:,}; data belong into files that it names.",
                code="file-too-large",
            )
        # Windows' editors put a byte order mark first.
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SettingError(
            f"{kind} '{shortened(str(path))}' cannot be read: {error.strerror}.",
            code="settings-unreadable",
        ) from error
    except UnicodeDecodeError as error:
        raise SettingError(
            f"{kind} '{path}' is not text in UTF-8: {error.reason} at byte {error.start}.",
            code="file-not-utf8",
        ) from error


def _absence(path: Path, kind: Kind) -> str:
    """The rest of the sentence about a recipe or study that is not a file."""
    fault = "does not exist"
    if path.exists():
        fault = "is a folder" if path.is_dir() else "is not a regular file"
    folder = path.parent if path.parent.is_dir() else Path(FOLDERS[kind])
    others = [one for one in folder.glob("*.toml") if one.name != "pyproject.toml"]
    names = by_name(kind)
    hint = nearest(str(path), map(str, others)) or nearest(str(path.with_suffix("")), names)
    if path.stem in names:
        hint = (
            f" Treegraft ships a {kind} of this name; write '{path.stem}' without path and suffix."
        )
    elif not hint and names:
        hint = f" {FOLDERS[kind].capitalize()} that Treegraft ships: {', '.join(names)}."
    return f"{fault}; expected a .toml or .json file.{hint}"


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"nested too deeply, expected at most {MAX_DEPTH} tables and lists in one another"
    if "integer string conversion" in str(error):
        return "a number has too many digits, expected at most 64 bits"
    return str(error)
