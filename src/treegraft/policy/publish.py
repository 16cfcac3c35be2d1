"""Weights from the learner to the engine, and proof that both hold the same policy."""

from __future__ import annotations

from typing import Any

from treegraft.core.errors import DriftError
from treegraft.core.interfaces import Engine, LearnerLike, WeightSource
from treegraft.core.team import Alone, Team
from treegraft.policy.canary import MAX_BREACHES, Canaries, Checkable, Resting, limit_for
from treegraft.policy.learn.measuring import measuring
from treegraft.runs.checkpoint import TrainState


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
