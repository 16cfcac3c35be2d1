"""Packages that a feature needs beside the required ones, and the extra that brings each."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Final

from treegraft.core.errors import SettingError

_OF_EXTRA: Final = {
    "data": "datasets pyarrow",
    "gguf": "gguf",
    "math": "math_verify reasoning_gym",
    "mcp": "mcp",
    "sandbox": "pydantic_monty sympy",
    "search": "bm25s faiss sentence_transformers",
    "teacher": "openai",
    "templates": "renderers",
    "trackers": "tensorboard wandb",
    "web": "protego pypdf trafilatura",
}
OPTIONAL: Final[Mapping[str, tuple[str, str]]] = {
    module: ("faiss-cpu" if module == "faiss" else re.sub(r"[._]", "-", module), extra)
    for extra, modules in _OF_EXTRA.items()
    for module in modules.split()
}
"""By the name that is imported: the package, and the extra of `treegraft` that brings it."""


def is_installed(module: str) -> bool:
    """Returns whether a module can be found; only its parents are imported."""
    # A parent that cannot be imported is as good as missing.
    with contextlib.suppress(ImportError, ValueError):
        return sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None
    return False


def lacking(what: str, *modules: str) -> str:
    """Returns the sentence which says that `what` needs packages that are not installed, and how to
    install them; "" where all modules, names in `OPTIONAL`, are there."""
    missing = [OPTIONAL[one] for one in modules if not is_installed(one)]
    # One command, whatever the packages: pip resolves them together.
    extras = sorted({extra for _, extra in missing})
    command = f"treegraft[{','.join(extras)}]"
    return not_installed(what, [package for package, _ in missing], command) if missing else ""


def not_installed(what: str, packages: Iterable[str], install: str) -> str:
    """Returns the same sentence for packages by name, and what pip installs them by."""
    return f"{what} needs {' and '.join(packages)} (not installed); run: pip install '{install}'"


def require(what: str, *modules: str) -> None:
    """Raises `SettingError` with the sentence of `lacking` where a module is missing."""
    if text := lacking(what, *modules):
        raise SettingError(text, code="package-missing")
