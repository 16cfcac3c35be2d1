"""Foreign classes as environments: a text game of steps and rewards and a file system of plain
Python, neither with a parent of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code
from tests.support.tiny import tiny

from treegraft.assemble import Parts
from treegraft.cli.doctor import examine
from treegraft.core.errors import ToolError
from treegraft.core.finding import Finding
from treegraft.core.text import as_text
from treegraft.core.types import Observation, StepContent, Task, ToolCall, Tree
from treegraft.policy.engine.scripted import ScriptedEngine
from treegraft.policy.learn.sft import Demonstrations
from treegraft.runs.record import read_metrics, read_trees
from treegraft.settings.load import load_config
from treegraft.settings.tools import EnvironmentSettings, ToolsSettings
from treegraft.tasks.open import OpenTasks
from treegraft.tools.environments.own import OVER, ClassEnvironments
from treegraft.tools.toolbox import Toolbox
from treegraft.traces.buffer import TraceBuffer
from treegraft.train import train

TASK = Task(id="t/0", question="Reach the goal.", reference=(), columns={"length": 3})


class Corridor:
    """A wrapped game: its steps pay, and it ends. The goal is at `length`, a pit at -2; the clock
    stops after six steps."""

    def __init__(self, render_mode: str | None = None) -> None:
        self.place = self.clock = 0

    def reset(self, *, seed: int | None = None, options=None, length: int = 2):  # type: ignore[no-untyped-def]
        self.place = 0
        self.clock = 0
        self.length = length
        self.paid = 0.0
        self.done = False
        return self._seen()

    def step(self, action: int) -> str:
        """Goes one field: 1 to the right, -1 to the left.

        Any other number stays.
        """
        self.clock += 1
        self.place += action if action in (1, -1) else 0
        is_there = self.place == self.length
        is_lost = self.place == -2
        self.paid += 1.0 if is_there else -1.0 if is_lost else -0.1
        self.done = is_there or is_lost or self.clock == 6
        return self._seen()

    def get_reward(self) -> float:
        return self.paid

    def _seen(self) -> str:
        return f"field {self.place}"


class Files:
    """A stateful interface of plain Python: methods in camelCase, results that are no text, an end
    that an attribute tells."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.done = False

    def reset(self, **row: Any) -> dict[str, list[str]]:
        self.wanted = row.get("wanted", "a")
        return {"wanted": [self.wanted]}

    def listFiles(self, showSizes: bool = False) -> Any:
        """Lists the files."""
        return {n: len(t) for n, t in self.files.items()} if showSizes else sorted(self.files)

    def writeFile(self, name: str, text: str = "") -> None:
        """Writes a file."""
        self.files[name] = text

    def readFile(self, name: str) -> str:
        """Reads a file."""
        return self.files[name]

    def submit(self) -> str:
        """Hands the files in."""
        self.done = True
        return "received"

    def get_reward(self) -> float:
        return float(self.done) + float(self.wanted in self.files)


def kind_of(made: type, **settings: Any) -> ClassEnvironments:
    return ClassEnvironments(
        made, made.__name__, EnvironmentSettings(kind="tests.support.worlds:X", **settings)
    )


def play(
    made: type, *acts: tuple[str, str], task: Task = TASK, **settings: Any
) -> tuple[list[str], Any]:
    """What an object tells a player, its first words first, and its reward."""

    async def work() -> tuple[list[str], Any]:
        live = kind_of(made, **settings).make()
        told = [await live.reset(task)]
        for name, body in acts:
            try:
                told.append(as_text(await live.call(name, body, task)))
            except (ToolError, OSError) as error:
                told.append(f"error: {error}")
        reward = await live.reward()
        await live.close()
        return told, reward

    return asyncio.run(work())


def test_an_episode_pays_and_ends() -> None:
    """Two steps cost 0.1 each, the third arrives: 1 - 0.2."""
    right = ("step", "1")
    told, reward = play(Corridor, right, ("step", '{"action": 1}'), right, right)
    assert told == ["field 0", "field 1", "field 2", f"field 3\n[{OVER}]", f"error: {OVER}"]
    assert reward == pytest.approx(0.8)
    told, reward = play(Corridor, *[("step", "0")] * 6)
    assert told[-1] == f"field 0\n[{OVER}]" and reward == pytest.approx(-0.6)
    assert play(Corridor)[1] == 0.0


