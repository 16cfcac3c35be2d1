"""The public names have types: a script of a user passes mypy --strict."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import treegraft

SCRIPT = Path(__file__).parent / "support" / "typed_use.py"
CACHE = Path(__file__).resolve().parents[1] / ".mypy_cache" / "typed_use"
"""Kept between runs: without it mypy reads torch for minutes."""


def test_the_script_names_all_of_the_root() -> None:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    imported = [
        one.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "treegraft"
        for one in node.names
    ]
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert sorted(imported) == treegraft.__all__ and set(imported) <= used


@pytest.mark.slow
def test_a_users_script_passes_mypy_strict(tmp_path: Path) -> None:
    reason = "mypy is not installed: pip install 'treegraft[dev]'"
    pytest.importorskip("mypy", reason=reason)
    assert (Path(treegraft.__file__).parent / "py.typed").is_file()
    # From another folder and without settings, as a user has it.
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--config-file",
            "",
            "--cache-dir",
            str(CACHE),
            str(SCRIPT),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
