"""README and docs/ show the truth: blocks marked runnable run, and the commands, settings, metrics
and files they name exist.

A block of Python or TOML that begins with a comment naming a file becomes that file; any other
Python block is executed. Recipes are trained for one update with a tiny random model, or, where
they name files of tasks, their tasks are read.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from benchmarks import demo, readme
from tests.support.pages import DOCS, PAGES, README, ROOT, file_name, printed, runnable

from treegraft.core.errors import SettingError
from treegraft.runs.metrics import find_meaning
from treegraft.runs.record import read_trees
from treegraft.settings.config import Config
from treegraft.settings.load import load_config
from treegraft.settings.table import value_of
from treegraft.tasks.build import build_tasks
from treegraft.tasks.rewards import build_rewards, check_rewards
from treegraft.tools.build import build_tools

PAGE = README.read_text(encoding="utf-8")
ALL = "\n".join(PAGES.values())

SMALL: dict[str, Any] = {
    "run.num_updates": 1,
    "run.tasks_per_update": 2,
    "model.tiny.hidden_size": 16,
    "model.tiny.intermediate_size": 16,
    "format.system_prompt": "",
    "rollout.max_completion_tokens": 16,
    "eval.every": 0,
    "eval.at_start": False,
    "eval.at_end": False,
}
"""So that a recipe of the page is done in a second; the page's own settings stay as they are."""
WARMUP = {"warmup.num_steps": 2, "warmup.batch_size": 4, "warmup.lr_warmup_steps": 0}
"""The same for a recipe that begins with a warm-up."""


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=() if place.startswith("README") else pytest.mark.smoke)
        for place in runnable()
    ],
)
def test_section_runs(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    recipes: list[str] = []
    # As in a notebook, a block goes on from those before it.
    names: dict[str, Any] = {}
    for language, block in runnable()[place]:
        name = file_name(block)
        if name is not None:
            (tmp_path / name).write_text(block, encoding="utf-8")
            recipes += [name] if language == "toml" else []
        else:
            exec(compile(block, place, "exec"), names)
            assert capsys.readouterr().out.strip()
    for recipe in recipes:
        config = load_config(recipe)
        skip_without_sandbox(config)
        if config.tasks.kind == "dataset":
            read_the_tasks(recipe, tmp_path, monkeypatch)
        else:
            train_small(recipe, tmp_path)


def skip_without_sandbox(config: Config) -> None:
    """A machine without bubblewrap cannot show that tool."""
    from treegraft.extras.python.bwrap import find_problem

    if config.tools.python.backend == "bwrap" and (problem := find_problem()):
        pytest.skip(problem)


def read_the_tasks(recipe: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the files that the recipe names, with the columns that it names, and reads them; its
    own parts are found."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "question": f"{n} + 1?",
            "prompt": [{"role": "user", "content": f"{n} + 1?"}],
            "solution": n + 1,
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"answer": str(n + 1)},
        }
        for n in range(3)
    ]
    pq.write_table(pa.Table.from_pylist(rows[:2]), folder / "train.parquet")
    (folder / "train.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows[:2]), encoding="utf-8"
    )
    (folder / "test.jsonl").write_text(json.dumps(rows[2]) + "\n", encoding="utf-8")
    monkeypatch.setenv("MY_DATA", str(folder))
    config = load_config(recipe)
    assert build_tools(config.tools, ())
    source = build_tasks(config.tasks, 0)
    check_rewards(build_rewards(config.reward), source.train_tasks())
    assert [(task.question, task.reference) for task in source.train_tasks()] == [
        ("0 + 1?", ("1",)),
        ("1 + 1?", ("2",)),
    ]
    assert [task.reference for task in source.eval_tasks()] == [("3",)]


def train_small(recipe: str, folder: Path) -> None:
    """Trains the recipe for one update and looks for its parts in the record."""
    from treegraft.train import train

    small = SMALL | (WARMUP if load_config(recipe).warmup.num_steps else {})
    config = load_config(recipe, [f"{name}={json.dumps(value)}" for name, value in small.items()])
    trees = read_trees(train(config).run_dir)
    parts = {name for tree in trees for leaf in tree.leaves for name in leaf.reward_parts}
    assert parts == set(config.reward.funcs)
    if config.explore.explorers != ["independent"]:
        assert all(
            config.explore.num_leaves // 2 <= len(tree.leaves) <= config.explore.num_leaves
            for tree in trees
        )


