"""The settings tree: loading, overrides, refusals, and the metrics table."""

from __future__ import annotations

import json
import pickle
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.error_codes import raises_code

from treegraft.core import removed
from treegraft.core.errors import DataError, ModelError, SettingError, about, nearest
from treegraft.runs.metrics import METRICS, find_meaning, meaning
from treegraft.settings.config import (
    Config,
    known_settings,
    settings_with,
    tables_and_settings,
)
from treegraft.settings.load import (
    config_json,
    load_config,
    refuse_foreign,
    refuse_ignored,
    refuse_sampling,
    setting_rows,
    traced,
)
from treegraft.settings.policy import LearnSettings
from treegraft.settings.table import Condition, setting, value_of, with_value

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


def refused(source: object, *overrides: str) -> str:
    with pytest.raises(SettingError) as caught:
        load_config(source, overrides)  # type: ignore[arg-type]
    return str(caught.value)


# --- loading --------------------------------------------------------------------------------------


def test_precedence_is_defaults_then_recipe_then_overrides(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[learn]\nlr = 0.5\nnum_epochs = 3\n[run]\nname = "file"\n')
    config = load_config(recipe, ["learn.lr=1e-5", "model.path=some/model"])
    assert (config.learn.lr, config.learn.num_epochs, config.run.name) == (1e-5, 3, "file")
    assert config.model.path == "some/model"
    assert config.learn.weight_decay == 0.0


def test_a_config_an_empty_mapping_and_an_empty_file_are_the_defaults(tmp_path: Path) -> None:
    empty = tmp_path / "empty.toml"
    empty.touch()
    assert (
        load_config({})
        == load_config(Config())
        == load_config(empty)
        == load_config(str(empty))
        == Config()
    )


def test_names_are_near_whatever_the_case_of_their_letters() -> None:
    assert nearest("grpo", ["RAPO", "GRPO"]) == " Did you mean 'GRPO'?"
    assert nearest("Comit", ["commit", "COMMA"]) == " Did you mean 'commit'?"
    # Of two that differ in case alone the first.
    assert nearest("arm", ["ARM", "Arm"]) == " Did you mean 'ARM'?"
    assert nearest("xyz", ["GRPO"]) == ""


@pytest.mark.parametrize(
    ("override", "dotted", "value"),
    [
        ("learn.lr=1", "learn.lr", 1.0),
        ("learn.lr=.5", "learn.lr", 0.5),
        ("run.name=.5", "run.name", ".5"),
        ("learn.betas=[0.8, 0.99]", "learn.betas", (0.8, 0.99)),
        ("run.name=2026-11-21", "run.name", "2026-11-21"),
        ("run.name=7", "run.name", "7"),
        ('run.name="a b"', "run.name", "a b"),
        ("run.name=none", "run.name", None),
        ("run.name = spaced ", "run.name", "spaced"),
        ("loss.dual_clip=None", "loss.dual_clip", None),
        ("eval.greedy=false", "eval.greedy", False),
        ('tools.use=["python"]', "tools.use", ["python"]),
        ("model.path=x=y", "model.path", "x=y"),
        ('model.lora={rank=4, targets=["q_proj"]}', "model.lora.targets", ["q_proj"]),
    ],
)
def test_override_values(override: str, dotted: str, value: object) -> None:
    found: object = load_config({"learn": {"num_epochs": 2}, "run": {"name": "old"}}, [override])
    for part in dotted.split("."):
        found = getattr(found, part)
    assert found == value


def test_an_override_into_a_table_of_free_keys() -> None:
    base = {"tasks": {"kind": "arithmetic"}, "tools": {"use": ["python"]}}
    config = load_config(base, ["tasks.arithmetic.params.max_terms=4"])
    assert config.tasks.arithmetic.params == {"max_terms": 4}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_its_resolved_form_loads_back_equal(
    path: Path, tmp_path: Path
) -> None:
    config = load_config(path)
    resolved = tmp_path / "config.json"
    resolved.write_text(config_json(config), encoding="utf-8")
    assert load_config(resolved) == config


@given(
    lr=st.floats(0, 1e3),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    prompt=st.none() | st.text(),
    hops=st.lists(st.integers(1, 5), min_size=1),
    params=st.dictionaries(st.text(), st.integers(-(2**63), 2**63 - 1) | st.text() | st.booleans()),
)
def test_resolved_form_is_exact(
    lr: float, betas: tuple[float, float], prompt: str | None, hops: list[int], params: dict
) -> None:
    config = Config.model_validate(
        {
            "learn": {"lr": lr, "betas": betas},
            "format": {"system_prompt": prompt},
            "tasks": {"search_world": {"hops": hops}, "arithmetic": {"params": params}},
        }
    )
    text = config_json(config)
    assert Config.model_validate_json(text) == config
    assert load_config(config) == config


# --- refusals -------------------------------------------------------------------------------------


def test_a_last_part_that_one_setting_has_stands_for_it() -> None:
    config = load_config({"buffer": {"path": "expert"}}, ['explorers=["graft"]', "num_leaves=8"])
    assert (config.explore.explorers, config.explore.num_leaves) == (["graft"], 8)
    assert "learn.lr" in refused({}, "lr=1")  # warmup.lr is another
    assert "is given twice" in refused({}, "num_leaves=1", "explore.num_leaves=2")


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("learn.lrr", "learn.lr"),
        ("lr", "learn.lr"),
        ("rollout.max_steps", "rollout.max_agent_steps"),
        ("learn.learning_rate", "learn.lr"),
        ("num_generations", "explore.num_leaves"),
        ("modle.path", "model.path"),
        ("warmupp.lr", "'warmup.lr'?"),
        ("tasks.search_wrld.hops", "tasks.search_world.hops"),
        ("model.tiny.hidden", "model.tiny.hidden_size"),
        ("num_leavs", "explore.num_leaves"),
        ("num_hybrids", "explore.graft.num_hybrid"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, near: str, tmp_path: Path) -> None:
    message = refused({}, f"{key}=1")
    assert f"command line: unknown setting '{key}'" in message and near in message
    recipe = tmp_path / "r.toml"
    recipe.write_text(f"{key} = 1\n")
    message = refused(recipe)
    assert str(recipe) in message and near in message


def test_every_unknown_key_is_reported_at_once(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("[learn]\nlrr = 1\n[run]\nsede = 2\n")
    assert len(refused(recipe).splitlines()) == 2


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("run.seed=five", ["run.seed", "'five'", "integer", "Seed of everything"]),
        ("run.seed=true", ["run.seed", "True", "integer"]),
        ("run.seed=1.5", ["run.seed", "1.5", "integer"]),
        ("run.seed=-1", ["run.seed", "-1", "greater than or equal to 0"]),
        ("model.dtype=float16", ["model.dtype", "'float16'", "'float32' or 'bfloat16'"]),
        ("learn.lr=nan", ["learn.lr"]),
        ("learn.lr=inf", ["learn.lr", "finite"]),
        ("tools.use=[python]", ["tools.use", "[python]", "list", "shell"]),
        ('tasks.search_world.hops=[1, "x"]', ["tasks.search_world.hops[1]", "'x'", "integer"]),
        ("learn.betas=[0.9]", ["learn.betas[1]", "one more entry"]),
        ("learn=3", ["'learn'", "3", "table"]),
        ("model.lora.targets=3", ["model.lora.targets"]),
        ("learn.lr.x=3", ["learn.lr"]),
        ("learn.lr", ["is not an override", "learn.lr=1e-5"]),
        ("=3", ["is not an override"]),
        ("learn..lr=3", ["is not an override"]),
    ],
)
def test_wrong_values(override: str, parts: list[str]) -> None:
    message = refused({"model": {"lora": {"rank": 2}}, "learn": {"lr": 0.1}}, override)
    assert all(part in message for part in parts), message
    assert "pydantic" not in message


