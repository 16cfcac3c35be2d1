"""Where answers stand: in a trajectory's own work, in a graft's tool results, in another agent's
words; and whether searches found them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from treegraft.core.types import Origin, Step, Trajectory

_SEARCHES = re.compile(r"search|retriev|browse", re.IGNORECASE)
"""The names of tools that look answers up."""


def _words(steps: Iterable[Step]) -> list[str]:
    """The text that an agent wrote in these steps."""
    texts: list[str] = []
    for step in steps:
        texts += [step.content.thought, step.content.answer or ""]
        texts += [call.body for call in step.content.calls]
    return texts


def _results(steps: Iterable[Step]) -> list[str]:
    return [seen.text for step in steps for seen in step.content.observations]


def _stands_in(answer: str, texts: Iterable[str]) -> bool:
    """Whether the answer occurs as a whole word, case and spaces apart: "4" does not occur in
    "41"."""
    parts = [re.escape(part) for part in answer.split()]
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
    others = [step for step in steps if step.is_graft]
    answer = path.leaf.answer
    if not others or answer is None or not answer.split():
        return None
    own = [step for step in steps[1:] if step.origin is Origin.POLICY]
    # Its words only before the first graft: those after it may repeat the graft's. Results
    # of its own tools count whenever they came.
    before = [step for step in own if step.depth < others[0].depth]
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


def found_metrics(paths: Iterable[Trajectory]) -> dict[str, float]:
    """Returns tools/NAME_found_frac for each tool that looks something up, by its name: among the
    trajectories that got a result of it, the share in whose results an accepted answer occurs.

    Tasks without a reference are left out; a reference of several words has to occur as a whole.
    """
    found: dict[str, list[bool]] = {}
    for path in paths:
        answers = [answer for answer in path.task.reference if answer.split()]
        if not answers:
            continue
        results: dict[str, list[str]] = {}
        for step in path.steps[1:]:
            if step.origin is not Origin.POLICY:
                continue
            for call, seen in zip(step.content.calls, step.content.observations, strict=False):
                if _SEARCHES.search(call.name) and not seen.is_error:
                    results.setdefault(call.name, []).append(seen.text)
        for name, texts in results.items():
            has_one = any(_stands_in(answer, texts) for answer in answers)
            found.setdefault(name, []).append(has_one)
    return {
        f"tools/{name}_found_frac": sum(flags) / len(flags) for name, flags in sorted(found.items())
    }