def test_settings_named_on_the_pages_exist() -> None:
    from treegraft.settings.config import known_settings

    names = set(known_settings())
    names |= {name.rpartition(".")[0] for name in names}
    named = set(re.findall(rf"`((?:{'|'.join(Config.model_fields)})\.[a-z_.]+)(?: ?=[^`]*)?`", ALL))
    of_verl = {"rollout.n", "rollout.val_kwargs"}
    assert named - names == of_verl


def test_metrics_named_on_the_pages_exist() -> None:
    groups = "reward|eval|rollout|branch|graft|retrieve|buffer|learn|time|tools|warmup"
    named = set(re.findall(rf"`((?:{groups})/[a-z_{{}}]+)`", ALL))
    assert named and {key for key in named if find_meaning(key) is None} == set()


def test_settings_by_task_are_taken() -> None:
    """The examples of a row are settings that exist with values that they take, and have an
    effect."""
    rows = [
        re.findall(r"`(\w+(?:\.\w+)+)=([^`]+)`", line)
        for line in PAGES["reference.md"].partition("## Settings for a wish")[2].splitlines()
        if line.startswith("| ")
    ]
    rows = [row for row in rows if row]
    assert rows
    for row in rows:
        config = load_config(
            {"model": {"path": "owner/name"}}, [f"{name}={value}" for name, value in row]
        )
        for name, value in row:
            assert value_of(config, name) == tomllib.loads(f"value = {value}")["value"], name


def test_recipes_of_the_table_exist() -> None:
    listed = set(re.findall(r"^\| `(\w+\.toml)` \|", ALL, re.M))
    assert listed == {path.name for path in (ROOT / "recipes").glob("*.toml")}


def test_refusals_of_the_pages_are_what_is_printed() -> None:
    shown = [
        line
        for block in re.findall(r"<!-- refused -->\n```text\n(.*?)```", ALL, re.S)
        for line in block.splitlines()
    ]
    assert len(shown) >= 4
    for command, answer in zip(shown[::2], shown[1::2], strict=True):
        recipe, *overrides = shlex.split(command.removeprefix("$ "))[2:]
        with pytest.raises(SettingError) as caught:
            load_config(ROOT / recipe, overrides)
        assert answer == f"error: {caught.value}"


def test_the_table_of_the_demo_is_that_of_its_runs() -> None:
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    section = results.split("## The demo\n")[1].split("\n## ")[0]
    assert [row for row in section.splitlines() if row.startswith("|")] == list(demo.table())
    # What `make demo` prints comes from the same runs.
    printed = [row for row in demo.ranges() if row.startswith(" ")]
    assert [row.split("  ")[1] for row in printed] == list(demo.METHODS)
    for row, method in zip(printed, demo.METHODS, strict=True):
        seeds = [100 * line[demo.ACCURACY] for line in demo.runs_of(method)]
        assert row.endswith(f" {min(seeds):.0f} to {max(seeds):.0f} %")


@pytest.mark.smoke
def test_the_table_of_the_readme_is_that_of_its_studies() -> None:
    shown = [line for line in PAGE.splitlines() if line.startswith("|")]
    printed = list(readme.table())
    begin = shown.index(printed[0])
    assert shown[begin : begin + len(printed)] == printed
    words = " ".join(PAGE.split())
    grpo, rapo, taught = (
        sorted(round(line[demo.ACCURACY], 2) for line in demo.runs_of(method))
        for method in demo.METHODS
    )
    assert (
        f"it ends at {rapo[1]:.2f} to {rapo[-1]:.2f} in nine seeds of ten and at {rapo[0]:.2f} in"
        f" one, GRPO at {grpo[0]:.2f} in all" in words
    )
    assert len(rapo) == 10 and grpo[0] == grpo[-1]
    assert f"from grafts it reaches {taught[0]:.2f} to {taught[-1]:.2f}, for twice" in words
    calls = [sum(one[demo.CALLS] for one in demo.runs_of(name)) for name in demo.METHODS]
    assert round(calls[2] / calls[0]) == 2