def test_one_paragraph_for_each_wrong_field() -> None:
    message = refused(
        {"run": {"seed": "x"}, "learn": {"lr": -1}, "model": {"lora": {"targets": 3}}}
    )
    assert [line.split("'")[1] for line in message.splitlines()] == [
        "run.seed",
        "model.lora.targets",
        "learn.lr",
    ]


def test_override_and_recipe_faults_say_where_they_come_from(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("[run]\nseed = -1\n")
    assert refused(recipe).startswith(str(recipe))
    assert refused(recipe, "run.seed=-2").startswith("command line")


@pytest.mark.parametrize(
    ("name", "text"), [("r.toml", "[run]\nseed = \n"), ("r.json", '{"run":\n oops}')]
)
def test_broken_files_name_the_line(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    message = refused(path)
    assert str(path) in message and "line 2" in message


def test_missing_files(tmp_path: Path) -> None:
    (tmp_path / "demo.toml").touch()
    assert "demo.toml'?" in refused(tmp_path / "dmo.toml")
    assert "is a folder" in refused(tmp_path)
    (tmp_path / "list.json").write_text("[1]")
    assert "got a list" in refused(tmp_path / "list.json")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "binary.toml" in refused(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ({"model": {"tiny": {"num_heads": 3, "hidden_size": 120}}}, "model.tiny.num_heads"),
        ({"model": {"tiny": {"hidden_size": 100, "num_heads": 8}}}, "model.tiny.num_heads"),
        ({"reward": {"funcs": ["f1", "math"], "weights": [1.0]}}, "reward.weights"),
        ({"reward": {"funcs": []}}, "reward.funcs"),
        ({"reward": {"funcs": ["f1", "f1"]}}, "each name once"),
        ({"reward": {"funcs": ["exact"]}}, "Did you mean 'exact_match'?"),
        ({"engine": {"kind": "natve"}}, "Did you mean 'native'?"),
        ({"tools": {"use": ["pyhton"]}}, "Did you mean 'python'?"),
        ({"tools": {"use": ["mine:"]}}, "import path"),
        ({"explore": {"explorers": []}}, "explore.explorers"),
        ({"explore": {"num_leaves": 300}}, "engine.max_rows"),
        ({"tasks": {"search_world": {"hops": []}}}, "hops"),
        ({"tasks": {"search_world": {"hops": [6]}}}, "hops"),
        ({"warmup": {"continue_prob": [1.5]}}, "warmup.continue_prob"),
        ({"warmup": {"continue_prob": []}}, "warmup.continue_prob"),
        ({"eval": {"greedy": False, "num_samples": 0}}, "neither greedy nor samples"),
        ({"learn": {"num_minibatches": 13}}, "run.tasks_per_update"),
        ({"learn": {"betas": [0.9, 1.0]}}, "learn.betas"),
        ({"run": {"name": "a/b"}}, "run.name"),
        (
            {"explore": {"explorers": ["entropy"], "num_leaves": 4, "entropy": {"num_starts": 5}}},
            "expected at most explore.num_leaves",
        ),
        (
            {
                "buffer": {"path": "b"},
                "explore": {"explorers": ["graft"], "num_leaves": 4, "graft": {"num_hybrid": 5}},
            },
            "explore.graft.num_hybrid: got 5",
        ),
        ({"explore": {"explorers": ["graft"]}}, "buffer.path: got none"),
        ({"explore": {"explorers": ["independent", "entropy"]}}, 'one of "entropy" alone'),
        (
            {"explore": {"explorers": ["graft", "tree_search"]}, "buffer": {"path": "b"}},
            'one of "tree_search" alone, in the first place',
        ),
        (
            {"explore": {"explorers": ["tree_search", "entropy"]}},
            'one of "tree_search" and "entropy" alone',
        ),
        (
            {"explore": {"explorers": ["tree_search"], "tree_search": {"num_starts": 40}}},
            "explore.tree_search.num_starts: got 40, expected at most explore.num_leaves",
        ),
        (
            {"explore": {"explorers": ["entropy"], "entropy": {"num_starts": 0}}},
            "explore.entropy.num_starts",
        ),
    ],
)
def test_contradictions(data: dict, part: str) -> None:
    assert part in refused(data)


def test_what_only_looks_contradictory_loads() -> None:
    searched = {"explorers": ["tree_search", "graft"], "num_leaves": 1}
    whole = {"advantage": "reinforce++"}
    load_config({"explore": searched, "buffer": {"path": "b"}, "credit": whole})
    load_config({"tasks": {"kind": "arithmetic"}, "rollout": {"max_tool_calls": 0}})
    load_config({"tasks": {"kind": "mine:Source"}, "reward": {"funcs": ["my_rewards:brief"]}})
    load_config(
        {
            "eval": {
                "greedy": False,
                "num_samples": 0,
                "every": 0,
                "at_start": False,
                "at_end": False,
            }
        }
    )
    load_config({"model": {"path": "some/model"}, "rollout": {"max_completion_tokens": 4096}})


# --- law 10: nothing typed is without effect ------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("tasks.arithmetic.generator=x", "tasks.kind is 'search_world'"),
        ("tasks.dataset.question_column=q", "tasks.kind is 'search_world'"),
        ("tasks.options.x=1", "no import path"),
        ("tools.python.num_workers=3", "without 'python'"),
        ("tools.search.top_k=3", "without 'search'"),
        ("model.lora.alpha=3", "model.lora.rank is 0"),
        ("loss.length_constant=30", "sequence-sum"),
        ("loss.clip_high=0.3", "ratio is exactly 1"),
        ("warmup.lr=0.1", "warmup.num_steps is 0"),
        ("learn.lr=1", "twice"),
    ],
)
def test_an_override_without_effect_is_an_error(override: str, reason: str) -> None:
    message = refused({}, override, *(["learn.lr=2"] if reason == "twice" else []))
    assert override.partition("=")[0] in message and reason in message


