"""The run and the session of another rank than 0: the same loop, with what rank 0 shares.

Rank 0 samples, records and writes. The others make their part of every pass, and every method here
waits for the values that the same method shares on rank 0, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from treegraft.core.interrupt import Interrupted
from treegraft.core.types import Tree
from treegraft.policy.learn.measuring import follow
from treegraft.policy.learn.ranks import Ranks
from treegraft.policy.learn.sharded import ShardedLearner, build_learner
from treegraft.policy.load import limit_threads, with_gradients
from treegraft.rollout.rounds import Trees
from treegraft.runs.result import RunResult
from treegraft.runs.run import WarmUpStep
from treegraft.settings.config import Config


class FollowedSession:
    """A `Session` on another rank than 0."""

    learner: ShardedLearner

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.config = config
        self._ranks = ranks

    def __enter__(self) -> Self:
        limit_threads(self.config.run.num_threads)
        self._held = ExitStack()
        self._held.enter_context(with_gradients())
        # Without a model: rank 0 sends this rank its rows of the weights.
        self.learner = build_learner(self._ranks, self.config)
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def warm_up(self) -> Iterator[WarmUpStep]:
        """Yields after each step of imitation."""
        decay = self.config.warmup.weight_decay
        while (rate := self._ranks.share()) is not None:
            loss = self.learner.imitate(self._ranks.share_trees(), rate, decay)
            if self._ranks.share():  # the last one
                self.learner.forget_moments()
            yield WarmUpStep(num_steps=0, metrics={"warmup/loss": loss}, spent={})

    def begin_updates(self) -> None:
        """Freezes the reference, and gives the engine the weights."""
        self.sync_weights(0)
        if (reference := self._ranks.share()) is not None:
            folder, is_new = reference
            self.learner.keep_reference(Path(folder) if folder else None, is_new=is_new)

    def sample(self, update: int) -> Trees:
        """Returns no trees; they come to `learn`."""
        return Trees()

    def credit(self, trees: Sequence[Tree]) -> Trees:
        """Scores entropies that an engine does not know."""
        # A rank that skipped this pass would leave the others waiting in a collective.
        follow(self.learner, self._ranks)
        return Trees()

    def learn(self, trees: Sequence[Tree], update: int, budget_used: float = 0.0) -> Trees:
        """Changes the weights."""
        spent = self._ranks.share()
        own = self._ranks.share_trees()
        lessons = self._ranks.share_trees()
        self.learner.learn(own, lessons, spent)
        return Trees()

    def sync_weights(self, version: int) -> None:
        """Gathers the weights for rank 0's engine."""
        # Gathering is a collective: rank 0 gets whole tensors if all ranks take part.
        self.learner.weights().follow()

    def evaluate(self) -> None:
        """Does nothing."""

    def pop_metrics(self) -> dict[str, float]:
        """Returns none."""
        return {}

    def state(self) -> dict[str, Any]:
        """Returns none."""
        return {}


class FollowedRun:
    """A `Run` on another rank than 0: it writes no file but this rank's part of checkpoints."""

    budget_used = 0.0

    def __init__(self, ranks: Ranks, session: FollowedSession) -> None:
        self._ranks = ranks
        self._session = session
        self.is_finished: bool = ranks.share()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Interrupted):
            self._save()
            # Rank 0 says why.
            raise SystemExit(0)

    def _save(self) -> None:
        """Writes this rank's part of the checkpoints that rank 0 writes here."""
        while (place := self._ranks.share()) is not None:
            self._session.learner.save(Path(place))

    def is_warm_up_evaluation_due(self) -> bool:
        """Returns what rank 0's does."""
        return bool(self._ranks.share())

    def log_warm_up(self, evaluation: None) -> None:
        """Does nothing."""

    def record_warm_up(self, step: WarmUpStep) -> None:
        """Saves with rank 0."""
        self._save()

    def log_pending(self) -> None:
        """Does nothing."""

    def updates(self) -> Iterator[int]:
        """Yields the numbers of rank 0's updates."""
        while (update := self._ranks.share()) is not None:
            yield update

    def record(
        self,
        update: int,
        trees: Sequence[Tree],
        metrics: Mapping[str, float],
        more_state: Mapping[str, Any],
    ) -> None:
        """Does nothing."""

    def is_evaluation_due(self) -> bool:
        """Returns False: rank 0 evaluates."""
        return False

    def close(self, evaluation: None = None) -> None:
        """Saves with rank 0."""
        self._save()

    def result(self) -> RunResult:
        """Returns rank 0's result, after a last checkpoint."""
        # The order of rank 0's `Run.result`: the last checkpoint, then the result.
        if not self.is_finished:
            self._save()
        found = self._ranks.share()
        return RunResult(
            run_dir=Path(found["run_dir"]),
            checkpoint_dir=Path(found["checkpoint_dir"]),
            metrics=found["metrics"],
        )
