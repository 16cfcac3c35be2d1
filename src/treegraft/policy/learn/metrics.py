"""The learner's metrics: sums over the contributions of an update, and the sizes of its packs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from treegraft.policy.learn.pack import TreeBatch


class MetricSums:
    """Sums of diagnostics over the contributions of an update."""

    def __init__(self, newest: int | None = None) -> None:
        """Args: newest: policy version of the fresh trees; None where all are of one."""
        self.newest = newest
        self.loss = 0.0
        self.ratio_max = 1.0
        self.grad_norms: list[float] = []
        self.lrs: list[float] = []
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._sizes = dict.fromkeys(("unique", "imitated", "path", "contributions"), 0)

    def add(self, key: str, values: Tensor) -> None:
        """Adds one value per contribution to a mean."""
        # In float64: a mean over a million contributions keeps its digits, whatever their order. A
        # tensor until the end: the host would wait for a GPU at each.
        self._sums[key] = self._sums.get(key, 0.0) + values.sum(dtype=torch.float64)
        self._counts[key] = self._counts.get(key, 0) + values.numel()

    def add_terms(self, terms: Mapping[str, Tensor]) -> None:
        """Adds what `algo.loss.loss_terms` found in a pass."""
        if "is_capped" in terms:
            self.add("learn/engine_capped_frac", terms["is_capped"].float())
        if "kl" in terms:
            self.add("learn/kl", terms["kl"].detach())
        self.add("learn/clip_frac", terms["is_clipped"].float())
        self.add("learn/entropy", terms["entropy"].detach())
        ratios = terms["ratios"]
        self.add("learn/approx_kl", ratios - 1.0 - torch.log(ratios))
        if ratios.numel():
            self.ratio_max = max(self.ratio_max, float(ratios.max()))
        if "imitated_logprobs" in terms:
            self.add("learn/lesson_logprob", terms["imitated_logprobs"])

    def add_step(self, grad_norm: float, lr: float) -> None:
        """Adds an optimiser step."""
        self.grad_norms = [*self.grad_norms, grad_norm]
        self.lrs = [*self.lrs, lr]

    def add_sizes(self, batch: TreeBatch) -> None:
        """Adds the tokens and contributions of a pack, once whatever the number of epochs."""
        self._sizes["unique"] += batch.num_tokens
        self._sizes["path"] += batch.num_path_tokens
        self._sizes["contributions"] += int(batch.carries_loss.sum())
        if batch.imitated is not None:
            self._sizes["imitated"] += batch.imitated.packed.numel()

    def state(self) -> dict[str, Any]:
        """Returns all of it as JSON can hold it."""
        return vars(self) | {"_sums": {key: float(total) for key, total in self._sums.items()}}

    @classmethod
    def of(cls, states: Sequence[dict[str, Any]]) -> MetricSums:
        """Returns the sums of what several processes have counted; gradient norms and learning
        rates are the same in all."""
        whole = cls()
        for state in states:
            whole.loss += state["loss"]
            whole.ratio_max = max(whole.ratio_max, state["ratio_max"])
            for name in ("_sums", "_counts", "_sizes"):
                total = getattr(whole, name)
                for key, value in state[name].items():
                    total[key] = total.get(key, 0) + value
        whole.grad_norms = states[0]["grad_norms"]
        whole.lrs = states[0]["lrs"]
        return whole

    def metrics(self, num_steps: int, *, takes_imitated: bool) -> dict[str, float]:
        """Returns means over contributions; of loss and gradient norm, means over optimiser
        steps; and sizes.

        Args:
            takes_imitated: whether the run learns from grafts; their tokens are counted only then.
        """
        means = {key: float(total) / max(1, self._counts[key]) for key, total in self._sums.items()}
        # Where all fresh groups were skipped nothing was compared: 0 would count as agreement.
        if not self._counts.get("learn/engine_gap"):
            means.pop("learn/engine_gap", None)
        steps = max(1, num_steps)
        sizes = self._sizes
        num_skipped = sum(not math.isfinite(norm) for norm in self.grad_norms)
        found = means | {
            "learn/loss": self.loss / steps,
            "learn/ratio_max": self.ratio_max,
            "learn/grad_norm": math.fsum(self.grad_norms) / steps,
            # Of the last step: a schedule moves within an update.
            "learn/lr": self.lrs[-1] if self.lrs else 0.0,
            "learn/num_optimiser_steps": float(num_steps - num_skipped),
            "learn/num_skipped_steps": float(num_skipped),
            "learn/num_unique_tokens": float(sizes["unique"]),
            "learn/unique_frac": (sizes["unique"] - sizes["imitated"]) / max(1, sizes["path"]),
            "learn/num_contributions": float(sizes["contributions"]),
        }
        return found | (
            {"learn/num_lesson_tokens": float(sizes["imitated"])} if takes_imitated else {}
        )
