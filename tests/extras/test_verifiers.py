"""Environments of the package verifiers, where it is installed: TextArena's Wordle, with a few
words of our own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.support.error_codes import raises_code
from tests.tools.test_environments import make_toolbox

from treegraft.core.errors import DataError, SettingError
from treegraft.core.types import Task, ToolCall
from treegraft.extras.environments.verifiers.environment import INDEX, VerifiersEnvironments
from treegraft.extras.environments.verifiers.tasks import VerifiersTasks
from treegraft.settings.tools import EnvironmentSettings
from treegraft.tools.build import open_environments
from treegraft.tools.environments.own import OVER
from treegraft.tools.environments.sessions import Environments

WORDLE = {"taskset": "textarena", "settings": {"game": "Wordle-v0"}}
WORDS = (
    "apple",
    "house",
    "table",
    "river",
    "stone",
    "light",
    "night",
    "water",
    "green",
    "chair",
    "plant",
    "music",
)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The two data sets of NLTK that the game reads, in small: no package of the index carries
    them."""
    pytest.importorskip(
        "verifiers.v1", reason="needs verifiers, which cannot be installed beside mcp 2.3"
    )
    pytest.importorskip("textarena", reason="needs textarena")
    nltk = pytest.importorskip("nltk", reason="needs nltk")
    folder = tmp_path_factory.mktemp("nltk")
    lists = folder / "corpora" / "words"
    tagger = folder / "taggers" / "averaged_perceptron_tagger_eng"
    lists.mkdir(parents=True)
    tagger.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (lists / name).write_text("\n".join(WORDS))
    for part, value in (
        ("weights", {}),
        ("tagdict", dict.fromkeys(WORDS, "NN")),
        ("classes", ["NN"]),
    ):
        (tagger / f"{tagger.name}.{part}.json").write_text(json.dumps(value))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk.data, "path", [str(folder)])
        patch.setattr(nltk, "download", lambda *_, **__: True)
        yield


def opened(capability: Any = "replay", **options: Any) -> Environments:
    settings = EnvironmentSettings(
        kind="verifiers", options={**WORDLE, **options}, capability=capability, deadline_s=30
    )
    kind = open_environments(settings)
    assert kind is not None
    return Environments(kind, settings)


@pytest.mark.usefixtures("words")
def test_tasks_have_the_game_s_prompt() -> None:
    tasks = VerifiersTasks(seed=0, num_train=3, num_eval=2, **WORDLE)
    train = tasks.train_tasks()
    held_out = tasks.eval_tasks()
    assert [task.id for task in (*train, *held_out)] == [f"textarena/{n}" for n in range(5)]
    assert "You are Playing Wordle" in train[0].question and not train[0].reference


@pytest.mark.usefixtures("words")
def test_a_game_is_played_branched_and_won() -> None:
    """Whoever tries all words wins; a branch after one guess sees the same letters, and a lost
    episode earns less."""
    worlds = opened(tool="guess")
    task = VerifiersTasks(seed=0, num_train=1, num_eval=1, **WORDLE).train_tasks()[0]

    async def play(session: Any, words: Any) -> tuple[str, float]:
        for word in words:
            seen = await session.call(ToolCall("guess", f"[{word}]"))
            if "over" in seen.text:
                break
        return word, await session.reward()

    async def work() -> None:
        box = make_toolbox(worlds, deadline_s=30, max_output_chars=2000)
        async with box.sessions(task) as sessions:
            assert await sessions.prepare(2) is task
            one, other = await sessions.start(0).open(), await sessions.start(1).open()
            first = await one.call(ToolCall("guess", "[apple]"))
            assert "A P P L E" in first.text and not first.is_error
            assert (await other.call(ToolCall("guess", "[apple]"))).text == first.text
            branch = await one.mark().open()
            # Six guesses each: five more for one, five others for the branch; one of the two finds
            # the word, or neither.
            ends = [await play(one, WORDS[1:6]), await play(branch, WORDS[6:11])]
            assert sorted(reward for _, reward in ends)[1] == 1.0 or all(
                reward < 1 for _, reward in ends
            )
            won = [word for word, reward in ends if reward == 1.0] or [WORDS[11]]
            assert await play(other, won) == (won[0], 1.0)
            assert (
                await other.call(ToolCall("guess", "[apple]"))
            ).text == "the episode is over; give your answer"
        found = worlds.take_metrics()
        assert (found["environment/num_replays"], found["environment/num_mismatches"]) == (1, 0)

    asyncio.run(work())


@pytest.mark.usefixtures("words")
def test_an_episode_without_a_guess_ends_with_its_reward() -> None:
    worlds = opened("none")

    async def work() -> None:
        task = VerifiersTasks(seed=0, num_train=1, num_eval=1, **WORDLE).eval_tasks()[0]
        async with make_toolbox(worlds).sessions(task) as sessions:
            await sessions.prepare(1)
            assert await (await sessions.start(0).open()).reward() == 0.0
        async with make_toolbox(worlds).sessions(
            Task(id="t", question="?", reference=())
        ) as sessions:
            await sessions.prepare(1)
            with raises_code("verifiers-without-index"):
                await sessions.start(0).open()

    asyncio.run(work())


def test_a_turn_without_words_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's part in it, in its place: an episode of three turns, two of them silent."""
    for name in ("verifiers", "verifiers.v1", "verifiers.v1.agent"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["verifiers.v1.agent"].Segment = SimpleNamespace  # type: ignore[attr-defined]

    class Episode:
        async def setup(self, agents: Any) -> None: ...

        async def run(self, task: Any, agents: Any) -> None:
            for message in (["hello"], [], [""]):
                await agents.agent.turn(*message)
            agents.agent.trace.record_reward("made", 1.0)

    kind = object.__new__(VerifiersEnvironments)
    kind.env = Episode()
    kind.agents = ["agent"]
    kind._tasks = [None]
    kind._rest = iter(())
    kind._loop = None
    task = Task(id="t", question="?", reference=(), columns={INDEX: 0})

    async def work() -> list[str]:
        live = kind.make()
        first = await live.reset(task)
        return [first, *[await live.call("say", "on", task) for _ in range(3)]]

    assert asyncio.run(work()) == ["hello", "", "", f"[{OVER}]"]


@pytest.mark.usefixtures("words")
def test_tasksets_that_cannot_be_had() -> None:
    with raises_code("verifiers-not-loaded"):
        opened(taskset="nowhere", settings={})
    with raises_code("verifiers-not-loaded"):
        opened(settings={"game": "Chess"})
    with raises_code("verifiers-taskset-invalid"):
        opened(env="single_agent")
    with pytest.raises((SettingError, DataError)):
        VerifiersTasks(seed=0, num_train=1, num_eval=1, taskset="nowhere")


@pytest.mark.parametrize(
    ("options", "capability", "code"),
    [
        ({}, "auto", "environment-options-invalid"),
        (WORDLE, "fork", "no-fork"),
        ({**WORDLE, "game": "x"}, "auto", "environment-options-invalid"),
    ],
)
def test_what_is_refused_without_the_package(
    options: dict[str, Any], capability: Any, code: str
) -> None:
    with raises_code(code):
        open_environments(
            EnvironmentSettings(kind="verifiers", options=options, capability=capability)
        )


def test_a_missing_package_is_named() -> None:
    try:
        import verifiers.v1  # noqa: F401
    except ImportError:
        with raises_code("package-missing"):
            open_environments(EnvironmentSettings(kind="verifiers", options=WORDLE))