@pytest.mark.parametrize(
    ("objective", "limits"),
    [("clip", (0.28, 0.28)), ("gspo", (3e-4, 4e-4)), ("cispo", (1.0, 0.28))],
)
def test_clipping_limits_follow_the_objective_unless_given(
    objective: str, limits: tuple[float, float]
) -> None:
    overrides = [f"loss.objective={objective}", "learn.num_epochs=2"]
    loss = load_config({}, overrides).loss
    assert (loss.clip_low, loss.clip_high) == limits
    assert load_config({}, [*overrides, "loss.clip_low=0.1"]).loss.clip_low == 0.1


def test_presets_may_lie_in_a_recipe_and_overrides_that_count_pass() -> None:
    presets = {
        "tasks": {"arithmetic": {"generator": "products"}},
        "model": {"lora": {"alpha": 8}},
        "warmup": {"lr": 0.1},
    }
    load_config(presets)
    load_config(presets, ["warmup.num_steps=0", "model.lora.rank=0"])
    load_config(
        presets, ["warmup.num_steps=3", "warmup.lr=0.2", "model.lora.rank=4", "model.lora.alpha=4"]
    )
    load_config({}, ["learn.num_minibatches=2", "loss.clip_low=0.1"])
    assert "model.path is 'x/y'" in refused({"model": {"path": "x/y"}}, "model.tiny.num_layers=3")
    assert "model.tiny" in refused({}, "model.path=x/y", "model.tiny={num_layers=3}")
    assert "hierarchical" in refused({"reward": {"funcs": ["f1"]}}, "reward.accuracy=f1")
    graft = {"buffer": {"path": "b"}, "explore": {"explorers": ["graft"]}}
    load_config(graft, ["credit.retrieval_weight=0.1", "loss.shaping_weight=0.1"])
    assert "retrieval_weight is 0" in refused(
        graft, "credit.retrieval_weight=0", "credit.retrieval_reward=no_timing"
    )
    assert "loss.graft_coef is 0" in refused(graft, "loss.graft_form=luffy")
    assert "num_hybrid is 0" in refused(graft, "explore.graft.num_hybrid=0", "buffer.random_prob=1")
    assert "no explorer of explore.explorers branches" in refused(
        {}, "credit.leaf_weight=inverse_branching"
    )
    load_config({}, ['explorers=["tree_search"]', "credit.leaf_weight=inverse_branching"])
    assert "ratio is exactly 1" in refused({}, "loss.objective=gppo", "loss.kept_low=0.25")
    load_config({}, ["learn.num_epochs=2", "loss.objective=gppo", "loss.kept_low=0.25"])
    load_config(
        graft, ["loss.clip_high=0.01"]
    )  # a grafted trajectory's ratio is above 1 from the start
    assert "ratio is exactly 1" in refused(graft, "loss.shaping_weight=0", "loss.clip_high=0.01")
    branch = {"explore": {"explorers": ["entropy"]}}
    load_config(branch, ["explore.entropy.rule=bernoulli", "normaliser=log_vocabulary"])
    load_config(branch, ["explore.entropy.threshold=0.6", "explore.entropy.entropy_weight=0.1"])
    assert "explore.entropy.rule is 'bernoulli'; add explore.entropy.rule=threshold" in refused(
        branch, "explore.entropy.rule=bernoulli", "explore.entropy.threshold=0.6"
    )


