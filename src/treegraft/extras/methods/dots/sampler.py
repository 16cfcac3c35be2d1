"""DOTS: the sampler that deals tasks by their estimated difficulty."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from treegraft import Task, Tree
from treegraft.parts import (
    Epochs,
    GraftCause,
    RestartCause,
    RetryCause,
    StoredCause,
    build_encoder,
    keyed,
)

TARGET = 0.5
"""α, the success rate that a task should have: rewards of one half tell most."""
EVERY = 2
"""μ of the paper, updates that one reference set serves."""
DECAY = 0.8
"""Ours: what a rollout of training still counts after one more update, since the policy
changes."""
ATTENTION_TEMPERATURE = 0.2
"""A rate weighs as exp(cosine / this); benchmarks/difficulty.py measures the predictions."""
PRIOR = 2.0
"""Rollouts that the prediction of a task's rate weighs as much as."""
NUM_COMPARED = 1024
"""Latest tasks with known rates from which the others are predicted."""
_NUM_ROWS = 1024
"""Tasks that are compared at once."""

Floats = npt.NDArray[np.float64]


def predicted_rates(
    vectors: Floats, places: Sequence[int], rates: Floats, weights: Floats, temperature: float
) -> Floats:
    """Returns [tasks] the rate of each task as the rates of tasks like it say.

    p_q = Σ_r a_qr y_r,   a_qr = n_r exp(v_q · v_r / t) / Σ_s n_s exp(v_q · v_s / t)
    d_q = clip(ȳ + b (p_q - p̄), 0, 1),   b = Σ_r n_r (p_r - p̄) (y_r - ȳ) / Σ_r n_r (p_r - p̄)²

    Source: DOTS (Sun et al., arXiv 2506.05316), whose attention goes over embeddings behind a
    projection that was trained on the rollouts of other models, and whose predictions a second
    trained network calibrates by mean and deviation of the rates. Nothing is trained here: a is
    over the embeddings as they are, and the calibration is the least-squares line over the
    reference set, which the released code adds after its network. p̄ and ȳ are means over the
    references with weights n, which are all equal in the paper.

    Args:
        vectors: [tasks, dim] v, of unit length.
        places: [references] their rows.
        rates: [references] y, 0..1.
        weights: [references] n, above 0: rollouts behind each rate.
        temperature: t.
    """
    references = vectors[list(places)]
    # In logs, so that n_r is a factor of the attention.
    bias = np.log(weights)
    found = []
    for first in range(0, len(vectors), _NUM_ROWS):
        scores = vectors[first : first + _NUM_ROWS] @ references.T / temperature + bias
        # Less the largest, since exp overflows past 700.
        attention = np.exp(scores - scores.max(axis=1, keepdims=True))
        found.append(attention @ rates / attention.sum(axis=1))
    predicted = np.concatenate(found)
    return np.clip(_calibrated(predicted, predicted[list(places)], rates, weights), 0.0, 1.0)


def _calibrated(predicted: Floats, own: Floats, rates: Floats, weights: Floats) -> Floats:
    """All predictions on the least-squares line from those of the references to their rates."""
    centre = np.average(own, weights=weights)
    level = np.average(rates, weights=weights)
    spread = float(np.average((own - centre) ** 2, weights=weights))
    # All predictions are equal, and a line through one point has any slope.
    if spread < 1e-12:
        return predicted
    slope = float(np.average((own - centre) * (rates - level), weights=weights)) / spread
    line: Floats = level + slope * (predicted - centre)
    return line


