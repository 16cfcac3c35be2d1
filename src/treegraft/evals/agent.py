"""A trained agent to be asked from scripts, servers and notebooks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from treegraft.assemble import Parts, eval_limits
from treegraft.core.errors import DataError
from treegraft.core.given import GivenObjects, giving
from treegraft.core.interfaces import Tokenizer
from treegraft.core.looped import Life
from treegraft.core.types import Task, Trajectory, Tree
from treegraft.explore.independent import Independent
from treegraft.runs.open import open_with
from treegraft.runs.result import Answer, Messages
from treegraft.settings.load import refuse_sampling
from treegraft.settings.objects import Objects
from treegraft.settings.table import with_value
from treegraft.tasks.fields import read_messages


def task_of(question: object, history: Messages = ()) -> Task:
    """Returns the task that a question behind a conversation is.

    Raises:
        DataError: a question that is empty or no text, or messages that cannot be read.
    """
    if not isinstance(question, str) or not question.strip():
        raise DataError(
            f"question: got {question!r:.80}; expected a text, a question to the agent.",
            code="question-empty",
        )
    before = list(history)
    if not before:
        return Task(id="question", question=question, reference=())
    try:
        messages = read_messages([*before, {"role": "user", "content": question}])
    except (ValueError, AttributeError) as error:
        raise DataError(
            f"history: got {error}; expected messages with role and content, such as `messages` of"
            " an earlier answer.",
            code="history-invalid",
        ) from error
    return Task(id="question", question=question, reference=(), messages=messages)


async def answered(parts: Parts, task: Task) -> Answer:
    """Returns the answer of the engine's present policy, unscored: greedy, and with eval.greedy =
    false sampled as in an evaluation."""
    settings = parts.config.eval
    temperature = 0.0 if settings.greedy else settings.temperature
    limits = eval_limits(parts.config, temperature=temperature, num_leaves=1)

    async def unscored(tree: Tree) -> Tree:
        return tree

    # A question has no reference, so no reward function could judge its answer.
    grower = replace(parts, scorer=unscored).grower(Independent(), limits)
    key = (parts.config.run.seed, "run")
    tree = await grower.grow(task, noise_key=key, group_id="run/question")
    return Answer(trajectory=tree.trajectories()[0], tokenizer=parts.tokenizer)


class Agent:
    """A trained agent, loaded at the first question or at the beginning of a `with`.

    It works on a thread of its own, so that both `await agent(question)` and `agent.ask(question)`
    work where an event loop is running, as in a notebook. Questions may be asked at the same time.
    Answers are greedy, and with eval.greedy=false sampled: equal questions get equal answers, and
    run.seed gives others.
    """

    def __init__(
        self,
        checkpoint: Path | str,
        overrides: Sequence[str] = (),
        *,
        system_prompt: str | None = None,
        given: GivenObjects | None = None,
        **objects: Unpack[Objects],
    ) -> None:
        """Args: as of `answer_question`; system_prompt: in place of the recipe's, None keeps that;
        given: the objects of the agent's run, to which `objects` are added; None for none.

        Raises:
            CheckpointError: no such checkpoint.
            SettingError: an override or an object is wrong.
        """
        self._config, self._model_path, own = open_with(checkpoint, None, overrides, objects)
        if self._config.eval.greedy:
            refuse_sampling(overrides, "the answer is greedy; add eval.greedy=false")
        self._given = own if given is None else given.joined(own)
        if system_prompt is not None:
            self._config = with_value(self._config, "format.system_prompt", system_prompt)
        self._life = Life("agent")
        self._lock = threading.Lock()
        self._asked: set[Future[Answer]] = set()

    # ------------------------------------------------------------------ asking

    async def __call__(self, question: str, *, history: Messages = ()) -> Answer:
        """Returns the answer to a question. A caller that is cancelled ends the rollout.

        Args:
            history: the conversation before it, such as `messages` of an earlier answer; its first
                message may be one with the role "system".

        Raises:
            DataError: an empty question, messages that cannot be read, or a prompt too long.
            TreegraftError: the agent cannot be loaded.
        """
        await asyncio.to_thread(self._open)
        return await asyncio.wrap_future(self._begin(question, history))

    def ask(self, question: str, *, history: Messages = ()) -> Answer:
        """Returns the same, without `await`. Ctrl-C ends the rollout."""
        self._open()
        asked = self._begin(question, history)
        try:
            return asked.result()
        except BaseException:
            # Else the rollout would go on behind a caller that has given up.
            asked.cancel()
            raise

    def _begin(self, question: str, history: Messages) -> Future[Answer]:
        """Starts a rollout on the agent's thread."""
        task = task_of(question, history)
        with self._lock:
            if not self._life.is_open:
                raise DataError(
                    "agent: it was closed while a question waited; ask again.", code="agent-closed"
                )
            asked = self._life.start(answered, self._parts, task)
            self._asked.add(asked)
        asked.add_done_callback(self._asked.discard)
        return asked

    # ------------------------------------------------------------------ opening and closing

    def _open(self) -> None:
        """Loads the agent unless it is loaded; others who ask meanwhile wait for the same one."""
        with self._lock:
            if not self._life.is_open:
                with giving(self._given):
                    self._life.begin(self._held())

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[None]:
        async with Parts.build(self._config, model_path=self._model_path) as parts:
            self._parts = parts
            yield

    def close(self) -> None:
        """Ends the questions under way and frees the model; a further question loads it again."""
        with self._lock:
            for one in list(self._asked):
                one.cancel()
            if self._life.is_open:
                self._life.end()
                del self._parts

    async def __aenter__(self) -> Agent:
        await asyncio.to_thread(self._open)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Agent:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answer_question(
    checkpoint: Path | str, question: str, overrides: Sequence[str] = (), **objects: Unpack[Objects]
) -> tuple[Trajectory, Tokenizer]:
    """Returns one trajectory that answers `question`, unscored, and the tokenizer of its tokens.

    It is greedy, and with eval.greedy = false sampled as in an evaluation; run.seed gives another.
    `objects` are Python objects in place of settings, as of `train`. Raises DataError where the
    question is empty."""
    task_of(question)  # before anything is loaded
    with Agent(checkpoint, overrides, **objects) as agent:
        answer = agent.ask(question)
    return answer.trajectory, answer.tokenizer
