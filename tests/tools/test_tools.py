"""Tools and the toolbox: tools that raise, hang, flood and lie."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from pydantic import Field
from tests.support.error_codes import raises_code

from treegraft.core.errors import ToolError, ToolUnavailable
from treegraft.core.interfaces import Capability, Tool
from treegraft.core.types import Observation, Task, ToolCall
from treegraft.rollout.formats.markup import system_prompt_for
from treegraft.settings.tools import ToolsSettings
from treegraft.tools.build import build_tools
from treegraft.tools.function import FunctionTool
from treegraft.tools.toolbox import Toolbox

TASK = Task(id="t/1", question="?", reference=())


class Fake:
    """A tool around a coroutine function."""

    description = "A fake."
    capability = Capability.STATELESS

    def __init__(
        self, run: Callable[[str], Awaitable[Any]], *, name: str = "fake", cacheable: bool = False
    ) -> None:
        self.name = name
        self.cacheable = cacheable
        self.num_runs = 0
        self.is_closed = False
        self._run_body = run

    async def __call__(self, body: str, task: Task) -> str:
        self.num_runs += 1
        result: str = await self._run_body(body)
        return result

    async def close(self) -> None:
        self.is_closed = True


def toolbox(
    *tools: Tool, deadline_s: float = 5.0, max_output_chars: int = 200, cache: bool = True
) -> Toolbox:
    return Toolbox(
        tools,
        ToolsSettings(
            deadline_s=deadline_s, max_output_chars=max_output_chars, cache=cache, max_concurrent=4
        ),
    )


def call_once(tool: Tool, body: str = "x", **options: Any) -> Observation:
    return asyncio.run(toolbox(tool, **options).call(ToolCall(tool.name, body), TASK))


def returning(value: Any) -> Fake:
    async def run(body: str) -> Any:
        return value

    return Fake(run)


def raising(error: BaseException, **options: Any) -> Fake:
    async def run(body: str) -> Any:
        raise error

    return Fake(run, **options)


# Toolbox


def test_failures_become_observations() -> None:
    assert call_once(raising(ToolError("no such page"))) == Observation(
        text="no such page", is_error=True
    )
    assert call_once(raising(KeyError("k"))) == Observation(text="KeyError: 'k'", is_error=True)
    assert call_once(raising(SystemExit(3))) == Observation(text="SystemExit: 3", is_error=True)
    assert call_once(raising(asyncio.CancelledError())).is_error
    assert call_once(raising(StopAsyncIteration())).is_error


def test_an_unavailable_service_is_raised() -> None:
    with pytest.raises(ToolUnavailable, match="down"):
        call_once(raising(ToolUnavailable("down")))
    with pytest.raises(ToolUnavailable, match="down"):
        call_once(raising(ToolUnavailable("down"), cacheable=True))


def test_an_unknown_tool_is_an_observation() -> None:
    observation = asyncio.run(toolbox(returning("x")).call(ToolCall("fakes", ""), TASK))
    assert observation.is_error
    assert "there is no tool 'fakes' (there is: fake) Did you mean 'fake'?" in observation.text


def test_results_of_other_types_become_text() -> None:
    assert call_once(returning(b"caf\xc3\xa9 \xff\x00")).text == "café \ufffd\x00"
    assert call_once(returning(42)).text == "42"
    assert call_once(returning(None)).text == ""
    found = {"name": "caf\xe9", "sizes": (1, 2), "of": {"a": np.float32(0.5)}, "by": None}
    assert call_once(returning(found)).text == (
        '{"name": "caf\xe9", "sizes": [1, 2], "of": {"a": 0.5}, "by": null}'
    )
    assert call_once(returning([Observation(text="x")])).text.startswith('[{"text": "x", "is_')
    assert call_once(returning((np.arange(2), Path("a")))).text == '[[0, 1], "a"]'
    # Bytes wherever they stand, and arrays of any length in full.
    assert call_once(returning({"out": [b"caf\xe9"]})).text == '{"out": ["caf\ufffd"]}'
    for long in (np.arange(2000), torch.arange(2000)):
        whole = call_once(returning(long), max_output_chars=12_000).text
        assert whole == str([*range(2000)])


def test_output_is_capped_and_says_so() -> None:
    observation = call_once(returning("x" * 100_000_000), max_output_chars=100)
    note = "\n[output cut: 100000000 characters]"
    assert observation == Observation(text="x" * (100 - len(note)) + note, is_truncated=True)
    assert call_once(returning("x" * 17), max_output_chars=16).text == "x" * 10 + " [cut]"
    assert call_once(returning("x" * 16), max_output_chars=16) == Observation(text="x" * 16)
    assert call_once(raising(ValueError("y" * 999))).is_truncated


def test_a_call_past_its_deadline_is_an_observation() -> None:
    was_cancelled = []

    async def hang(body: str) -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            was_cancelled.append(body)
            raise
        return ""

    observation = call_once(Fake(hang), "b", deadline_s=0.05)
    assert observation == Observation(text="the call timed out after 0.05 s", is_error=True)
    assert was_cancelled == ["b"]


def test_a_tool_that_ignores_its_cancellation_is_not_waited_for() -> None:
    async def stubborn(body: str) -> str:
        for _ in range(2):
            try:
                await asyncio.sleep(10.0)
            except asyncio.CancelledError:
                continue
        return "late"

    async def run() -> float:
        box = toolbox(Fake(stubborn), deadline_s=0.05)
        started = time.perf_counter()
        observation = await box.call(ToolCall("fake", ""), TASK)
        assert observation.is_error
        return time.perf_counter() - started

    assert asyncio.run(run()) < 5.0


def test_the_deadline_starts_when_the_call_does() -> None:
    async def nap(body: str) -> str:
        await asyncio.sleep(0.6)
        return body

    async def run() -> list[Observation]:
        box = Toolbox(
            [Fake(nap)],
            ToolsSettings(deadline_s=2.0, max_output_chars=100, cache=False, max_concurrent=1),
        )
        return await asyncio.gather(*(box.call(ToolCall("fake", str(n)), TASK) for n in range(4)))

    assert [observation.text for observation in asyncio.run(run())] == ["0", "1", "2", "3"]


def test_equal_calls_of_a_cacheable_tool_run_once() -> None:
    async def slow(body: str) -> str:
        await asyncio.sleep(0.02)
        return body

    async def run(cacheable: bool, cache: bool) -> tuple[int, list[Observation], dict[str, float]]:
        tool = Fake(slow, cacheable=cacheable)
        box = toolbox(tool, cache=cache)
        together = await asyncio.gather(*(box.call(ToolCall("fake", "q"), TASK) for _ in range(3)))
        later = await box.call(ToolCall("fake", "q"), TASK)
        return tool.num_runs, [*together, later], box.take_metrics()

    cached = asyncio.run(run(True, True))
    assert cached[0] == 1
    assert cached[1] == [Observation(text="q")] * 4
    assert cached[2]["tools/fake_calls"] == 4
    assert cached[2]["time/tool_fake_cached_frac"] == 0.75
    assert asyncio.run(run(False, True))[:2] == (4, cached[1])
    assert asyncio.run(run(True, False))[:2] == (4, cached[1])


def test_the_cache_keeps_no_errors() -> None:
    async def fail_first(body: str) -> str:
        if tool.num_runs == 1:
            raise ToolError("not yet")
        return "now"

    tool = Fake(fail_first, cacheable=True)

    async def run() -> list[Observation]:
        box = toolbox(tool)
        return [await box.call(ToolCall("fake", "q"), TASK) for _ in range(3)]

    assert [observation.text for observation in asyncio.run(run())] == ["not yet", "now", "now"]
    assert tool.num_runs == 2


def test_a_caller_that_gives_up_leaves_a_shared_run_to_the_others() -> None:
    async def slow(body: str) -> str:
        await asyncio.sleep(0.1)
        return body

    async def run() -> Observation:
        box = toolbox(Fake(slow, cacheable=True))
        first = asyncio.create_task(box.call(ToolCall("fake", "q"), TASK))
        second = asyncio.create_task(box.call(ToolCall("fake", "q"), TASK))
        await asyncio.sleep(0.02)
        first.cancel()
        return await second

    assert asyncio.run(run()) == Observation(text="q")


def test_metrics_count_since_the_last_take() -> None:
    async def odd(body: str) -> str:
        await asyncio.sleep(0.01)
        if body == "bad":
            raise ToolError("bad")
        return body

    async def run() -> tuple[dict[str, float], dict[str, float]]:
        box = toolbox(Fake(odd))
        for body in ("a", "bad", "b", "c"):
            await box.call(ToolCall("fake", body), TASK)
        return box.take_metrics(), box.take_metrics()

    first, second = asyncio.run(run())
    assert first["tools/fake_calls"] == 4
    assert first["tools/fake_failure_frac"] == 0.25
    assert first["time/tool_fake_cached_frac"] == 0
    assert 0.01 <= first["time/tool_fake_s"] < 1
    assert second == {"tools/fake_calls": 0}


def test_closing_closes_every_tool_even_after_a_failure() -> None:
    broken = returning("")
    sound = Fake(returning("")._run_body, name="sound")

    async def fail() -> None:
        raise RuntimeError("stuck")

    broken.close = fail  # type: ignore[method-assign]
    asyncio.run(toolbox(broken, sound).close())
    assert sound.is_closed


def test_a_toolbox_serves_one_event_loop_after_another() -> None:
    async def nap(body: str) -> str:
        await asyncio.sleep(0.01)
        return body

    box = Toolbox(
        [Fake(nap, cacheable=True)],
        ToolsSettings(deadline_s=1, max_output_chars=99, cache=True, max_concurrent=1),
    )

    async def run() -> list[Observation]:
        return await asyncio.gather(*(box.call(ToolCall("fake", str(n)), TASK) for n in range(3)))

    assert asyncio.run(run()) == asyncio.run(run())


# Functions


def shout(text: str) -> str:
    """Says it
    loudly.

    Nothing else.
    """
    return text.upper()


async def add(left: int, right: int = 1) -> str:
    """Adds."""
    return str(left + right)


def double(number: int) -> str:
    """Doubles."""
    return str(2 * number)


def whoami(task: Task, greeting: str) -> str:
    """Greets."""
    return f"{greeting} {task.id}"


def test_functions_become_tools() -> None:
    tool = FunctionTool(shout)
    assert isinstance(tool, Tool)
    assert (tool.name, tool.description) == ("shout", "Says it loudly.")
    assert (tool.capability, tool.cacheable) == (Capability.STATELESS, False)
    assert call_once(tool, " hi ").text == " HI "
    assert call_once(FunctionTool(add), '{"left": 2, "right": 3}').text == "5"
    assert call_once(FunctionTool(add), '{"left": 2}').text == "3"
    assert call_once(FunctionTool(double), "21").text == "42"
    assert call_once(FunctionTool(double), '{"number": 21}').text == "42"
    assert call_once(FunctionTool(whoami), "hello").text == "hello t/1"


def test_annotated_parameters_keep_their_descriptions_and_bounds() -> None:
    def pick(rank: Annotated[int, Field(ge=1, le=5, description="place in the list")]) -> str:
        """Picks."""
        return str(rank)

    def greet(task: Annotated[Task, "who"], name: Annotated[str, Field(max_length=3)]) -> str:
        """Greets."""
        return f"{name} {task.id}"

    told = FunctionTool(pick).signature.schema["properties"]["rank"]
    assert (told["minimum"], told["maximum"]) == (1, 5)
    assert told["description"] == "place in the list"
    assert call_once(FunctionTool(pick), "5").text == "5"
    assert "'rank' does not fit: Input should be less" in call_once(FunctionTool(pick), "900").text
    assert call_once(FunctionTool(greet), "Ann").text == "Ann t/1"
    assert "'name' does not fit: String should have at most 3" in (
        call_once(FunctionTool(greet), "Anna").text
    )
    assert call_once(FunctionTool(shout), "\ud83d").text == "\ud83d"


def test_arguments_with_defaults_may_be_left_out() -> None:
    def ls(show_all: bool = False) -> str:
        """Lists."""
        return str(show_all)

    def look(at: str = "all") -> str:
        """Looks."""
        return at

    def move(x: int = 1, y: int = 2) -> str:
        """Moves."""
        return f"{x} {y}"

    def take(items: dict[str, int]) -> str:
        """Takes."""
        return str(sum(items.values()))

    told = {
        ls: {"": "False", " ": "False", "{}": "False", "true": "True", '{"show_all": 1}': "True"},
        look: {"": "all", " \n": "all", " key": " key"},
        move: {"": "1 2", "{}": "1 2", '{"y": 5}': "1 5"},
        take: {'{"a": 1, "b": 2}': "3", '{"items": {"a": 4}}': "4"},
    }
    for func, bodies in told.items():
        for body, expected in bodies.items():
            assert call_once(FunctionTool(func), body).text == expected
    wrong = call_once(FunctionTool(ls), '{"fileName": "x"}')
    assert wrong.text == (
        'ls has no parameter \'fileName\'; it takes {"show_all": ...} ("show_all" optional)'
    )
    assert "needs JSON" in call_once(FunctionTool(double), "").text
    assert "'number' is missing" in call_once(FunctionTool(double), "{}").text


def test_the_prompt_says_which_arguments_are_optional() -> None:
    def look(at: str = "all") -> str:
        """Looks."""
        return at

    told = system_prompt_for(
        [FunctionTool(add), FunctionTool(look), FunctionTool(shout)], True, True
    )
    assert (
        '<add>...</add> Adds. Its input is a JSON object: {"left": {"type": "integer"}, "right":'
        ' {"type": "integer"}}. Optional: right.\n'
    ) in told
    assert "<look>...</look> Looks. Its input may be empty.\n" in told
    assert "<shout>...</shout> Says it loudly.\n" in told


def test_names_in_camel_case_become_tags() -> None:
    def moveTo2(place: str) -> str:
        """Moves."""
        return place

    assert FunctionTool(moveTo2).name == "move_to_two"
    assert FunctionTool(moveTo2, name="go").name == "go"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("2 3", "not JSON"),
        ("[2]", "needs a JSON object"),
        ('{"left": "x"}', "'left' does not fit"),
        ('{"right": 1}', "'left' is missing"),
        ('{"left": 1, "up": 2}', "no parameter 'up'"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_body_that_does_not_fit_is_explained(body: str, message: str) -> None:
    observation = call_once(FunctionTool(add), body, max_output_chars=400)
    assert observation.is_error
    assert message in observation.text


def test_a_function_that_raises_in_its_thread_is_an_observation() -> None:
    def stop(text: str) -> str:
        """Ends."""
        raise (StopIteration if text == "stop" else SystemExit)("now")

    assert call_once(FunctionTool(stop), "stop").text == "RuntimeError: StopIteration: now"
    assert call_once(FunctionTool(stop), "exit").text == "RuntimeError: SystemExit: now"


def test_functions_that_make_no_tool_are_refused() -> None:
    def undocumented(text: str) -> str:
        return text

    def untyped(text):  # type: ignore[no-untyped-def]
        """Untyped."""

    def star(*texts: str) -> str:
        """Starred."""
        return ""

    def bit_by_bit(text: str) -> Iterator[str]:
        """Yields."""
        yield text

    async def later(text: str) -> AsyncIterator[str]:
        """Yields."""
        yield text

    for func, code in (
        (undocumented, "tool-without-docstring"),
        (untyped, "parameter-without-annotation"),
        (star, "parameter-starred"),
        (bit_by_bit, "tool-yields"),
        (later, "tool-yields"),
        (lambda text: text, "tool-name-invalid"),
    ):
        with raises_code(code):
            FunctionTool(func)


def test_functions_may_declare_capability_and_cacheability() -> None:
    def stateful(text: str) -> str:
        """Stateful."""
        return text

    stateful.capability = "none"  # type: ignore[attr-defined]
    stateful.cacheable = True  # type: ignore[attr-defined]
    tool = FunctionTool(stateful)
    assert (tool.capability, tool.cacheable) == (Capability.NONE, True)

    def of_the_task(text: str, task: Task) -> str:
        """Depends on the task, by which no result is kept."""
        return text + task.id

    of_the_task.cacheable = True  # type: ignore[attr-defined]
    assert not FunctionTool(of_the_task).cacheable
    stateful.capability = "sometimes"  # type: ignore[attr-defined]
    with raises_code(
        "capability-unknown", match="expected one of 'stateless', 'fork', 'replay', 'none'"
    ):
        FunctionTool(stateful)


# Building

USER_MODULE = '''
from treegraft.core.interfaces import Capability

def lookup(text: str) -> str:
    """Looks up."""
    return text

class Ready:
    name, description, capability, cacheable = "ready", "Is ready.", Capability.STATELESS, False
    async def __call__(self, body, task): return body
    async def close(self): pass

class Needy(Ready):
    def __init__(self, key): pass

number = 3
'''


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_tools.py").write_text(USER_MODULE)
    (tmp_path / "users_broken.py").write_text("import not_there_at_all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "users_tools", raising=False)
    return "users_tools"


def test_tools_are_built_from_names_and_import_paths(user_module: str) -> None:
    use = [f"{user_module}:lookup", f"{user_module}:Ready"]
    tools = build_tools(ToolsSettings(use=use), [returning(1)])
    assert [tool.name for tool in tools] == ["fake", "lookup", "ready"]


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ("saerch", "unknown-name"),
        ("users_tools:lookpu", "import-name-missing"),
        ("users_tools:number", "tool-invalid"),
        ("users_tools:Needy", "tool-not-made"),
        ("users_broken:x", "import-needs-package"),
        ("users_nothing:x", "import-module-missing"),
        ("users_file.py:x", "import-path-file"),
        ("/a folder/users_file.py:x", "import-path-file"),
        ("users_tools:", "import-path-invalid"),
    ],
)
def test_wrong_entries_are_explained(user_module: str, entry: str, code: str) -> None:
    with raises_code(code):
        build_tools(ToolsSettings(use=[entry]), [])
