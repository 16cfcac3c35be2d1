"""Weights from the learner to the engine, and proof that both hold the same policy."""

from __future__ import annotations

from typing import Any

from treegraft.core.errors import DriftError
from treegraft.core.interfaces import Engine, LearnerLike, WeightSource
from treegraft.core.team import Alone, Team
from treegraft.runs.checkpoint import TrainState

FLOAT32_LIMIT = 1e-4
"""Nats; float32 log-probabilities of engine and learner differ by rounding alone, about 1e-6."""
BFLOAT16_FACTOR = 2.0
"""How far the first gap of two correct bfloat16 implementations may be exceeded."""
BFLOAT16_LIMIT = 0.04
"""Nats. They differ by about 4 % a token where the model is in doubt, and by far less where it is
sure. An agent that a warm-up made sure of all comes to doubt again: its first gap says little."""
MAX_BREACHES = 3


def limit_for(dtype: str, first_gap: float) -> float:
    """Returns the largest accepted mean |difference| of log-probabilities in nats, where the first
    one was `first_gap`."""
    return FLOAT32_LIMIT if dtype == "float32" else max(BFLOAT16_LIMIT, BFLOAT16_FACTOR * first_gap)


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

    `state` has the gap of the first update and the breaches in a row from before a resume; None
    begins anew.
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
        self._engine = engine
        self._learner = learner
        self._dtype = dtype
        self._team = team or Alone()
        self._first_gap = state.first_gap
        self._num_breaches = state.num_breaches

    def state(self) -> dict[str, Any]:
        """Returns the fields of `TrainState` that a checkpoint keeps for it."""
        return {"first_gap": self._first_gap, "num_breaches": self._num_breaches}

    async def publish(self, version: int) -> None:
        """Hands the learner's weights to the engine.

        Raises:
            DriftError: the engine holds another version or other weights afterwards.
        """
        await hand_over(self._engine, self._learner.weights(), version)
        # Other ranks gather the weights as often as the engine went through them.
        self._team.share(None)

    def check(self, update: int, gap: float | None) -> dict[str, float]:
        """Returns learn/engine_gap_limit for the update's mean |log-probability of the engine - of
        the learner| in nats; nothing if no token was compared (None).

        A first breach of the limit is a warning of `treegraft.runs.health`.

        Raises:
            DriftError: the gap was too large three times in a row.
        """
        if gap is None:
            return {}
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
        return {"learn/engine_gap_limit": limit}