@pytest.mark.smoke
def test_calls_to_an_accuracy_are_those_of_the_stored_runs() -> None:
    page = PAGES["results-papers.md"].splitlines()
    rows = [line.strip() for line in page if line.startswith("  | ")]
    assert rows == [row for row in readme.race_table() if not row.startswith("|---")]
    ratios = [race.ratio() for race in readme.races()[1:]]
    earlier = [race.num_earlier for race in readme.races()]
    words = " ".join(PAGE.split())
    assert f"with {min(ratios):.2f} to {max(ratios):.2f} of GRPO's calls" in words
    assert f"earlier in {min(earlier)} to {max(earlier)} of ten pairs" in words


def first_commands(page: str) -> list[str]:
    """The commands from the first training on a page to the asking of its agent."""
    lines = [one.line for one in printed() if one.page == page and not one.is_mention]
    begin = next(n for n, line in enumerate(lines) if line.startswith("treegraft train recipes/"))
    return lines[begin : begin + 2]


@pytest.mark.slow
def test_the_first_agent_learns_what_the_pages_say(tmp_path: Path) -> None:
    """Minutes on an idle machine: 40 updates, from half of the held-out questions to nearly all."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    told = []
    for line in first_commands("start.md"):
        words = [sys.executable, "-m", *shlex.split(line)]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
    (finished,) = re.findall(r"finished runs/first: accuracy ([\d.]+)", told[0])
    assert float(finished) >= 0.9
    assert "truncated" not in told[1] and "answer" in told[1]


def test_the_layout_of_contributing_is_that_of_the_package() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = re.search(r"^src/treegraft/\n(.*?)^```", page, re.S | re.M)
    assert block is not None
    listed = {line.split()[0].rstrip("/") for line in block[1].splitlines()}
    package = ROOT / "src" / "treegraft"
    there = {path.name for path in package.iterdir() if not path.name.startswith("__")}
    assert listed == there - {"py.typed"}


def test_tests_and_examples_named_on_the_pages_exist() -> None:
    pages = ALL + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:tests|examples)/[\w/]+\.py", pages))
    assert named and {name for name in named if not (ROOT / name).exists()} == set()


def test_places_named_in_contributing_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.split("## Where do I add")[1].split("\n## ")[0]
    named = set(re.findall(r"`([\w/]+(?:/|\.py|\.md|\.toml))`", section))
    bases = (ROOT, ROOT / "src" / "treegraft")
    assert named
    assert {name for name in named if not any((base / name).exists() for base in bases)} == set()


def test_links_lead_somewhere_in_a_clone() -> None:
    for name in (README, ROOT / "CONTRIBUTING.md", *DOCS):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", name.read_text(encoding="utf-8")):
            assert "://" in target or (name.parent / target).exists(), f"{name.name}: {target}"


def test_cited_laws_stand_in_contributing() -> None:
    """In "law 3", "laws 7, 9 and 11" and `test_law_8_and_9_...`, each number is one of the list."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.split("## What must always hold")[1].split("\n## ")[0]
    laws = re.split(r"^(\d+)\. ", section, flags=re.M)[1:]
    assert all("`tests/" in text for text in laws[1::2])
    citation = re.compile(r"(?<![a-z])laws?[ _](\d+(?:(?:,|[ _]and)[ _]\d+)*)", re.I)
    for folder in ("src", "tests", "benchmarks", "docs", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix not in (".py", ".md"):
                continue
            text = path.read_text(encoding="utf-8")
            for cited in citation.findall(text):
                assert set(re.findall(r"\d+", cited)) <= set(laws[::2]), f"{path}: law {cited}"


def test_a_block_of_python_runs_or_says_why_not() -> None:
    unmarked = [
        f"{name}: {block[:40]}"
        for name, page in PAGES.items()
        for above, block in re.findall(r"(.*)\n```python\n(.*)", page)
        if not re.fullmatch(r"<!-- (?:runnable|not run: \S.+) -->", above)
    ]
    assert unmarked == []
