"""A few tokens that each server samples after a publish, scored again by the learner: whether both
hold the same policy."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Protocol, runtime_checkable

import numpy as np

from treegraft.core.errors import DriftError
from treegraft.core.interfaces import LogprobScorer, NoiseKey
from treegraft.core.types import (
    ROOT_ID,
    Completion,
    Leaf,
    Origin,
    Sampling,
    Status,
    Step,
    Task,
    Tree,
)

_log = logging.getLogger(__name__)

FLOAT32_LIMIT = 1e-4
"""Nats; float32 log-probabilities of engine and learner differ by rounding alone, about 1e-6."""
BFLOAT16_FACTOR = 2.0
"""How far the first gap of two correct bfloat16 implementations may be exceeded."""
BFLOAT16_LIMIT = 0.04
"""Nats. They differ by about 4 % a token where the model is in doubt, and by far less where it is
sure. An agent that a warm-up made sure of all comes to doubt again: its first gap says little."""
MAX_BREACHES = 3

PROMPTS: Sequence[tuple[int, ...]] = ((1, 2, 3), (2, 3, 4), (3, 4, 5), (4, 5, 6))
"""Ids that every vocabulary has; what they mean does not matter."""
CANARY_SAMPLING = Sampling(max_new_tokens=8)


def canary_key(number: int) -> NoiseKey:
    """Returns the noise key of a prompt's completion; it is the same for every server."""
    return ("canary", number)


@runtime_checkable
class Checkable(Protocol):
    """An engine of several parts, each of which may hold other weights than the rest."""

    async def canaries(self) -> Mapping[str, Sequence[Completion]]:
        """Returns the completion of each of `PROMPTS` by each part that answers, by its name."""

    def set_aside(self, name: str, why: str) -> None:
        """Samples from other parts until the next publish, as long as one is left."""


@runtime_checkable
class Resting(Protocol):
    """An engine that can leave the learner's card between sampling and publish."""

    async def rest(self) -> None:
        """Leaves the card until the next publish, if its settings say so."""


def limit_for(dtype: str, first_gap: float) -> float:
    """Returns the largest accepted mean |difference| of log-probabilities in nats, where the first
    one was `first_gap`."""
    return FLOAT32_LIMIT if dtype == "float32" else max(BFLOAT16_LIMIT, BFLOAT16_FACTOR * first_gap)


class Canaries:
    """Compares each part of an engine with the learner after every publish.

    A part whose gap is too large is set aside until the next publish, which gives it the weights
    anew; the third time in a row is an error.
    """

    def __init__(self, dtype: str, first_gap: float | None) -> None:
        """Args:
        first_gap: the largest gap of the first publish, from before a resume; None before it.
        """
        self._dtype, self.first_gap = dtype, first_gap
        self._num_breaches: dict[str, int] = {}

    async def check(self, engine: Checkable, scorer: LogprobScorer) -> float | None:
        """Returns the largest gap of all parts in nats; None where none answered.

        Raises:
            DriftError: a part's gap was too large three times in a row.
        """
        gaps = canary_gaps(await engine.canaries(), scorer)
        if not gaps:
            return None
        largest = max(gaps.values())
        # At the first publish all hold the very weights that were loaded: this gap is rounding.
        if self.first_gap is None:
            self.first_gap = largest
        limit = limit_for(self._dtype, self.first_gap)
        for name, gap in gaps.items():
            count = self._num_breaches[name] = (
                self._num_breaches.get(name, 0) + 1 if gap > limit else 0
            )
            said = f"{name} and the learner differ by {gap:.3g} nats a token (limit {limit:.3g})"
            if count >= MAX_BREACHES:
                raise DriftError(
                    f"publish: {said} for the third time in a row; it samples from another"
                    " policy than the one that learns. Restart that server, or leave it out of the"
                    " recipe.",
                    code="server-drifts",
                )
            if count:
                engine.set_aside(name, f"{said} after a publish")
        return largest


def canary_gaps(
    answers: Mapping[str, Sequence[Completion]], scorer: LogprobScorer
) -> dict[str, float]:
    """Returns the mean |log-probability of the engine - of the learner| over the canary tokens of
    each part, in nats."""
    # Parts that agree answer alike, so most often one tree for each prompt is all that is scored.
    trees = {
        (number, one.token_ids): _tree(number, one)
        for completions in answers.values()
        for number, one in enumerate(completions)
    }
    scored = dict(zip(trees, scorer.with_logprobs([*trees.values()]), strict=True))
    gaps: dict[str, float] = {}
    for name, completions in answers.items():
        differences = [
            abs(ours - theirs)
            for number, one in enumerate(completions)
            for ours, theirs in zip(
                one.sampling_logprobs,
                _scores(scored[number, one.token_ids].steps[1]),
                strict=True,
            )
        ]
        if differences:
            gaps[name] = fmean(differences)
    return gaps


def _scores(step: Step) -> list[float]:
    scores: list[float] = [] if step.old_logprobs is None else step.old_logprobs.tolist()
    return scores


def _tree(number: int, completion: Completion) -> Tree:
    """The completion of a canary prompt as a tree of one step."""
    prompt = PROMPTS[number]
    count, zeros = len(completion.token_ids), np.zeros(len(prompt))
    root = Step(
        id=ROOT_ID,
        parent=None,
        depth=0,
        token_ids=np.array(prompt),
        origins=np.full(len(prompt), Origin.PROMPT),
        loss_mask=np.full(len(prompt), False),
        sampling_logprobs=zeros,
        entropies=zeros,
    )
    step = Step(
        id=f"{ROOT_ID}.0",
        parent=ROOT_ID,
        depth=1,
        token_ids=np.array(completion.token_ids),
        origins=np.full(count, Origin.POLICY),
        loss_mask=np.full(count, True),
        sampling_logprobs=np.array(completion.sampling_logprobs),
        entropies=np.array(completion.entropies),
        temperature=CANARY_SAMPLING.temperature,
    )
    leaf = Leaf(step_id=step.id, status=Status.COMPLETED)
    task = Task(id=f"canary/{number}", question="", reference=())
    return Tree(task=task, group_id=task.id, steps=(root, step), leaves=(leaf,))
