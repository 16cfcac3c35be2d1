"""Values of recipes and overrides before their meaning is known: read from TOML or JSON, and within
limits that every setting shares."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from treegraft.core.errors import SettingError, nearest
from treegraft.core.shipped import FOLDERS, Kind, by_name

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


_TOO_LONG = "a number has too many digits, expected at most 64 bits"
MAX_DEPTH = 16
"""Deepest nesting of tables and lists, more than any setting has."""


def _checked(value: Any, left: int = MAX_DEPTH) -> Any:
    """The value itself; raises RecursionError before the functions that walk it down would, and
    ValueError for an integer that JSON or torch cannot hold."""
    if left < 0:
        raise RecursionError
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(_TOO_LONG)
    inner = value.values() if isinstance(value, dict) else value
    for one in inner if isinstance(value, dict | list) else ():
        _checked(one, left - 1)
    return value


_BARE = re.compile(r"(?<![\w.])\.(?=\d+$)")
"""The point of a number without a digit before it, which TOML does not allow."""


def parse_value(text: str) -> Any:
    """Returns the value of a TOML literal or of a number such as .5, else the text itself.

    Raises:
        SettingError: numbers too long or lists too deep to be read.
    """
    try:
        parsed = _checked(tomllib.loads(f"value = {_BARE.sub('0.', text.strip())}"))
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
        data = _checked(json.loads(text) if language == "JSON" else tomllib.loads(text))
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
    if not hint and names:
        hint = f" {FOLDERS[kind].capitalize()} that Treegraft ships: {', '.join(names)}."
    return f"{fault}; expected a .toml or .json file.{hint}"


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"nested too deeply, expected at most {MAX_DEPTH} tables and lists in one another"
    if "integer string conversion" in str(error):
        return _TOO_LONG
    return str(error)
