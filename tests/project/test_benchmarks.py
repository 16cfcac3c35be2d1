"""The benchmark scripts import, and the demo's seeds are its commands'."""

from __future__ import annotations

import importlib
import json
import logging
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks import alarms, demo, house
from benchmarks.walk import Code, stays_of
from tests.support.tiny import write_recipe

from treegraft.settings.load import load_config
from treegraft.train import train

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if path.name not in ("__main__.py", "trl_peer.py")  # one runs, one needs TRL
)


@pytest.mark.parametrize("module", MODULES)
def test_each_script_imports(module: str) -> None:
    importlib.import_module(module)


SHORT = ("run.num_updates=1", "tasks.num_eval=4")
RECIPE = ROOT / "recipes" / "demo.toml"


@pytest.fixture
def small_demo(tmp_path: Path) -> Iterator[Path]:
    """The demo's recipe at the size of two trees of a small model."""
    recipe = tomllib.loads(RECIPE.read_text(encoding="utf-8"))
    recipe["model"]["tiny"] |= {"hidden_size": 32, "num_layers": 1, "intermediate_size": 64}
    recipe["run"] |= {"tasks_per_update": 2}
    recipe["tasks"] |= {"num_train": 16}
    recipe["rollout"] |= {"max_completion_tokens": 40}
    recipe["warmup"] |= {"num_steps": 2, "batch_size": 8}
    del recipe["smoke"]
    disabled = logging.root.manager.disable
    yield write_recipe(tmp_path / "small.json", recipe)
    logging.disable(disabled)


@pytest.mark.smoke
def test_seeds_of_the_demo_are_what_its_commands_give(
    small_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warm-up for both methods and one evaluation give what a whole run gives."""
    monkeypatch.setattr(demo, "RESULTS", tmp_path / "demo.jsonl")
    monkeypatch.setattr(demo, "LAST_ONLY", (*demo.LAST_ONLY, *SHORT))
    monkeypatch.setattr(demo, "RECIPE", small_demo)
    found = demo.run_seed(3, list(demo.METHODS), tmp_path)
    for line, overrides in zip(found, demo.METHODS.values(), strict=True):
        common = ["run.seed=3", f"run.dir={tmp_path}", *SHORT]
        metrics = train(load_config(small_demo, [*common, *overrides]), display=False).metrics
        assert line[demo.ACCURACY] == metrics[demo.ACCURACY]
        assert line[demo.TOKENS] == metrics[demo.TOKENS] > 0
    text = "".join(json.dumps(line) + "\n" for line in found)
    demo.RESULTS.write_text(text, encoding="utf-8")
    names = [row.split(" | ")[0] for row in demo.table()][2:]
    assert names == [f"| {method}" for method in demo.METHODS]


def test_a_collapse_is_a_fall_below_half_of_the_best_mean_of_three() -> None:
    # Means of three from the third on: .6, .6, .5, .3, .2; .2 is the first below .3.
    assert alarms.collapse_of([0.6, 0.6, 0.6, 0.6, 0.3, 0.0, 0.3]) == 7
    assert alarms.collapse_of([0.1, 0.2, 0.3, 0.4]) is None
    assert alarms.collapse_of([0.9, 0.1]) is None


def test_a_warning_counts_before_a_collapse_and_as_a_false_alarm_without_one() -> None:
    runs = [
        alarms.Run(1.0, 0, 8, {"early": 5, "late": 8}),
        alarms.Run(1.0, 1, 9, {"early": 8}),
        alarms.Run(0.1, 0, None, {"early": 1}),
    ]
    rows = alarms.table(runs)
    assert rows[2:] == ["| early | 2 | 2 | 1 |", "| late | 0 | - | 0 |"]


def test_a_walk_counts_each_parameter_that_receives_the_value_or_a_part_of_it() -> None:
    """Through calls, `with`, fields and constructors; not into the files where it ends."""
    begin = """
from treegraft.store import Store, write
class Run:
    def __init__(self, folder: str) -> None:
        self.folder, self.config = folder, Config()
class Config:
    pass
def train(run: Run, other: int) -> None:
    told = run.config
    with Store(told) as store:
        store.fill(run.folder, other)
    write(to=run.folder, what=other)
"""
    store = """
from treegraft.end import keep
class Store:
    def __init__(self, config) -> None:
        self.config = config
    def fill(self, folder, num) -> None:
        keep(self.config, num)
def write(to, what) -> None:
    pass
"""
    end = "def keep(config, num):\n    deeper(config)\ndef deeper(config):\n    pass\n"
    code = Code({"begin": begin, "store": store, "end": end})
    stays = {
        (("begin", "train"), "run"),
        (("store", "Store.__init__"), "config"),
        (("store", "Store.fill"), "folder"),
        (("store", "write"), "to"),
        (("end", "keep"), "config"),
    }
    start = (("begin", "train"), "run")
    assert stays_of(code, start, lambda module: module == "end") == stays
    assert stays_of(code, start, lambda _: False) == {*stays, (("end", "deeper"), "config")}


@pytest.mark.smoke
def test_the_story_of_this_tree_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["house", "--story"])
    house.main()
    rows = [line.split(" | ")[1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(rows) == 5
    assert all(int(row.split(",")[0].split(" ")[0]) > 0 for row in rows)