def test_evaluation_refuses_what_only_training_uses() -> None:
    refuse_ignored(["eval.num_samples=4", "tools.deadline_s=3", "unknown=3"], "eval")
    plain = ("learn.lr=1", "explore.num_leaves=3", "run.num_updates=3", "eval.every=3")
    # By the last part of the name, and as a table.
    for override in (*plain, "num_leaves=3", "learn={lr=1}", "run={seed=1,num_updates=3}"):
        with raises_code("override-idle"):
            refuse_ignored([override], "eval")
    with raises_code("override-idle"):
        refuse_foreign(["buffer={build={num_samples=3}}"], "train")
    with raises_code("override-idle"):
        refuse_sampling(["eval={top_p=0.9}"], "the answer is greedy")


def test_contradictions_say_whether_they_were_typed(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("[explore]\nnum_leaves = 300\n")
    assert refused(recipe).startswith(f"{recipe}: explore.num_leaves: got 300")
    recipe.write_text("")
    for override, part in (
        ("num_leaves=300", "explore.num_leaves: got 300, expected at most engine.max_rows"),
        ("run.name=a/b", "run.name: got 'a/b'"),
        ("engine.kind=vlm", "engine.kind: got 'vlm'"),
        ("max_agent_steps=9", ""),  # [eval] has one of this name too, which follows [rollout]
        ("explore.explorers=graft", 'Write explore.explorers = ["graft"]; in a shell'),
        ("tools.use=[python,search]", 'Write tools.use = ["python", "search"]'),
    ):
        if part:
            message = refused(recipe, override)
            assert message.startswith("command line: ") and part in message
        else:
            load_config(recipe, [override])


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("run.seed=" + "9" * 5000, "64 bits"),
        ("run.seed=0x" + "f" * 5000, "64 bits"),
        ("explore.explorers=" + "[" * 5000, "explore.explorers"),
        ("tools.use=" + "[" * 300 + "]" * 300, "nested too deeply, expected at most 16"),
        (f"tasks.num_train={10**12}", "less than or equal to 1000000"),
        ("a" + ".b" * 5000 + "=1", "is not an override"),
        ("run.name=" + "x" * 300, "at most 200 bytes"),
        ("run.name=a\nb", "of printable characters"),
        ("run.name=\udc80", "a value that no setting can have: Invalid JSON"),
        (f"run.num_threads={10**9}", "1024"),
    ],
)
def test_values_that_no_run_can_have(override: str, part: str) -> None:
    message = refused({}, override)
    assert part in message and len(message) < 1500


