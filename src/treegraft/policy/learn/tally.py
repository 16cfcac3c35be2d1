"""The learner's metrics: sums over the contributions of an update, and the sizes of its packs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from treegraft.policy.learn.pack import TreeBatch


class Tally:
    """Sums of diagnostics over the contributions of an update."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.ratio_max = 1.0
        self.grad_norms: list[float] = []
        self.lrs: list[float] = []
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, key: str, values: Tensor) -> None:
        """Adds one value per contribution to a mean."""
        # In float64: a mean over a million contributions keeps its digits, whatever their order.
        self._sums[key] = self._sums.get(key, 0.0) + float(values.sum(dtype=torch.float64))
        self._counts[key] = self._counts.get(key, 0) + values.numel()

    def metrics(self, num_steps: int) -> dict[str, float]:
        """Returns means over contributions; of loss and gradient norm, means over optimiser
        steps."""
        means = {key: total / max(1, self._counts[key]) for key, total in self._sums.items()}
        steps = max(1, num_steps)
        return means | {
            "learn/loss": self.loss / steps,
            "learn/ratio_max": self.ratio_max,
            "learn/grad_norm": math.fsum(self.grad_norms) / steps,
            "learn/lr": self.lrs[-1] if self.lrs else 0.0,
            "learn/num_optimiser_steps": float(num_steps),
        }


def size_metrics(batches: Sequence[TreeBatch], *, takes_lessons: bool) -> dict[str, float]:
    """Returns how many tokens and contributions the packs of an update hold, each pack counted
    once whatever the number of epochs.

    Args:
        takes_lessons: whether the run learns from grafts; num_lesson_tokens is there only then.
    """
    unique = sum(batch.num_tokens for batch in batches)
    lessons = [batch.lessons for batch in batches if batch.lessons is not None]
    taught = sum(lesson.packed.numel() for lesson in lessons)
    paths = sum(batch.num_path_tokens for batch in batches)
    metrics = {
        "learn/num_unique_tokens": float(unique),
        "learn/unique_frac": (unique - taught) / max(1, paths),
        "learn/num_contributions": float(sum(int(batch.carries_loss.sum()) for batch in batches)),
    }
    return metrics | ({"learn/num_lesson_tokens": float(taught)} if takes_lessons else {})
