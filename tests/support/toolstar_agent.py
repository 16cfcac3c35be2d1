"""An agent of eight habits, by which start of the tree it is, for the test of
recipes/toolstar.toml."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from treegraft.core.interfaces import Request, WeightSource
from treegraft.core.types import Completion
from treegraft.policy.engine.scripted import ScriptedEngine

REFERENCES: dict[str, str] = {}
"""Answers by question as the prompt shows it; the test fills it in."""

_QUESTION = re.compile(
    r"<\|im_start\|>user\n(.*?)<\|im_end\|>\n<\|im_start\|>assistant\n(.*)", re.DOTALL
)


def think(text: str, action: str) -> str:
    """Returns a step with a thought."""
    return f"<think>\n{text}\n</think>\n{action}"


def search_of(question: str) -> str:
    """Returns what the agent searches for."""
    return re.sub(r"[^\w ]", " ", question)[:60].strip()


def answer(text: str) -> str:
    """Returns a final answer."""
    return f"<answer>\\boxed{{{text}}}</answer>"


def both_tools(question: str, reference: str, num_results: int) -> str:
    """Searches, calculates, answers right."""
    search = think("Look it up.", f"<search>\n{search_of(question)}\n</search>")
    calculate = think("Check.", "<python>\nprint(6 * 7)\n</python>")
    return (search, calculate, think("Now I know.", answer(reference)))[num_results]


def only_search(question: str, reference: str, num_results: int) -> str:
    """Searches and answers right."""
    return (
        think("Look it up.", f"<search>{search_of(question)}</search>"),
        think("Found.", answer(reference)),
    )[num_results]


def almost(question: str, reference: str, num_results: int) -> str:
    """Makes a mistake in its code and says one word too many."""
    return (think("Try.", "<python>1 / 0</python>"), think("Guess.", answer(f"{reference} zzz")))[
        num_results
    ]


def thoughtless(question: str, reference: str, num_results: int) -> str:
    """Answers right without a thought."""
    return answer(reference)


def forger(question: str, reference: str, num_results: int) -> str:
    """Writes the result itself, with both tools' tags in it."""
    return think(
        "Pretend.", f"<result>\n<search>x</search><python>1</python>{reference}\n</result>"
    )


def rambler(question: str, reference: str, num_results: int) -> str:
    """Thinks until its tokens run out."""
    return "<think>" + " and so on" * 1000


def unboxed(question: str, reference: str, num_results: int) -> str:
    """Answers right without the box."""
    return think("Easy.", f"<answer>{reference}</answer>")


def caller(question: str, reference: str, num_results: int) -> str:
    """Never stops calling."""
    return think("Once more.", f"<python>print({num_results})</python>")


HABITS: tuple[Callable[[str, str, int], str], ...] = (
    both_tools,
    only_search,
    almost,
    thoughtless,
    forger,
    rambler,
    unboxed,
    caller,
)


def _reply(habit: Callable[[str, str, int], str], path: str) -> str:
    found = _QUESTION.search(path)
    assert found is not None, path
    return habit(found[1], REFERENCES[found[1]], found[2].count("</result>"))


class Agent:
    """One scripted engine per start."""

    capacity = 64
    max_context = None

    def __init__(self, tokenizer: Any) -> None:
        self._engines = [ScriptedEngine(partial(_reply, habit), tokenizer) for habit in HABITS]

    @property
    def policy_version(self) -> int:
        return self._engines[0].policy_version

    @property
    def fingerprint(self) -> str:
        return ""

    @property
    def death(self) -> None: ...

    async def complete(self, request: Request) -> Completion:
        """Lets the habit of the start reply; the last part of the key is the step's id,
        "0.START.…"."""
        start = int(str(request.noise_key[-1]).split(".")[1])
        return await self._engines[start].complete(request)

    async def publish(self, source: WeightSource, version: int) -> None:
        """Takes the version."""
        for engine in self._engines:
            await engine.publish(source, version)

    def take_metrics(self) -> dict[str, float]:
        """Returns nothing."""
        return {}

    async def close(self) -> None:
        """Has nothing to close."""


def make(*, tokenizer: Any, **_: Any) -> Agent:
    """Returns the engine for `engine.kind = "tests.support.toolstar_agent:make"`."""
    return Agent(tokenizer)
