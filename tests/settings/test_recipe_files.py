"""Recipes that build on others, their smoke tests, and paths beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from treegraft.cli.doctor import missing_files
from treegraft.cli.memory import memory
from treegraft.core.errors import SettingError
from treegraft.core.shipped import shipped_recipes
from treegraft.core.types import GraftCause
from treegraft.extras.search.plugin import findings as search_findings
from treegraft.policy.shapes import shape_named
from treegraft.runs.record import read_metrics, read_trees
from treegraft.settings.explore import reads_buffer
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
    page = (Path(__file__).parents[2] / "docs/recipes.md").read_text()
    write(tmp_path, my=page.partition("```toml\n")[2].partition("```")[0])
    config = load_config(tmp_path / "my.toml", smoke=True)
    assert config.buffer.path == f"{tmp_path}/traces.sqlite"
    assert (config.run.num_updates, config.run.tasks_per_update) == (1, 2)


def test_tables_are_merged_and_lists_replaced() -> None:
    first = {"a": {"b": 1, "c": [1, 2]}, "d": {"e": 1}}
    assert merged(first, {"a": {"c": [3]}, "d": 4}) == {"a": {"b": 1, "c": [3]}, "d": 4}
    assert first == {"a": {"b": 1, "c": [1, 2]}, "d": {"e": 1}}


@pytest.mark.parametrize("name", list(shipped_recipes()))
def test_a_shipped_recipe_loads_with_its_smoke_test(name: str) -> None:
    load_config(name)
    if not name.startswith(("smollm2", "toolstar")):  # their language model is what they are for
        load_config(name, smoke=True)


PAPERS = [name for name in shipped_recipes() if name.startswith("papers/")]
QUICK = ("papers/rapo-web-qwen2.5-7b", "papers/arpo-search-qwen3-8b")
"""Smoke tests of the default suite: between them grafts from a .jsonl file, branches, all tools and
the limits of an evaluation."""


@pytest.mark.parametrize("name", PAPERS)
def test_doctor_names_what_a_papers_recipe_lacks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TREEGRAFT_CORPUS", "TREEGRAFT_TRACES", "SERPER_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TREEGRAFT_DATA", str(tmp_path))
    config = load_config(name)
    found = list(missing_files(config))
    found += search_findings(config)
    lacks = {one.name for one in found if not one.is_good or one.is_doubtful}
    assert "tasks.dataset" in lacks
    is_dense = config.tools.search.kind == "dense"
    # RAPO's release, and with it its baselines, starts from the instruct model.
    is_arpos = "arpo" in name or name == "papers/grpo-reasoning-qwen2.5-7b"
    assert ("warmup.traces" in lacks) is bool(config.warmup.num_steps) is is_arpos
    assert ("buffer.path" in lacks) is (not reads_buffer(config))
    assert ("tools.search.corpus" in lacks) is is_dense
    assert ("SERPER_API_KEY" in lacks) is not is_dense
    # The hardware that the recipe is written for.
    total = memory(config, 8)
    # The sizes of other people's checkpoints are read once they are there.
    if shape_named(config.model.path):
        assert float(total.value.split()[0]) < 80
    else:
        assert total.value == "unknown"


def smoke(name: str, folder: Path) -> Path:
    """The run folder of a recipe's smoke test."""
    from treegraft.train import train

    config = load_config(name, [f"run.dir={folder}", "run.name=smoke"], smoke=True)
    return train(config).run_dir


def check_smoke(name: str, run_dir: Path) -> None:
    """The run went through every part that the whole recipe has."""
    whole = load_config(name)
    metrics = read_metrics(run_dir)
    last = metrics[-1]
    assert last["warmup/loss"] < 0.2 if "warmup/loss" in last else len(metrics) > 1
    assert last["rollout/num_tool_calls"] > 0 and last["tools/search_calls"] > 0
    assert 0 <= last["eval/accuracy_sampled"] <= 1
    trees = [tree for tree in read_trees(run_dir) if tree.leaves]
    causes = {type(step.cause) for tree in trees for step in tree.steps}
    assert (GraftCause in causes) is ("graft" in whole.explore.explorers)
    if "entropy" in whole.explore.explorers:
        assert last["branch/num_branches"] > 0
    assert (run_dir / "checkpoints").is_dir()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.smoke) for name in PAPERS],
)
def test_the_smoke_test_of_a_papers_recipe_trains_an_update(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_smoke(name, smoke(name, tmp_path))


@pytest.mark.smoke
def test_steps_of_the_recipe_without_thoughts_see_none(tmp_path: Path) -> None:
    """After a warm-up that is long enough for calls, each has its result in a context written
    anew, and no context has a thought."""
    from treegraft.train import train

    # A size at which the agent soon writes as the expert does.
    changes = ["warmup.num_steps=60", "warmup.batch_size=24", "tasks.num_train=200"]
    model = ["model.tiny.hidden_size=128", "model.tiny.intermediate_size=512"]
    place = [f"run.dir={tmp_path}", "run.name=smoke"]
    config = load_config("thoughts_dropped", [*changes, *model, *place], smoke=True)
    run = train(config)
    steps = [step for tree in read_trees(run.run_dir) for step in tree.steps]
    contexts = [step for step in steps if step.is_context]
    called = [step for step in steps if step.content.observations]
    assert len(contexts) == len(called) > 0
    assert all(step.parent == str(step.before).rpartition(".")[0] for step in contexts)
    thoughts = {step.content.thought for step in called}
    assert any(thought.startswith("need") for thought in thoughts)
    opening = called[0].token_ids[0]  # <think>
    assert all(step.token_ids[0] == opening for step in called)
    assert all(opening not in step.token_ids for step in contexts)
