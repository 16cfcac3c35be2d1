"""A client of OpenAI-compatible chat endpoints."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from treegraft.core.errors import SettingError

if TYPE_CHECKING:
    pass


def api_root(url: str, option: str = "--agent") -> str:
    """Returns the address below which the routes lie: http://host:8000 gives http://host:8000/v1.

    Args:
        option: what the command line calls the address.

    Raises:
        SettingError: not a http(s) address.
    """
    try:
        parts = urlsplit(url)
        is_good = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        )
    except ValueError:
        is_good = False
    if not is_good:
        raise SettingError(
            f"{option} '{url}' is not the address of a server; expected one such as"
            " http://127.0.0.1:8000/v1"
        )
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def api_key_from(variable: str | None, option: str = "--api-key-env") -> str | None:
    """Returns the key in an environment variable, None where no variable is named. Raises
    SettingError where it is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise SettingError(
            f"{option} {variable}: that environment variable is not set; expected the server's key"
            " in it"
        )
    return key
