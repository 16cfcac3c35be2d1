"""Weights from the learner to the engine, and proof that both hold the same policy."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Protocol, runtime_checkable

import numpy as np

from treegraft.core.errors import DriftError
from treegraft.core.interfaces import Engine, LearnerLike, LogprobScorer, NoiseKey, WeightSource
from treegraft.core.team import Alone, Team
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
from treegraft.policy.learn.measuring import measuring
from treegraft.runs.checkpoint import TrainState

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


async def hand_over(engine: Engine, weights: WeightSource, version: int) -> None:
    """Publishes weights as a version of the policy.

    Raises:
        DriftError: the engine holds another version or other weights afterwards.
    """
    await engine.publish(weights, version)
    if engine.policy_version != version:
        raise DriftError(
            f"publish: the engine reports policy version {engine.policy_version},"
            f" expected {version}; its samples would come from an old policy",
            code="version-drifts",
        )
    # Engines whose weights are out of reach (a server) report no checksum.
    if engine.fingerprint and engine.fingerprint != weights.fingerprint:
        raise DriftError(
            f"publish: the engine's weights have checksum {engine.fingerprint}, the"
            f" learner's {weights.fingerprint}; its samples would come from another policy",
            code="weights-drift",
        )


class Publisher:
    """Publishes the learner's weights and compares versions, checksums and log-probabilities.

    `state` holds the gaps of the first update and the first publish, and the breaches in a row,
    from before a resume; None begins anew.
    """

    def __init__(
        self,
        engine: Engine,
        learner: LearnerLike,
        dtype: str,
        state: TrainState | None = None,
        team: Team | None = None,
    ) -> None:
        state = state or TrainState.fresh()
        self._engine, self._learner, self._dtype = engine, learner, dtype
        self._team = team or Alone()
        self._first_gap = state.first_gap
        self._num_breaches = state.num_breaches
        self._canaries = Canaries(dtype, state.first_canary_gap)
        self._canary_gap: float | None = None

    def state(self) -> dict[str, Any]:
        """Returns the fields of `TrainState` that a checkpoint keeps for it."""
        return {
            "first_gap": self._first_gap,
            "num_breaches": self._num_breaches,
            "first_canary_gap": self._canaries.first_gap,
        }

    async def publish(self, version: int) -> None:
        """Hands the learner's weights to the engine.

        Raises:
            DriftError: the engine holds another version or other weights afterwards, or a part of
                it for the third time in a row.
        """
        await hand_over(self._engine, self._learner.weights(), version)
        # Other ranks gather the weights as often as the engine went through them.
        self._team.share(None)
        with measuring(self._learner, self._team) as scorer:
            # Engines of one part have none: `check` compares all that they sample.
            if isinstance(self._engine, Checkable):
                self._canary_gap = await self._canaries.check(self._engine, scorer)

    async def rest(self) -> None:
        """Lets an engine that can leave the card until the next publish: the learner works."""
        if isinstance(self._engine, Resting):
            await self._engine.rest()

    def check(self, update: int, gap: float | None) -> dict[str, float]:
        """Returns learn/engine_gap_limit for the update's mean |log-probability of the engine - of
        the learner| in nats, without it where no token was compared (None); and learn/canary_gap
        of the last publish where an engine has canaries.

        A first breach of the limit is a warning of `treegraft.runs.health`.

        Raises:
            DriftError: the gap was too large three times in a row.
        """
        canary = {} if self._canary_gap is None else {"learn/canary_gap": self._canary_gap}
        if gap is None:
            return canary
        # At the first update both hold the very weights that were loaded: this gap is rounding.
        if self._first_gap is None:
            self._first_gap = gap
        limit = limit_for(self._dtype, self._first_gap)
        # In a row: a single batch of long paths may be above the limit by chance.
        self._num_breaches = self._num_breaches + 1 if gap > limit else 0
        if self._num_breaches >= MAX_BREACHES:
            raise DriftError(
                f"update {update}: engine and learner differ by {gap:.3g} nats a token (limit"
                f" {limit:.3g}) for the third time in a row; samples may come from another policy"
                " than the one that learns.",
                code="learner-drifts",
            )
        return {"learn/engine_gap_limit": limit} | canary