def test_recipes_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(b"\xef\xbb\xbf[run]\r\nseed = 3\r\n")
    assert load_config(path).run.seed == 3  # as Windows' editors write it
    path.write_text("x = " + "[" * 100_000)
    assert "nested too deeply" in refused(path)
    path.write_text("run.seed = " + "9" * 5000)
    assert "too many digits" in refused(path)
    assert "not a regular file" in refused("/dev/zero")
    assert "cannot be read" in refused("x" * 5000 + ".toml")


def test_errors_of_data_and_models_are_traced_to_their_setting() -> None:
    message = "model '/no/x': there is no such folder"
    with pytest.raises(ModelError) as caught, about("model.path"):
        raise ModelError(message)
    assert traced(caught.value, "r.toml", []) == f"r.toml: model.path: {message}"
    typed = traced(caught.value, "r.toml", ["learn.lr=1", "model.path=/no/x"])
    assert typed == f"command line: model.path: {message}"
    # Who knows more, further in, is believed; a setting that is named is not named twice.
    with pytest.raises(DataError) as caught_inside, about("tasks.dataset.train"):
        raise DataError("no column 'x' (tasks.kind)", settings=["tasks.kind", "run.seed"])
    inner = caught_inside.value
    assert traced(inner, "r.toml", ["seed=3"]) == "command line: no column 'x' (tasks.kind)"
    assert traced(DataError("'/no/x' is odd"), "r.toml", ["model.path=/no/x"]) == "'/no/x' is odd"