def keyed_order(logits: Floats, *keys: tuple[int | str, ...]) -> list[int]:
    """Returns all places in the order in which draws without replacement take them, each draw with
    chances softmax(logits) over what is left.

    A race of exponential clocks with rates exp(logits) ends in such an order; place i's clock is a
    function of keys[i].
    """

    def clock(place: int) -> float:
        # In logs, as chances may be far below the smallest float.
        exponential = -math.log1p(-keyed.keyed_unit(*keys[place]))
        return math.log(max(exponential, 1e-300)) - float(logits[place])

    return sorted(range(len(keys)), key=clock)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What rollouts of a task earned."""

    total: float
    """Their rewards, decayed until `update`."""
    weight: float
    """How many, decayed so too."""
    update: int

    def at(self, update: int, decay: float) -> _Seen:
        """The same, decayed until a later update."""
        factor = decay ** (update - self.update)
        return _Seen(self.total * factor, self.weight * factor, update)


class Difficulty(Epochs):
    """Deals the tasks whose estimated rate d is nearest to a target α, drawn without replacement
    with chances

        P(q) = exp(-|d_q - α| / τ) / Σ_s exp(-|d_s - α| / τ)

    A rollout's success is its reward, taken between 0 and 1; rollouts with steps of other agents or
    forced openings do not count. With a reference set, K tasks drawn evenly are rolled out before
    every μ-th update, by which `predicted_rates` gives the others' d until the next time, and no
    task is dealt twice meanwhile. Without one, d comes from the rollouts that the run makes anyway:
    S and n, the decayed sum of a task's successes and number of its rollouts, and p, what
    `predicted_rates` or without an encoder the mean of all rollouts says:

        d_q = (S_q + m p_q) / (n_q + m),   m = 2

    Source: DOTS (Sun et al., arXiv 2506.05316), whose d is the share of failures, 1 minus ours (its
    code has the share of successes; with α = 1/2 nothing changes). Departures: see
    `predicted_rates`; the code draws the tasks of μ updates at once and shuffles them, here each
    update draws from those that are left. The form without a reference set is our own; its decayed
    counts with a prior are those of MoPPS (Qu et al., arXiv 2507.04632), which draws a rate for
    each task from its posterior; this has the mean.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, settings: Any) -> None:
        super().__init__(tasks, seed)
        self._settings = settings
        self._encoder = build_encoder(settings.encoder) if settings.encoder else None
        self._vectors: Floats | None = None
        self._places = {task.id: place for place, task in enumerate(tasks)}
        self._seen: dict[str, _Seen] = {}
        """By task, the latest last."""
        self._dealt: dict[str, int] = {}
        """The update that dealt it last, by task."""
        self._order: tuple[int, list[Task]] = (0, [])
        """The last order, with its update."""
        self._estimates: Floats | None = None
        """Those that it was made by; None where nothing was known."""
        self._metrics: dict[str, float] = {}

    @property
    def state(self) -> Mapping[str, Any]:
        """What rollouts earned, and when each task was dealt."""
        seen = {name: [one.total, one.weight, one.update] for name, one in self._seen.items()}
        return {"seen": seen, "dealt": dict(self._dealt)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over a state."""
        self._seen = {name: _Seen(*one) for name, one in state.get("seen", {}).items()}
        self._dealt = dict(state.get("dealt", {}))

    def _is_first(self, number: int) -> bool:
        return bool((number - 1) % EVERY == 0)

    def references(self, number: int) -> Sequence[Task]:
        """Returns K tasks, drawn evenly, before every μ-th update from the first one on."""
        num = self._settings.num_references
        if not num or not self._is_first(number):
            return ()
        # By a key of each task, so that a resumed run draws the same ones.
        ranked = sorted(
            range(len(self._tasks)),
            key=lambda n: keyed.keyed_int(self._seed, "references", number, n),
        )
        return [self._tasks[n] for n in ranked[:num]]

    def label(self, number: int, trees: Sequence[Tree]) -> None:
        """Replaces the known rates by those that the trees of the reference set show."""
        self._seen = {}
        rates = []
        for tree in trees:
            # Rollouts with help are no evidence of what the agent can do.
            if own := _own_rewards(tree):
                self._seen[tree.task.id] = _Seen(math.fsum(own), float(len(own)), number)
                rates.append(fmean(own))
        # The order of this update was made by the old rates.
        self._order = (0, [])
        if rates:
            self._metrics["sampler/reference_rate"] = fmean(rates)
        self._metrics["sampler/num_references"] = float(len(trees))

    def draw(
        self, number: int, first: int, *, size: int, without: Collection[str] = ()
    ) -> Sequence[Task]:
        """Returns the first tasks of this update's order; those dealt since the last reference set
        come last."""
        if self._order[0] != number:
            self._order = (number, self._ordered(number))
        left = [task for task in self._order[1] if task.id not in without]
        since = number
        if self._settings.num_references:
            since -= (number - 1) % EVERY
        # A stable sort: within both parts the drawn order stays.
        left.sort(key=lambda task: self._dealt.get(task.id, 0) >= since)
        return left[:size]

    def _ordered(self, number: int) -> list[Task]:
        own = self._settings
        self._estimates = self.estimates(number)
        logits = np.zeros(len(self._tasks))
        if self._estimates is not None:
            logits = -np.abs(self._estimates - TARGET) / own.temperature
        keys = [(self._seed, "sampler", number, task.id) for task in self._tasks]
        return [self._tasks[place] for place in keyed_order(logits, *keys)]

    def estimates(self, number: int) -> Floats | None:
        """Returns [tasks] d before an update; None where no rollout has been seen yet."""
        own = self._settings
        places = []
        sums = []
        counts = []
        for name, seen in self._seen.items():
            one = seen.at(number, DECAY)
            # What is as good as forgotten would become 0 / 0.
            if name in self._places and one.weight > 1e-9:
                places.append(self._places[name])
                sums.append(one.total)
                counts.append(one.weight)
        if not places:
            return None
        totals = np.array(sums)
        weights = np.array(counts)
        found = np.full(len(self._tasks), float(totals.sum() / weights.sum()))
        if self._encoder is not None:
            if self._vectors is None:
                questions = [task.question for task in self._tasks]
                self._vectors = self._encoder.encode(questions).astype(np.float64)
            # The last seen come last in the dict, see `take`.
            latest = slice(-NUM_COMPARED, None)
            rates = (totals / weights)[latest]
            found = predicted_rates(
                self._vectors, places[latest], rates, weights[latest], ATTENTION_TEMPERATURE
            )
        if not own.num_references:
            found[places] = (totals + PRIOR * found[places]) / (weights + PRIOR)
        # Rounding of the last bits shall decide nothing.
        rounded: Floats = np.round(found, 9)
        return rounded

    def take(self, number: int, trees: Sequence[Tree]) -> None:
        """Takes what the rollouts of an update earned."""
        errors: list[float] = []
        estimates: list[float] = []
        for tree in trees:
            name = tree.task.id
            rewards = _own_rewards(tree)
            self._dealt[name] = number
            if self._estimates is not None:
                estimates.append(float(self._estimates[self._places[name]]))
                errors += [abs(estimates[-1] - fmean(rewards))] if rewards else []
            if rewards and not self._settings.num_references:
                # Popped, so that the task moves to the end.
                before = self._seen.pop(name, _Seen(0.0, 0.0, number))
                before = before.at(number, DECAY)
                total = before.total + math.fsum(rewards)
                weight = before.weight + len(rewards)
                self._seen[name] = _Seen(total, weight, number)
        for name, values in (("rate_mean", estimates), ("error_mean", errors)):
            if values:
                self._metrics[f"sampler/{name}"] = fmean(values)

    def drawn(self, first: int) -> Sequence[str]:
        """Returns the ids of all tasks that were dealt, each once."""
        return list(self._dealt)

    def take_metrics(self) -> dict[str, float]:
        """Returns the sampler/* metrics of the last update."""
        metrics = self._metrics
        self._metrics = {}
        return metrics | {"sampler/num_known": float(len(self._seen))}


_HELPED = GraftCause | RestartCause | RetryCause | StoredCause


def _own_rewards(tree: Tree) -> list[float]:
    """The rewards of rollouts that the agent made without help, each taken between 0 and 1."""
    found = []
    for path in tree.trajectories():
        is_helped = any(isinstance(step.cause, _HELPED) for step in path.steps)
        if path.reward is not None and not is_helped:
            # A rate is a share of successes, and rewards such as RAPO's begin at -1.
            found.append(min(1.0, max(0.0, path.reward)))
    return found
