"""Recipes that build on others, their smoke tests, and paths beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from treegraft.core.errors import SettingError
from treegraft.core.shipped import shipped_recipes
from treegraft.settings.load import load_config
from treegraft.settings.recipe import merged


def write(folder: Path, **recipes: str) -> None:
    for name, text in recipes.items():
        (folder / f"{name}.toml").write_text(text)


def test_a_recipe_is_put_over_its_base(tmp_path: Path) -> None:
    write(
        tmp_path,
        first='[learn]\nlr = 1e-4\nnum_epochs = 3\n[explore]\nexplorers = ["entropy", "graft"]\n'
        '[buffer]\npath = "$RECIPE_DIR/traces"\n',
        second='base = "first.toml"\n[learn]\nlr = 1e-5\n[explore]\nexplorers = ["graft"]\n',
    )
    config = load_config(tmp_path / "second.toml", ["learn.num_epochs=2"])
    assert (config.learn.lr, config.learn.num_epochs) == (1e-5, 2)
    assert config.explore.explorers == ["graft"]
    assert config.buffer.path == f"{tmp_path}/traces"


def test_the_smoke_test_of_a_recipe_and_of_its_base(tmp_path: Path) -> None:
    write(
        tmp_path,
        first="[run]\nnum_updates = 100\n[smoke.run]\nnum_updates = 1\ntasks_per_update = 2\n",
        second='base = "first.toml"\n[run]\nnum_updates = 50\n[smoke.run]\ntasks_per_update = 3\n',
    )
    whole, small = (load_config(tmp_path / "second.toml", smoke=one) for one in (False, True))
    assert (whole.run.num_updates, whole.run.tasks_per_update) == (50, 12)
    assert (small.run.num_updates, small.run.tasks_per_update) == (1, 3)
    # What is typed counts above both.
    assert load_config(tmp_path / "first.toml", ["num_updates=7"], smoke=True).run.num_updates == 7


@pytest.mark.parametrize(
    ("text", "smoke", "part"),
    [
        ("[run]\n", True, "has no table [smoke]"),
        ("[smoke.run]\nnum_update = 1\n", False, "unknown setting 'smoke.run.num_update'"),
        ("smoke = 3\n", False, "'smoke': got 3, expected a table"),
        ("base = 3\n", False, "'base': got 3, expected the path of a recipe"),
        ('base = "other.toml"\n', False, "own.toml: 'base': got 'other.toml', which is neither"),
        ('base = "demos.toml"\n', False, "Did you mean 'demo'?"),
        ('base = "own.toml"\n', False, "in a circle, or more than 4 deep: own.toml -> own.toml"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, smoke: bool, part: str) -> None:
    write(tmp_path, own=text)
    with pytest.raises(SettingError) as error:
        load_config(tmp_path / "own.toml", smoke=smoke)
    assert part in str(error.value)


@pytest.mark.parametrize("base", ["demo", "demo.toml"])
def test_a_base_may_be_a_shipped_recipe_unless_a_file_has_its_name(
    tmp_path: Path, base: str
) -> None:
    write(tmp_path, own=f'base = "{base}"\n[learn]\nlr = 1e-5\n')
    found = load_config(tmp_path / "own.toml")
    assert found == load_config("demo", ["learn.lr=1e-5"])
    (tmp_path / base).write_text("[run]\nnum_updates = 77\n")
    assert load_config(tmp_path / "own.toml").run.num_updates == 77


def test_the_example_of_the_documentation_loads_in_any_folder(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs/recipes.md").read_text()
    write(tmp_path, my=page.partition("```toml\n")[2].partition("```")[0])
    config = load_config(tmp_path / "my.toml", smoke=True)
    assert config.buffer.path == f"{tmp_path}/traces.sqlite"
    assert (config.run.num_updates, config.run.tasks_per_update) == (1, 2)


def test_tables_are_merged_and_lists_replaced() -> None:
    first = {"a": {"b": 1, "c": [1, 2]}, "d": {"e": 1}}
    assert merged(first, {"a": {"c": [3]}, "d": 4}) == {"a": {"b": 1, "c": [3]}, "d": 4}
    assert first == {"a": {"b": 1, "c": [1, 2]}, "d": {"e": 1}}


def test_shipped_recipes_load() -> None:
    for name in shipped_recipes():
        load_config(name)
