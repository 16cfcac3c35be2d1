"""Addresses in settings. A recipe names secrets as ${NAME} and environment variables hold them, so
that no run folder, checkpoint, tracker or message has one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from treegraft.core.errors import SettingError

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_USER = re.compile(r"(?<=://)[^/?#@\s]+(?=@)")
_WORDS = r"(?:[\w-]*[-_])?(?:key|apikey|token|secret|password|passwd|pwd|auth|sig|signature)"
_QUERY = re.compile(rf"(?<=[?&]){_WORDS}=([^&#\s]+)", re.I)
HIDDEN = "***"


def redacted(text: str) -> str:
    """Returns the text with *** in place of users, passwords and keys in its addresses."""
    text = _USER.sub(lambda found: _hidden(found[0]), text)
    return _QUERY.sub(lambda found: found[0].replace(found[1], _hidden(found[1])), text)


def _hidden(secret: str) -> str:
    # The name of a variable is none, nor is "user:${PASSWORD}".
    return secret if _VARIABLE.search(secret) else HIDDEN


def public(value: Any) -> Any:
    """Returns a setting's value, nested ones included, with `redacted` texts."""
    if isinstance(value, Mapping):
        return {key: public(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [public(one) for one in value]
    # Numbers and switches hold no secret.
    return redacted(value) if isinstance(value, str) else value


def expanded(text: str, setting: str) -> str:
    """Returns an address with the values of the environment variables that it names.

    Raises:
        SettingError: one of them is not set.
    """
    # An empty variable counts as none: the address would lack its secret.
    for name in _VARIABLE.findall(text):
        if not os.environ.get(name):
            raise SettingError(
                f"{setting}: '{redacted(text)}' names the environment variable {name}, which is not"
                " set; set it, or write the address without it.",
                settings=[setting],
                code="address-variable-unset",
            )
    return _VARIABLE.sub(lambda found: os.environ[found[1]], text)
