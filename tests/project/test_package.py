"""The wheel: built from this source, installed into a folder of its own, used in an empty one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from tests.support.forked import Forked

from treegraft.core.shipped import shipped, shipped_recipes

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "run.num_updates=2",
    "run.tasks_per_update=2",
    "run.name=first",
    "explore.num_leaves=4",
    "tasks.num_train=8",
    "tasks.num_eval=4",
    "warmup.num_steps=2",
    "warmup.batch_size=2",
    "warmup.lr_warmup_steps=0",
    "eval.at_start=false",
    "eval.every=0",
)
"""Settings with which the demo takes a second."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("hatchling", "hatch_fancy_pypi_readme"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'treegraft[dev]'")
    place = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (built,) = place.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def treegraft(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the installed wheel in an empty folder."""
    installed = tmp_path_factory.mktemp("installed")
    folder = tmp_path_factory.mktemp("empty")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, "--target", str(installed), str(wheel)], check=True, timeout=120)

    environment = {**os.environ, "PYTHONPATH": str(installed)}
    where = [sys.executable, "-c", "import treegraft; print(treegraft.__file__)"]
    found = subprocess.check_output(where, env=environment, cwd=folder, text=True)
    assert found.startswith(str(installed))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = ["treegraft", *arguments]
        with Forked(words, cwd=folder, env=environment, is_fresh=True) as process:
            said = process.communicate(timeout=300)
            return subprocess.CompletedProcess(words, process.wait(), *said)

    return run


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_holds_the_package_the_recipes_and_the_examples(wheel: Path) -> None:
    def below(folder: Path, inside: str) -> set[str]:
        found = (path for path in folder.rglob("*") if path.is_file())
        return {
            f"{inside}/{path.relative_to(folder).as_posix()}"
            for path in found
            if not {"__pycache__", ".pytest_cache", ".mypy_cache"} & set(path.parts)
        }

    expected = (
        below(ROOT / "src" / "treegraft", "treegraft")
        | below(ROOT / "recipes", "treegraft/recipes")
        | below(ROOT / "examples", "treegraft/examples")
    )
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected
    assert "treegraft/recipes/demo.toml" in held and "treegraft/policy/kernels/engine.c" in held


def test_an_index_shows_authors_papers_and_a_page_without_dead_links(wheel: Path) -> None:
    fields = metadata(wheel)
    assert fields["Author"] and len(fields.get_all("Project-URL") or ()) >= 2
    page = str(fields.get_payload())
    assert page.startswith("# Treegraft\n")
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    assert targets and all(target.startswith("https://") for target in targets)
    # The words of a link stay.
    assert "[Which method]" not in page and "Which method" in page


@pytest.mark.smoke
def test_the_demo_is_trained_viewed_and_reported_without_the_repository(
    treegraft: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    trained = treegraft("train", "demo", *SMALL)
    assert trained.returncode == 0, trained.stderr
    assert "update 2/2" in trained.stdout and "finished runs/first" in trained.stdout
    viewed = treegraft("view", "runs/first", "--text", "update-000002/0")
    assert viewed.returncode == 0 and "the best by reward" in viewed.stdout, viewed.stderr
    pytest.importorskip("matplotlib", reason="the extra 'report' is not installed")
    reported = treegraft("report", "runs/first")
    assert reported.returncode == 0 and "runs/first/figures" in reported.stdout, reported.stderr


@pytest.mark.smoke
def test_a_recipe_of_the_repository_leads_to_the_shipped_one(
    treegraft: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    refused = treegraft("train", "recipes/demo.toml")
    assert refused.returncode == 2
    assert "Did you mean 'demo'?" in refused.stderr
    refused = treegraft("train", "mine.toml")
    assert "Recipes that Treegraft ships: babyai, demo, " in refused.stderr


def test_a_clone_finds_its_own_recipes() -> None:
    assert shipped("recipes").is_dir() and shipped("examples").is_dir()
    worlds = set((ROOT / "examples" / "environments").glob("*.toml"))
    assert set((ROOT / "recipes").rglob("*.toml")) | worlds == set(shipped_recipes().values())


@pytest.mark.smoke
def test_an_example_environment_is_found_without_the_repository(
    treegraft: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    trained = treegraft("train", "sokoban", "--smoke", "run.name=boards")
    assert trained.returncode == 0, trained.stderr
    assert "finished runs/boards" in trained.stdout
