"""Foreign classes as environments: a text game in Gymnasium's manner and a file system of plain
Python, neither with a parent of ours."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from treegraft.core.errors import SettingError, ToolError, ToolUnavailable
from treegraft.core.text import as_text
from treegraft.core.types import Task
from treegraft.settings.tools import EnvironmentSettings
from treegraft.tools.environments.own import OVER, ClassEnvironments

TASK = Task(id="t/0", question="Reach the goal.", reference=(), columns={"length": 3})


class Corridor:
    """Gymnasium's way: reset gives (observation, info), step five values. The goal is at `length`,
    a pit at -2; the clock stops after six steps."""

    def __init__(self, render_mode: str | None = None) -> None:
        self.place = self.clock = 0

    def reset(self, *, seed: int | None = None, options=None, length: int = 2):  # type: ignore[no-untyped-def]
        self.place, self.clock, self.length = 0, 0, length
        return self._seen(), {"length": length}

    def step(self, action):  # type: ignore[no-untyped-def]
        """Goes one field: 1 to the right, -1 to the left.

        Any other number stays.
        """
        self.clock += 1
        self.place += action if action in (1, -1) else 0
        is_there, is_lost = self.place == self.length, self.place == -2
        reward = 1.0 if is_there else -1.0 if is_lost else -0.1
        return self._seen(), reward, is_there or is_lost, self.clock == 6, {"place": self.place}

    def render(self):  # type: ignore[no-untyped-def]
        return "." * self.place

    def _seen(self) -> str:
        return f"field {self.place}"


class Files:
    """A stateful interface of plain Python: methods in camelCase, results that are no text, an end
    that an attribute tells."""

    tools = ("listFiles", "write=writeFile", "read=readFile", "submit")

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

    def helper(self):  # type: ignore[no-untyped-def]
        return 1 / 0

    def get_reward(self) -> float:
        return float(self.done) + float(self.wanted in self.files)


def kind_of(made: type, **settings: Any) -> ClassEnvironments:
    return ClassEnvironments(
        made, made.__name__, EnvironmentSettings(kind="tests.worlds:X", **settings)
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
            except ToolError as error:
                told.append(f"error: {error}")
        reward = await live.reward()
        await live.close()
        return told, reward

    return asyncio.run(work())


def test_a_step_of_gymnasium_is_an_observation_a_reward_and_an_end() -> None:
    """Two steps cost 0.1 each, the third arrives: 1 - 0.2."""
    right = ("step", "1")
    told, reward = play(Corridor, right, ("step", '{"action": 1}'), right, right, tools=["step"])
    assert told == ["field 0", "field 1", "field 2", f"field 3\n[{OVER}]", f"error: {OVER}"]
    assert reward == pytest.approx(0.8)
    told, reward = play(Corridor, *[("step", "0")] * 6, tools=["step"])
    assert told[-1] == f"field 0\n[{OVER}]" and reward == pytest.approx(-0.6)
    assert play(Corridor, tools=["step"])[1] == 0.0


def test_other_forms_of_a_step() -> None:
    class Forms:
        capability = "fork"

        def reset(self) -> None: ...

        def old(self) -> tuple[Any, ...]:
            """Four values."""
            return "w", np.float32(2), np.True_, {}

        def plain(self) -> tuple[str, int, int]:
            """A tuple that is none of these."""
            return "w", 1, 2

        def without_info(self) -> Any:
            """Five values, the last no mapping."""
            return "w", 1.0, False, False, "x"

        def numbers(self) -> Any:
            """Five values without flags."""
            return 1, 2, 3, 4, {}

        def text(self) -> str:
            """A text alone."""
            return "w"

    assert play(Forms, ("old", ""), ("text", "")) == (["", f"w\n[{OVER}]", f"error: {OVER}"], 2.0)
    assert play(Forms, ("plain", ""))[0] == ["", '["w", 1, 2]']
    assert play(Forms, ("without_info", ""))[0] == ["", '["w", 1.0, false, false, "x"]']
    # None of these brought a reward, so there is none to give; a text was never going to.
    assert play(Forms, ("numbers", "")) == (["", "[1, 2, 3, 4, {}]"], None)
    assert play(Forms, ("text", "")) == (["", "w"], 0.0)


def test_an_object_that_says_done_is_over() -> None:
    write = ("write", '{"name": "a"}')
    told, reward = play(Files, ("list_files", ""), write, ("submit", ""), ("read", "a"))
    assert told == ['{"wanted": ["a"]}', "[]", "", f"received\n[{OVER}]", f"error: {OVER}"]
    assert reward == 2.0
    sizes = ("list_files", '{"showSizes": true}')
    assert play(Files, write, sizes, ("read", "a"))[0][2:] == ['{"a": 0}', ""]


def test_a_copy_goes_on_with_rewards_and_end() -> None:
    async def work() -> list[Any]:
        live = kind_of(Corridor, tools=["step"], capability="fork").make()
        await live.reset(TASK)
        await live.call("step", "1", TASK)
        copy = await live.fork()
        for _ in range(2):
            await copy.call("step", "1", TASK)
        ended = await copy.fork()
        with pytest.raises(ToolError, match=OVER):
            await ended.call("step", "1", TASK)
        found = [await one.reward() for one in (live, copy, ended)]
        for one in (live, copy, ended):
            await one.close()
        return found

    assert asyncio.run(work()) == pytest.approx([-0.1, 0.8, 0.8])


def test_tools_are_chosen_and_renamed_by_the_class_or_the_recipe() -> None:
    assert list(kind_of(Files).methods) == ["list_files", "write", "read", "submit"]
    assert list(kind_of(Files, tools=["put=writeFile"]).methods) == ["put"]
    assert kind_of(Corridor, tools=["go=step"]).tools[0].description.startswith("Goes one field")
    assert kind_of(Corridor, tools=["step"]).has_reward


class Broken:
    def reset(self, level: int) -> None: ...

    def moveTo(self, place: str) -> str:
        """Moves."""
        return place

    def move_to(self, place: str) -> str:
        """Moves."""
        return place

    def _private(self) -> None: ...


@pytest.mark.parametrize(
    ("made", "tools", "part"),
    [
        (Corridor, [], "method 'step' of 'Corridor': parameter 'action' has no annotation"),
        (Corridor, ["render"], "method 'render' of 'Corridor' has no docstring.*with _"),
        (Corridor, ["stop"], "'stop' names no method of .*; it has step, render. Did you mean"),
        (Corridor, ["reset"], "'reset' names no method"),
        (Broken, [], "two methods of 'Broken' give a tool named 'move_to'"),
    ],
)  # fmt: skip
def test_what_makes_no_tools_is_named_with_its_class(
    made: type, tools: list[str], part: str
) -> None:
    with pytest.raises(SettingError, match=part):
        kind_of(made, tools=tools)


def test_a_reset_that_asks_for_another_column_says_which() -> None:
    with pytest.raises(ToolUnavailable, match="'level', but task 't/0' has the columns reference,"):
        play(Broken, tools=["moveTo"])
