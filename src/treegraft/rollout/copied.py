"""Where answers come from: a trajectory's own work, a graft's tool results, another agent's
words."""

from __future__ import annotations

import re
from collections.abc import Iterable

from treegraft.core.types import Origin, Step, Trajectory


def _words(steps: Iterable[Step]) -> list[str]:
    """The text that an agent wrote in these steps."""
    texts: list[str] = []
    for step in steps:
        texts += [step.content.thought, step.content.answer or ""]
        texts += [call.body for call in step.content.calls]
    return texts


def _results(steps: Iterable[Step]) -> list[str]:
    texts: list[str] = []
    for step in steps:
        texts += [seen.text for seen in step.content.observations]
    return texts


def _stands_in(answer: str, texts: Iterable[str]) -> bool:
    """Whether the answer occurs as a whole word, case and spaces apart: "4" does not occur in
    "41"."""
    parts = [re.escape(part) for part in answer.split()]
    # Not \b: answers may begin or end with a sign.
    pattern = re.compile(r"(?<!\w)" + r"\s+".join(parts) + r"(?!\w)", re.IGNORECASE)
    return any(pattern.search(text) for text in texts)


def answer_source(path: Trajectory) -> str | None:
    """Returns the first source of the answer of a trajectory with a graft, None without a graft or
    an answer.

    "own": in the question, in the policy's own text before the first graft, in a result of its own
    tools, or nowhere but in the answer itself. "result": in a tool result that came with a graft.
    "words": in another agent's own text in a graft, and in no result, so that it was copied. A
    trace that is plain text counts as words.
    """
    steps = path.steps
    others: list[Step] = []
    own: list[Step] = []
    before: list[Step] = []
    for step in steps[1:]:
        if step.is_graft:
            others.append(step)
        elif step.origin is Origin.POLICY:
            own.append(step)
            # Its words only before the first graft: those after it may repeat the graft's. Results
            # of its own tools count whenever they came.
            if not others:
                before.append(step)
    answer = path.leaf.answer
    if not others or answer is None or not answer.split():
        return None
    if _stands_in(answer, [path.task.question, *_words(before), *_results(own)]):
        return "own"
    if _stands_in(answer, _results(others)):
        return "result"
    return "words" if _stands_in(answer, _words(others)) else "own"


def copied_metrics(paths: Iterable[Trajectory]) -> dict[str, float]:
    """Returns graft/answer_frac and graft/copied_frac; none where no trajectory with a graft gave
    an answer."""
    sources = [source for path in paths if (source := answer_source(path)) is not None]
    if not sources:
        return {}
    return {
        "graft/answer_frac": sum(source != "own" for source in sources) / len(sources),
        "graft/copied_frac": sources.count("words") / len(sources),
    }
