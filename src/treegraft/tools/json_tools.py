"""Tools that a server describes by name and JSON schema: their tags, signatures and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from treegraft.core.errors import ToolError
from treegraft.core.interfaces import Signature

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def tag_of(name: str) -> str:
    """Returns a server's name of a tool in lower-case letters and underscores, as a tag needs it:
    readFile2 gives read_file_two."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    # Spelled out, not dropped: two tools may differ by a digit alone.
    spelled = re.sub(r"[0-9]", lambda digit: f"_{_DIGITS[int(digit[0])]}_", parted)
    return re.sub(r"[^a-z]+", "_", spelled.lower()).strip("_") or "tool"


def signature_from(schema: Mapping[str, Any]) -> Signature:
    """Returns the signature of a tool with this JSON schema; a single text is a call's whole
    body."""
    # A single text needs no JSON around it, which small models write badly.
    properties = schema.get("properties") or {}
    single = next(iter(properties)) if len(properties) == 1 else ""
    described = properties.get(single)
    is_text = isinstance(described, Mapping) and described.get("type") == "string"
    return Signature(dict(schema), single if is_text else None)


def arguments_from(body: str, signature: Signature, name: str) -> dict[str, Any]:
    """Returns the arguments of a call; none for an empty body.

    Raises `ToolError`, with the tool's name, for a body that is no JSON object.
    """
    if (parameter := signature.text_parameter) is not None:
        return {parameter: body} if body.strip() or signature.requires(parameter) else {}
    needs = f"{name} needs a JSON object of its arguments"
    arguments = read_json(body, needs) if body.strip() else {}
    if not isinstance(arguments, dict):
        raise ToolError(f"{needs}; got {type(arguments).__name__}")
    return arguments


def read_json(body: str, needs: str) -> Any:
    """Returns a call's body as JSON. Raises `ToolError`, which begins with `needs`, for other
    texts."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"{needs}; this is not JSON: {error}") from None
