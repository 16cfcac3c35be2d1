"""AdamW on float32 master weights, with gradients summed over micro-batches in float32."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from treegraft.core.errors import ModelError
from treegraft.policy.shards import TensorFiles
from treegraft.settings.policy import LearnSettings, Schedule

MAX_SKIPPED = 3
"""Optimiser steps in a row without a finite gradient that end a run."""


def decay(schedule: Schedule, left: float, final: float) -> float:
    """Returns the share of the peak learning rate.

    final + (1 - final) · shape(left),  with shape 1 (constant), left (linear) or
    (1 - cos(π left)) / 2 (cosine)

    Args:
        left: share of the decay that is still to come, 1 at its first step, 0 behind its last.
        final: share of the peak that it falls to, 0..1.
    """
    if schedule == "constant":
        return 1.0
    shape = left if schedule == "linear" else (1.0 - math.cos(math.pi * left)) / 2.0
    return final + (1.0 - final) * shape


def _move(master: Tensor, weight: Tensor) -> None:
    """Adds a weight's gradient to its master's, as soon as the backward pass has made it: the
    gradients of a whole model in both types would take half as much again as its masters."""
    assert weight.grad is not None
    # In float32: a bfloat16 sum loses addends that are some hundred times smaller.
    master.grad = weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
    weight.grad = None


class MasterAdamW:
    """AdamW for a model of any dtype.

    A float32 model is trained in place. For any other dtype each weight has a float32 master: the
    gradients of each backward pass move there as they are made and are added up in float32, the
    step is taken on the master, and the model gets its rounding. A step of 1e-6 would vanish in
    bfloat16.
    """

    def __init__(self, model: Any, settings: LearnSettings, *, num_planned: int = 0) -> None:
        """Takes the weights of `model` that require gradients.

        Args:
            num_planned: optimiser steps of the whole run, at which a schedule's decay ends; only a
                constant one does without.
        """
        self._settings = settings
        self._num_planned = num_planned
        self._names = []
        self._weights = []
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                self._names.append(name)
                self._weights.append(weight)
        is_float32 = all(weight.dtype == torch.float32 for weight in self._weights)
        self._masters = self._weights
        if not is_float32:
            # Cloned also where a weight is float32 already: a mixed model has masters throughout.
            self._masters = [torch.nn.Parameter(w.detach().float().clone()) for w in self._weights]
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.register_post_accumulate_grad_hook(partial(_move, master))
        # As transformers' Trainer does; norms and biases are the weights with one dimension.
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": settings.weight_decay},
            {"params": [], "weight_decay": 0.0},
        ]
        for master in self._masters:
            groups[master.ndim <= 1]["params"].append(master)
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            betas=settings.betas,
            fused=True,
        )
        self.num_steps = 0
        """Optimiser steps, skipped ones included."""
        self._num_skipped = 0
        """Those skipped in a row."""
        self.spent = 0.0
        """Share of the run's limit of calls or tokens: a schedule is at least as far."""
        self.last_lr = 0.0

    def step(self, lr: float | None = None, weight_decay: float | None = None) -> float:
        """Returns the gradient's norm before clipping, after one AdamW step; without any gradient
        nothing moves. Where the norm is not finite the step is skipped, and the schedule counts it.

        The learning rate follows `learn.schedule`; `lr` overrides it, and `weight_decay` that of
        [learn].

        Raises:
            ModelError: the third step in a row is skipped.
        """
        lr = self._scheduled() if lr is None else lr
        self.num_steps += 1
        self.last_lr = lr
        # No group of the step had anything to learn from. AdamW would move all the same, by weight
        # decay and by the moments of earlier steps.
        if all(master.grad is None for master in self._masters):
            return 0.0
        # Here and not for each pass: the limit is on the sum over all micro-batches.
        found: Any = torch.nn.utils.clip_grad_norm_(self._masters, self._settings.max_grad_norm)
        # Of weights that are divided among ranks, it comes as parts of a sum.
        norm = float(found.full_tensor() if hasattr(found, "full_tensor") else found)
        if not math.isfinite(norm):
            self._skip(norm)
            return norm
        self._num_skipped = 0
        decay_of_matrices = self._settings.weight_decay if weight_decay is None else weight_decay
        # A warm-up has a rate and a decay of its own, in the same optimiser.
        for group in self._adam.param_groups:
            group["lr"] = lr
            if group["params"][0].ndim > 1:
                group["weight_decay"] = decay_of_matrices
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self._copy_to_model()
        return norm

    def _skip(self, norm: float) -> None:
        """Drops a gradient that would make every weight and moment NaN."""
        self._adam.zero_grad(set_to_none=True)
        self._num_skipped += 1
        if self._num_skipped >= MAX_SKIPPED:
            raise ModelError(
                f"learner: got a gradient of norm {norm} in {MAX_SKIPPED} optimiser steps in a row,"
                " expected a finite one. These steps were skipped, so the last checkpoint is sound;"
                " resume from it with a lower learn.lr or in float32, and look at losses and"
                " objectives of your own.",
                code="gradient-not-finite",
            )

    def _scheduled(self) -> float:
        """The learning rate of the next step."""
        own = self._settings
        step = self.num_steps
        # From the first step on above 0: that one's data would else be wasted.
        if step < own.lr_warmup_steps:
            return own.lr * min(1.0, (step + 1) / own.lr_warmup_steps)
        num_decaying = max(1, self._num_planned - own.lr_warmup_steps)
        left = min(1.0, 1.0 - self.spent, (self._num_planned - step) / num_decaying)
        return own.lr * decay(own.schedule, max(0.0, left), 0.0)

    def _copy_to_model(self) -> None:
        if self._masters is self._weights:
            return
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)

    def state(self) -> dict[str, Tensor]:
        """Returns master weights, moments and counters by name; tensors are the live ones."""
        state = {
            "num_steps": torch.tensor(self.num_steps),
            "num_skipped": torch.tensor(self._num_skipped),
        }
        for name, master in zip(self._names, self._masters, strict=True):
            state[f"master.{name}"] = master.detach()
            for key, value in self._adam.state.get(master, {}).items():
                state[f"{key}.{name}"] = value
        return state

    def load(self, files: TensorFiles) -> None:
        """Restores `state()` from files, of divided weights the rows of this process; a KeyError
        names the missing entry."""
        self.num_steps = int(files.whole("num_steps"))
        self._num_skipped = int(files.whole("num_skipped"))
        for name, master in zip(self._names, self._masters, strict=True):
            files.fill(f"master.{name}", master)
            # A weight that has had no gradient yet has no moments.
            if f"exp_avg.{name}" in files:
                state = {"step": files.whole(f"step.{name}").to(master.device)}
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(master, requires_grad=False)
                    files.fill(f"{key}.{name}", state[key])
                self._adam.state[master] = state
        self._copy_to_model()

    def reset(self) -> None:
        """Forgets moments and counters, as between warm-up and training."""
        self._adam.state.clear()
        self.num_steps = self._num_skipped = 0