def test_an_object_that_says_done_is_over() -> None:
    write = ("write_file", '{"name": "a"}')
    told, reward = play(Files, ("list_files", ""), write, ("submit", ""), ("read_file", "a"))
    assert told == ['{"wanted": ["a"]}', "[]", "", f"received\n[{OVER}]", f"error: {OVER}"]
    assert reward == 2.0
    sizes = ("list_files", '{"showSizes": true}')
    assert play(Files, write, sizes, ("read_file", "a"))[0][2:] == ['{"a": 0}', ""]


def test_an_episode_that_ends_in_an_error_is_over() -> None:
    class Slammed(Files):
        def submit(self) -> str:
            """Hands the files in."""
            self.done = True
            raise OSError("shut")

    told, reward = play(Slammed, ("submit", ""), ("write_file", '{"name": "a"}'))
    assert told[1:] == ["error: shut", f"error: {OVER}"] and reward == 1.0


def test_a_copy_goes_on_with_rewards_and_end() -> None:
    async def work() -> list[Any]:
        live = kind_of(Corridor, capability="fork").make()
        await live.reset(TASK)
        await live.call("step", "1", TASK)
        copy = await live.fork()
        for _ in range(2):
            await copy.call("step", "1", TASK)
        ended = await copy.fork()
        with raises_code("episode-over"):
            await ended.call("step", "1", TASK)
        found = [await one.reward() for one in (live, copy, ended)]
        for one in (live, copy, ended):
            await one.close()
        return found

    assert asyncio.run(work()) == pytest.approx([-0.1, 0.8, 0.8])


class Broken:
    def reset(self, level: int) -> None: ...

    def moveTo(self, place: str) -> str:
        """Moves."""
        return place

    def move_to(self, place: str) -> str:
        """Moves."""
        return place

    def _private(self) -> None: ...


class Alone(Broken):
    move_to = None


class Bare(Broken):
    moveTo = None

    def look(self, place):  # type: ignore[no-untyped-def]
        """Looks."""


class Mute(Alone):
    def look(self) -> str:
        return "w"


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (Bare, "parameter-without-annotation"),
        (Mute, "tool-without-docstring"),
    ],
)
def test_what_makes_no_tools_is_named_with_its_class(made: type, code: str) -> None:
    with raises_code(code):
        kind_of(made)
    assert [tool.name for tool in kind_of(Alone).tools] == ["move_to"]
    with raises_code("tools-same-name"):
        Toolbox(kind_of(Broken).tools, ToolsSettings())


def test_a_reset_that_asks_for_another_column_says_which() -> None:
    with raises_code("environment-column-missing"):
        play(Alone)


# ---------------------------------------------------------------------- whole runs


class Walks(OpenTasks):
    """One question for all tasks, as a game has: only the columns and the first observation tell
    them apart. The expert walks to the goal; it writes every second result down."""

    def __init__(self, *, seed: int, num_train: int, num_eval: int) -> None:
        self.num_train = num_train
        self.num_eval = num_eval

    def _tasks(self, name: str, num: int) -> list[Task]:
        question = "go ?"
        return [
            Task(id=f"{name}/{n}", question=question, reference=(), columns={"length": 1 + n % 3})
            for n in range(num)
        ]

    def train_tasks(self) -> Sequence[Task]:
        return self._tasks("train", self.num_train)

    def eval_tasks(self) -> Sequence[Task]:
        return self._tasks("eval", self.num_eval)

    def warmup_tasks(self, num: int, seed: int) -> Sequence[Task]:
        return self._tasks("warmup", num)

    def expert(self, task: Task, seed: int) -> tuple[StepContent, ...] | None:
        length = task.columns["length"]
        steps = [
            StepContent(
                calls=(ToolCall("step", "1"),),
                observations=(Observation(text=f"field {n}"),) if n % 2 else (),
            )
            for n in range(1, length + 1)
        ]
        return (*steps, StepContent(answer="done"))

    def vocabulary(self) -> Sequence[str]:
        return ["go", "?", "field", "done", *map(str, range(-2, 10))]


class Drifting(Walks):
    """Its expert believes that the last field is another one."""

    def expert(self, task: Task, seed: int) -> tuple[StepContent, ...] | None:
        *steps, last = super().expert(task, seed) or ()
        if task.columns["length"] == 3:
            steps[2] = replace(steps[2], observations=(Observation(text="field 9"),))
        return (*steps, last)


class Late(Walks):
    """Its expert goes on after the end."""

    def expert(self, task: Task, seed: int) -> tuple[StepContent, ...] | None:
        *steps, last = super().expert(task, seed) or ()
        return (*steps, StepContent(calls=(ToolCall("step", "1"),)), last)