# --- tables ---------------------------------------------------------------------------------------


def test_facts_speak_of_settings_that_exist() -> None:
    known = set(known_settings())
    for found in tables_and_settings().values():
        for condition in found.facts.idle_unless:
            assert not isinstance(condition, Condition) or condition.other in known
            assert isinstance(condition(Config()), str)
    facts = ("resumable", "ignored_by_eval", "same_answers", "retrieval_source", "only_for")
    for name in (one for fact in facts for one in settings_with(fact)):
        assert name.removesuffix(".") in tables_and_settings()
        others = [one for one in known if one.startswith(name)]
        assert name.endswith(".") or others == [name], "names are compared by their beginnings"


def test_names_that_recipes_may_say_are_those_that_are_built_in() -> None:
    from treegraft.core.registry import CORE_NAMES
    from treegraft.settings.explore import CORE_EXPLORERS
    from treegraft.tasks.build import TASKS
    from treegraft.tasks.rewards import REWARDS
    from treegraft.tools.build import TOOLS

    tables = {"explorer": CORE_EXPLORERS, "tasks": TASKS, "reward": REWARDS, "tool": TOOLS}
    for kind, table in tables.items():
        assert CORE_NAMES[kind] == tuple(table)
    asked = {found.facts.seam for found in known_settings().values()}
    assert set(CORE_NAMES) - asked == {"command"}


def test_an_unknown_fact_is_refused_where_it_is_declared() -> None:
    with pytest.raises(TypeError, match="resumeable"):
        setting(3, resumeable=True)


# --- what 0.7 wrote -------------------------------------------------------------------------------


def test_settings_of_another_version_are_refused_with_one_sentence(tmp_path: Path) -> None:
    saved = json.loads(config_json(Config()))
    saved["engine"]["noise"], saved["learn"]["vocab_chunk"] = "philox", 7
    path = tmp_path / "config.json"
    path.write_text(json.dumps(saved), encoding="utf-8")
    said = refused(path)
    assert "unknown setting 'engine.noise'" in said and "always 'philox'" in said
    assert "Gone since 0.8: it is always 2,048." in refused({}, "learn.vocab_chunk=7")
    assert not {*removed.REMOVED} & {*known_settings()}


def test_options_go_to_an_engine_of_your_own() -> None:
    config = load_config({"engine": {"kind": "mine:Engine"}}, ["engine.options.url=http://x"])
    assert config.engine.options == {"url": "http://x"}
    assert "no import path" in refused({}, "engine.options.url=x")
    assert "engine.kind is 'm:E'" in refused(
        {"engine": {"kind": "m:E"}}, "engine.native.cache_gb=1"
    )


def test_metrics_have_meanings() -> None:
    assert meaning("eval/pass_at_4").startswith("share of tasks")
    assert meaning("eval/accuracy_sampled") == METRICS["eval/accuracy_sampled"]
    assert meaning("eval/accuracy_3 hops") == METRICS["eval/accuracy_{category}"]
    assert (
        meaning("reward/mean") == METRICS["reward/mean"]
        and meaning("reward/f1") == METRICS["reward/{func}"]
    )
    assert meaning("time/tool_python_s") == METRICS["time/tool_{name}_s"]
    assert meaning("time/tool_search_cached_frac") == METRICS["time/tool_{name}_cached_frac"]
    assert find_meaning("eval/pass_at_x") is None
    assert meaning("learn/loss") and meaning("policy_version")
    with pytest.raises(KeyError, match="learn/loss"):
        meaning("learn/los")


