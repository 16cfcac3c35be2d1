"""Names of TRL and verl: each is on the page of names, the common ones are answered in errors, and
a hint is given only where it is near.

The lists in tests/support/foreign_names hold every name of the pinned versions: the fields of TRL's
GRPOConfig, ModelConfig and ScriptArguments with the arguments of GRPOTrainer, and the leaves of
verl's trainer/config/_generated_ppo_trainer.yaml."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from tests.support.pages import builder as load_builder

from treegraft.core.errors import SettingError
from treegraft.core.registry import extensions
from treegraft.settings.config import known_settings
from treegraft.settings.load import load_config
from treegraft.settings.names import FRAMEWORKS, answers
from treegraft.settings.unknown import suggestion

LISTS = Path(__file__).parents[1] / "support" / "foreign_names"


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    return load_builder()


def names_of(framework: str, builder: ModuleType) -> list[str]:
    version = builder.foreign_versions()[framework]
    return (LISTS / f"{framework}-{version}.txt").read_text("utf-8").split()


def refused(recipe: object, *overrides: str) -> str:
    with pytest.raises(SettingError) as caught:
        load_config(recipe, overrides)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_name_has_an_answer(framework: str, builder: ModuleType) -> None:
    names = names_of(framework, builder)
    assert len(names) == {"trl": 230, "verl": 829}[framework]
    listed = {name for one in builder.all_answers() for name in getattr(one, framework)}
    for name in names:
        tables = [".".join(name.split(".")[:n]) for n in range(1, name.count(".") + 1)]
        assert {name, *(f"{table}.*" for table in tables)} & listed, name


def test_common_names_are_answered_in_errors() -> None:
    assert 38 <= len(answers()) <= 42
    for answer in answers():
        for framework, said in FRAMEWORKS.items():
            for name in getattr(answer, framework):
                if not name.endswith("*"):
                    assert re.search(rf"(TRL|{said})'s '{name}'", suggestion(name)), name


def test_answers_name_settings_that_exist_and_no_name_twice(builder: ModuleType) -> None:
    known = known_settings()
    seen: set[str] = set()
    for answer in builder.all_answers():
        # Some settings are those of extensions, which may be deleted.
        assert set(answer.here) <= set(known) or not extensions().entries
        assert answer.note or answer.here, answer
        for name in (*answer.trl, *answer.verl):
            assert name not in seen
            seen.add(name)
    pinned = {name for framework in FRAMEWORKS for name in names_of(framework, builder)}
    # Former and colloquial names; what else is not pinned stands for a table of pinned ones.
    older = {
        "chat_template_path",
        "max_prompt_length",
        "warmup_ratio",
        "tensor_parallel_size",
        "lr_scheduler",
        "group_size",
        "max_turns",
        "cliprange",
        "tis_imp_ratio_cap",
    }
    for name in seen - pinned:
        table = name.removesuffix("*")
        assert name in older or any(table != name and one.startswith(table) for one in pinned), name


def test_values_that_answers_name_are_accepted_here(builder: ModuleType) -> None:
    """Every `table.setting = value` in the file is a setting of ours with a value that it takes."""
    num_found = 0
    for answer in builder.all_answers():
        for text in (*answer.values.values(), answer.note):
            for name, value in re.findall(
                r"\b([a-z]+(?:\.[a-z_]+)+) = (\"[^\"]+\"|\S+\d|true|false|\[.*\])", text
            ):
                num_found += 1
                tables = {"explore.explorers": {"buffer": {"path": "expert"}}}
                assert name in known_settings(), text
                source = tables.get(name, {})
                if name == "format.kind":
                    source = {"model": {"path": "some/model"}}
                if name == "tasks.kind":
                    source = {"rollout": {"max_tool_calls": 0}}
                if name == "loss.engine_ratio":
                    source = {"loss": {"engine_ratio_cap": 2.0}}
                if name == "loss.length_constant":
                    source = {"loss": {"aggregation": "sequence-sum"}}
                load_config(source, [f"{name}={value}"])
    assert num_found > 20


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("actor_rollout_ref.actor.optim.lr=1e-5", ["verl's", "is learn.lr here"]),
        ("+data.train_batch_size=8", ["is run.tasks_per_update here"]),
        ("algorithm.adv_estimator=grpo", ["credit.advantage", "the default"]),
        ("algorithm.adv_estimator=gae", ["not available, since there is no critic"]),
        ("actor_rollout_ref.actor.fsdp_config.param_offload=True", ["no counterpart", "one GPU"]),
        ("ppo_mini_batch_size=4", ["verl's 'ppo_mini_batch_size' is learn.num_minibatches"]),
        ("actor.clip_ratio_high=0.3", ["loss.clip_high"]),
        ("per_device_train_batch_size=4", ["run.tasks_per_update", "num_generations"]),
        ("use_peft=true", ["model.lora.rank"]),
        ("load_in_4bit=true", ["no counterpart", "not quantised"]),
        ("learn.lr_scheduler_type=cosine", ["TRL's 'lr_scheduler_type' is learn.schedule here"]),
        ("lr_scheduler_type=cosine_with_min_lr", ["learn.schedule"]),
        ("max_steps=9", ["run.num_updates or rollout.max_agent_steps"]),
        ("epsilon=0.1", ["loss.clip_low and loss.clip_high"]),
        (
            "loss_type=dr_grpo",
            ['loss.aggregation = "sequence-sum"', 'credit.advantage = "dr_grpo"'],
        ),
        ("beta=0.1", ["loss.kl_coef"]),
        ("top_p=0.9", ["eval.top_p", "not that of the policy"]),
        ("rollout.top_p=0.9", ["eval.top_p", "not that of the policy"]),
        ("loss.aggregation=seq-mean-token-mean", ['loss.aggregation = "sequence-mean"']),
        ("push_to_hub=true", ["hf upload"]),
        ("deepspeed=zero3.json", ["no counterpart"]),
        ("device=cuda", ["no counterpart", "run.num_threads sets the threads"]),
    ],
)
def test_names_of_others_are_answered(override: str, parts: list[str]) -> None:
    message = refused({}, override)
    assert message.startswith("command line: ")
    assert all(part in message for part in parts), message


def test_tables_of_verl_in_a_recipe_are_answered_name_by_name(tmp_path: Path) -> None:
    recipe = tmp_path / "v.toml"
    recipe.write_text(
        "[actor_rollout_ref.actor.optim]\nlr = 1e-6\n"
        "[data]\ntrain_files = 'a'\n[trainer]\nfoo = 1\n"
    )
    lines = refused(recipe).splitlines()
    assert [line.split("'")[1] for line in lines] == [
        "actor_rollout_ref.actor.optim.lr",
        "data.train_files",
        "trainer.foo",
    ]
    assert "learn.lr" in lines[0] and "tasks.dataset.train" in lines[1]
    assert lines[2] == f"{recipe}: unknown setting 'trainer.foo'."


@pytest.mark.parametrize(
    "name", ["wholly_else", "use_magic", "foo", "run.magic", "x" * 5000, "a.b.c.d", "judge.url_x"]
)
def test_no_hint_where_nothing_is_near(name: str) -> None:
    assert suggestion(name) == ""


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("runn.seed=1", "Did you mean 'run.seed'?"),
        ("model.name=some/model", "`treegraft config model` lists the settings of [model]."),
        ("tasks.path=a.jsonl", "`treegraft config tasks` lists the settings of [tasks]."),
        ("rollout.num_leaves=4", "Did you mean 'explore.num_leaves'?"),
    ],
)
def test_a_name_that_many_tables_have_does_not_point_at_another_table(
    override: str, hint: str
) -> None:
    assert refused({}, override).endswith(hint)