class Forgotten(Walks):
    """Has an expert, but no tasks to warm up on."""

    def warmup_tasks(self, num: int, seed: int) -> Sequence[Task]:
        return ()


def make_walker(*, tokenizer: Any, **_: Any) -> ScriptedEngine:
    """Agents that go right, but back with their second step; more and more unsure."""

    def agent(path: str) -> str:
        num = path.count("</result>")
        if "over;" in path.rpartition("<result>")[2] or num > 4:
            return "<answer> \\boxed{ done } </answer>"
        return f"<step> {-1 if num == 1 else 1} </step>"

    return ScriptedEngine(agent, tokenizer, entropy=lambda path: float(path.count("</result>")))


def walk(folder: Path, name: str, explorers: list[str], **tables: Any) -> Path:
    base = tiny(
        run={"dir": str(folder), "name": name},
        tasks={"kind": f"{HERE}:Walks", "num_train": 6, "num_eval": 3},
        environment={"kind": f"{HERE}:Corridor"},
        engine={"kind": f"{HERE}:make_walker"},
        explore={
            "explorers": explorers,
            "num_leaves": 4,
            "entropy": {"num_starts": 2, "probe_tokens": 2},
            "graft": {"num_hybrid": 2, "probability": 1.0},
        },
        rollout={"max_completion_tokens": 80, "max_agent_steps": 8, "max_tool_calls": 7},
        model={"tiny": {"max_context": 128}},
        warmup={"num_steps": 2, "batch_size": 6, "decision_frac": 0.0},
        buffer={"path": "expert", "encoder": "hashing"},
        reward={"funcs": ["environment"]},
        eval={"at_start": False, "num_samples": 0},
    )
    del base["reward"]["accuracy"], base["warmup"]["continue_prob"]
    return train(merged(base, tables)).run_dir


def merged(base: dict[str, Any], tables: dict[str, Any]) -> dict[str, Any]:
    return {name: {**base.get(name, {}), **tables.get(name, {})} for name in {**base, **tables}}


def outside(path: Any) -> tuple[list[str], float]:
    """A trajectory's calls made anew on a plain object: what it tells, and what it pays."""
    world = Corridor()
    told = []
    world.reset(length=path.task.columns["length"])
    for content in path.contents:
        for call in content.calls:
            if world.done:
                told.append(OVER)
                continue
            text = world.step(int(call.body))
            told.append(f"{text}\n[{OVER}]" if world.done else text)
    return told, world.paid


def check_outside(folder: Path) -> int:
    """Every call of every recorded tree, made anew; returns how many."""
    num = 0
    for tree in read_trees(folder):
        assert tree.task.question == "go ?\nfield 0"
        for path in tree.trajectories():
            told, paid = outside(path)
            assert [one.text for step in path.contents for one in step.observations] == told
            assert path.leaf.environment_reward == pytest.approx(paid) == path.reward
            num += len(told)
    return num


def test_a_game_is_played_by_grpo(tmp_path: Path) -> None:
    folder = walk(tmp_path, "grpo", ["independent"])
    assert check_outside(folder) > 30
    last = read_metrics(folder)[-1]
    assert last["environment/num_opened"] == 12 and last["environment/num_failures"] == 0


@pytest.mark.parametrize("capability", ["fork", "replay"])
def test_a_game_is_branched(tmp_path: Path, capability: str) -> None:
    folder = walk(tmp_path, capability, ["entropy"], environment={"capability": capability})
    assert check_outside(folder) > 30
    for line in read_metrics(folder)[1:]:
        num = line["branch/num_branches"]
        names = ("num_forks", "num_replays")
        copies = [line[f"environment/{name}"] for name in names]
        assert copies == ([num, 0] if capability == "fork" else [0, num]) and num > 0


def test_rapo_takes_the_environments_reward_and_the_tasks_expert(tmp_path: Path) -> None:
    """Demonstrations and traces hold the first observation and the results that came; what the
    agent is shown of others is what its own world says."""
    folder = walk(tmp_path, "rapo", ["graft"], environment={"capability": "fork"})
    assert check_outside(folder) > 30
    assert sum(line.get("graft/num_grafts", 0) for line in read_metrics(folder)) > 0
    with TraceBuffer(folder / "buffer" / "traces.sqlite", "hashing") as buffer:
        traces = list(buffer)
    assert len(traces) == 2 * (1 + 2 + 3) + 6 and {one.reward for one in traces} == {1.0, 0.9, 0.8}
    assert {one.key.split("\n")[0] for one in traces} == {"go ? field 0"}
    ends = [
        one.value.observations[0].text for one in traces if one.position == 2 and not one.terminal
    ]
    assert ends == [f"field 3\n[{OVER}]"] * 2
    grafts = [line for line in read_metrics(folder) if "environment/num_rehearsals" in line]
    assert all(
        line["environment/num_graft_tries"] >= line["environment/num_rehearsals"] for line in grafts
    )