def test_project_file_agrees_with_the_package() -> None:
    import treegraft

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == treegraft.__version__
    heads = [
        line
        for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("## [") and "Unreleased" not in line
    ]
    # Between releases the newest one in the list is the last that there was.
    if "dev" not in treegraft.__version__:
        assert heads[0].startswith(f"## [{treegraft.__version__}]")
    assert dir(treegraft) == sorted(treegraft.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = treegraft.nonsense


def test_a_default_that_follows_is_that_of_the_default_configuration() -> None:
    derived = {name: one for name, one in known_settings().items() if one.facts.default_of}
    assert len(derived) >= 8
    for name, one in derived.items():
        assert one.facts.default_of(Config()) == value_of(Config(), name), name


def test_defaults_follow_the_number_of_leaves() -> None:
    for explorer, name in (("entropy", "entropy.num_starts"), ("graft", "graft.num_hybrid")):
        given = {
            "explore": {"explorers": [explorer], "num_leaves": 4},
            "buffer": {"path": "expert"},
        }
        assert value_of(load_config(given).explore, name) == 2
        alone = ["explore.num_leaves=1", "credit.advantage=reinforce++"]
        assert value_of(load_config(given, alone).explore, name) == 1
        # What is given stays, and has to fit.
        with raises_code("settings-contradict", "explore.num_leaves"):
            load_config(given, [f"explore.{name}=5"])


def test_defaults_follow_the_model() -> None:
    model = load_config({"model": {"path": "a/b"}, "warmup": {"num_steps": 200}})
    assert (model.learn.lr, model.warmup.lr, model.warmup.batch_size) == (1e-6, 2e-5, 8)
    assert (model.warmup.lr_warmup_steps, model.rollout.max_completion_tokens) == (20, 512)
    adapters = load_config({"model": {"path": "a/b", "lora": {"rank": 8}}})
    assert (adapters.learn.lr, adapters.warmup.lr) == (1e-5, 2e-4)
    # Settings of Python follow overrides as well, and what they name stays.
    given = Config(learn=LearnSettings(lr=0.5))
    followed = load_config(given, ["model.path=a/b"])
    assert (followed.learn.lr, followed.warmup.lr) == (0.5, 2e-5)
    assert not any(row.is_default for row in setting_rows(followed) if row.name == "learn.lr")
    assert all(row.is_default for row in setting_rows(followed) if row.name.startswith("warmup."))
    # A resolved configuration holds them all.
    assert load_config(json.loads(config_json(model))) == model


def test_defaults_of_a_loaded_configuration_follow_its_changes() -> None:
    tables = {"explore": {"explorers": ["entropy"]}, "warmup": {"lr": 3e-3}}
    other = ["model.path=a/b", "explore.num_leaves=4"]
    from_tables = load_config(tables, other)
    loaded = load_config(tables)
    assert load_config(loaded, other) == from_tables
    assert (loaded.learn.lr, from_tables.learn.lr) == (3e-4, 1e-6)
    # What a table names stays, although it was the default.
    assert (loaded.warmup.lr, from_tables.warmup.lr) == (3e-3, 3e-3)
    sent = pickle.loads(pickle.dumps(with_value(loaded, "run.seed", 7)))
    assert load_config(sent, other) == with_value(from_tables, "run.seed", 7)


def test_thoughts_and_boxes_are_asked_for_in_tags_only() -> None:
    def asked(**settings: object) -> tuple[bool, bool]:
        found = load_config({"model": {"path": "a/b"}, "format": settings}).format
        return found.require_think, found.require_boxed

    assert asked() == (True, True)
    assert asked(kind="chat") == (False, False)
    assert asked(kind="chat", require_think=True) == (True, False)
    assert asked(require_boxed=False) == (True, False)


@pytest.mark.parametrize(
    ("method", "name"), [("arpo", "entropy"), ("RAPO", "graft"), ("grpo", "independent")]
)
def test_a_papers_method_is_an_alias_of_its_explorer(method: str, name: str) -> None:
    buffer = {"path": "expert"}
    config = load_config({"explore": {"explorers": [method]}, "buffer": buffer})
    assert config == load_config({"explore": {"explorers": [name]}, "buffer": buffer})
    assert config.explore.explorers == [name]
    typed = load_config({"buffer": buffer}, [f'explore.explorers=["{method}"]'])
    assert typed.explore.explorers == [name]


def test_a_method_beside_its_explorer_is_named_twice() -> None:
    both = {"explore": {"explorers": ["entropy", "arpo"]}}
    assert "expected each name once" in refused(both)


def test_what_is_gone_since_an_earlier_version_says_what_to_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sentence = "Gone since 0.8: use explore.commit."
    monkeypatch.setitem(removed.REMOVED, "old_one", sentence)
    monkeypatch.setitem(removed.REMOVED, "explore.old_one", sentence)
    assert refused({"explore": {"explorers": ["old_one"]}}).endswith(sentence)
    assert sentence in refused({"explore": {"old_one": {"num_starts": 3}}})