def test_demonstrations_hold_what_rollouts_hold(tmp_path: Path) -> None:
    run = {"dir": str(tmp_path), "name": "none", "num_updates": 0, "seed": 3}
    folder = walk(tmp_path, "none", ["independent"], run=run)
    config = load_config(folder / "config.json")

    async def work() -> list[Tree]:
        async with Parts.build(config) as parts:
            shown = Demonstrations(parts.source, parts.format, config.warmup, 3, parts.show)
            await shown.prepare(0)
            return shown.batch(0)

    for tree in asyncio.run(work()):
        assert tree.task.question == "go ?\nfield 0"
        path = tree.trajectories()[0]
        assert [one.text for step in path.contents for one in step.observations] == outside(path)[0]


class Fixed(Corridor):
    """Holds what no deep copy can copy."""

    capability = "fork"

    def __init__(self) -> None:
        super().__init__()
        self.lines: Iterator[str] = iter("abc" for _ in range(3))


class Blank(Corridor):
    """Its copies have not begun, so that their reward fails."""

    def reset(self, **row: Any) -> str:  # type: ignore[override]
        self.begun = 0.0
        return super().reset(length=2)[0]

    def get_reward(self) -> float:
        return self.begun

    def fork(self) -> Blank:
        return Blank()


class Priceless(Corridor):
    def get_reward(self) -> None: ...


class Leveled(Corridor):
    def reset(self, level: int) -> None:  # type: ignore[override]
        ...


class Fallen(Corridor):
    def reset(self, **row: Any) -> str:  # type: ignore[override]
        raise OSError("no world today")


HERE = "tests.tools.test_foreign_environments"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (
            {"tasks": {"kind": f"{HERE}:Drifting"}},
            "demonstration-untrue",
        ),
        ({"tasks": {"kind": f"{HERE}:Forgotten"}}, "expert-missing"),
        ({"environment": {"kind": f"{HERE}:Leveled"}}, "environment-trial-failed"),
        ({"environment": {"kind": f"{HERE}:Fallen"}}, "environment-trial-failed"),
        ({"environment": {"kind": f"{HERE}:Priceless"}}, "environment-no-first-reward"),
        (
            {"environment": {"kind": f"{HERE}:Fixed"}, "explorers": "entropy"},
            "environment-trial-failed",
        ),
        (
            {"environment": {"kind": f"{HERE}:Fixed"}, "explorers": "tree_search"},
            "environment-trial-failed",
        ),
        (
            {"environment": {"kind": f"{HERE}:Blank"}, "explorers": "entropy"},
            "environment-trial-failed",
        ),
    ],
)  # fmt: skip
def test_what_would_fail_later_is_named_before_the_run(
    tmp_path: Path, changes: dict[str, Any], code: str
) -> None:
    changes["environment"] = {"kind": f"{HERE}:Corridor", **changes.get("environment", {})}
    with raises_code(code):
        walk(tmp_path, "refused", [changes.pop("explorers", "independent")], **changes)
    assert not (tmp_path / "refused").exists()


def test_doctor_tries_the_environment(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(
        f'[tasks]\nkind = "{HERE}:Walks"\n[model]\npath = "tiny"\n[explore]\n'
        f'explorers = ["entropy"]\n[environment]\nkind = "{HERE}:Corridor"\n'
        'capability = "replay"\n',
        encoding="utf-8",
    )

    def found(*overrides: str) -> dict[str, Finding]:
        config = load_config(tmp_path / "recipe.toml", overrides)
        return {one.name: one for one in examine(config).sections["first tasks"]}

    told = found()
    assert told["environment"].value == f"{HERE}:Corridor"
    assert told["environment"].note == "branches: replay; tools: step"
    told = found(f"tasks.kind={HERE}:Late")
    assert "call 2 of 2, step '1', gave 'the episode is over" in told["setup"].note
    told = found(f"environment.kind={HERE}:Fallen")
    assert not told["setup"].is_good and "no world today" in told["setup"].note
