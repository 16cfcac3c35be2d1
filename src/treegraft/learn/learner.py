"""The learner: optimiser steps on packed trees, exact per trajectory."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from treegraft.algo.losses import (
    Denominators,
    clipped_surrogate,
    contribution_weights,
    k3_divergence,
)
from treegraft.attention import ATTENTION, install_attention, tree_attention
from treegraft.config import LearnSettings, LossSettings
from treegraft.errors import CheckpointError, ModelError
from treegraft.learn.optimiser import MasterAdamW
from treegraft.learn.pack import TreeBatch, num_tree_tokens, pack_trees, plan_packs
from treegraft.learn.scores import (
    Scores,
    chunked_argmax,
    chunked_scores,
    packed_hidden,
    packing_problem,
    rowwise_hidden,
)
from treegraft.models import Head, base_model, head_problem
from treegraft.types import LEARNING_RULES, Step, Trajectory, Tree

DEFAULT_CHUNK = 512


def token_scores(model: nn.Module, batch: TreeBatch, *, vocab_chunk: int = DEFAULT_CHUNK) -> Scores:
    """Returns (logprobs, entropies), each [U] float32, of the batch's unique sampled tokens in the order of `batch.sampled`.

    Both are of softmax(logits / T) with T of the token's step. Our attention is installed for the call and the model's own
    restored after it; a model that cannot take it is run once per trajectory. Gradients flow to the model, except under its own
    gradient checkpointing, for which `Learner` keeps the attention installed.

    Raises:
        ModelError: its logits cannot be had from hidden states and output embeddings.
    """
    _check_head(model)
    if packing_problem(model) is not None:
        hidden = rowwise_hidden(model, batch)
    else:
        with tree_attention(model):
            hidden = packed_hidden(model, batch)
    return chunked_scores(Head(model), hidden, batch.token_ids[batch.sampled], batch.temperatures, vocab_chunk)


@dataclass(frozen=True, slots=True)
class _Pack:
    """Trees of one forward and backward pass with what was computed for them."""

    indices: tuple[int, ...]
    """Which of the update's trees."""
    batch: TreeBatch
    old_logprobs: torch.Tensor | None
    ref_logprobs: torch.Tensor | None


class Learner:
    """Owns the trained weights and their optimiser."""

    def __init__(self, model: Any, learn: LearnSettings, loss: LossSettings, *, length_constant: int) -> None:
        """Takes over `model` (nobody else may train it).

        Args:
            length_constant: divisor of "sequence-sum" in tokens, used where loss.length_constant is None.

        Raises:
            ModelError: its logits cannot be had from hidden states and output embeddings.
        """
        self.model = model
        self.settings = learn
        self._loss = loss
        self._length_constant = float(loss.length_constant or length_constant)
        _check_head(model)
        self.packing_problem = packing_problem(model)
        """Why trees are run row by row; None where they are packed."""
        if self.packing_problem is None:
            install_attention(model)
        self._head = Head(model)
        self.optimiser = MasterAdamW(model, learn)
        self._reference: Any = None

    @property
    def device(self) -> torch.device:
        device: torch.device = base_model(self.model).device
        return device

    # ------------------------------------------------------------------ scores

    def scores(self, batch: TreeBatch) -> Scores:
        """Returns (logprobs, entropies) of the unique sampled tokens, with gradients where they are enabled."""
        return self._scores_of(self.model, self._head, batch)

    def argmax(self, batch: TreeBatch) -> torch.Tensor:
        """Returns [U] the most likely token where each unique sampled token stands."""
        return chunked_argmax(self._head, self._hidden(self.model, batch), self.settings.vocab_chunk)

    def _scores_of(self, model: Any, head: Head, batch: TreeBatch) -> Scores:
        targets = batch.token_ids[batch.sampled]
        return chunked_scores(head, self._hidden(model, batch), targets, batch.temperatures, self.settings.vocab_chunk)

    def _hidden(self, model: Any, batch: TreeBatch) -> torch.Tensor:
        run = packed_hidden if self.packing_problem is None else rowwise_hidden
        return run(model, batch)

    def keep_reference(self) -> None:
        """Freezes the present weights as the reference of the KL term."""
        self._reference = copy.deepcopy(self.model).requires_grad_(False)

    def save_reference(self, folder: Path) -> None:
        """Writes the reference, for a resumed run."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / ".reference.partial"
        save_file({name: tensor.contiguous().clone() for name, tensor in self._reference.state_dict().items()}, partial)
        partial.replace(folder / "reference.safetensors")

    def load_reference(self, folder: Path) -> None:
        """Restores what `save_reference` wrote.

        Raises:
            CheckpointError: it is missing.
        """
        path = folder / "reference.safetensors"
        if not path.exists():
            raise CheckpointError(f"'{path}' is missing; a run with loss.kl_coef > 0 cannot be resumed without its reference")
        self.keep_reference()
        self._reference.load_state_dict(load_file(path))

    # ------------------------------------------------------------------ one update

    def learn(self, trees: Sequence[Tree]) -> tuple[list[Tree], dict[str, float]]:
        """Returns the trees with old log-probabilities and ratios filled in, and the update's metrics.

        Groups without variance are left out of the passes (unless the KL term needs them) and counted in the denominators.
        """
        minibatches = split_evenly(len(trees), self.settings.num_minibatches)
        passes = [part for _ in range(self.settings.num_epochs) for part in minibatches if part]
        packs = {part: self._packs(trees, part) for part in dict.fromkeys(passes)}
        if len(passes) > 1 or self._reference is not None:
            packs = {part: [self._scored(pack, len(passes) > 1) for pack in group] for part, group in packs.items()}
        tally = _Tally()
        written: dict[int, dict[str, Step]] = {}
        for part in passes:
            self._optimiser_step(trees, part, packs[part], tally, written)
        skipped = sum(not self._is_learned(tree) for tree in trees)
        metrics = tally.metrics(len(passes)) | self._static_metrics(trees, packs)
        metrics["learn/skipped_groups_frac"] = skipped / max(1, len(trees))
        done = [replace(tree, steps=tuple(written.get(n, {}).get(s.id, s) for s in tree.steps)) for n, tree in enumerate(trees)]
        return done, metrics

    def _is_learned(self, tree: Tree) -> bool:
        has_signal = any(leaf.advantage for leaf in tree.leaves if leaf.has_loss)
        return has_signal or (self._reference is not None and any(leaf.has_loss for leaf in tree.leaves))

    def _packs(self, trees: Sequence[Tree], part: Sequence[int]) -> list[_Pack]:
        kept = [index for index in part if self._is_learned(trees[index])]
        plan = plan_packs([num_tree_tokens(trees[index]) for index in kept], self.settings.max_pack_tokens)
        groups = [tuple(kept[n] for n in group) for group in plan]
        return [_Pack(g, pack_trees([trees[n] for n in g], device=self.device), None, None) for g in groups]

    @torch.no_grad()
    def _scored(self, pack: _Pack, needs_old: bool) -> _Pack:
        old = self.scores(pack.batch)[0] if needs_old else None
        ref = None
        if self._reference is not None:
            ref = self._scores_of(self._reference, Head(self._reference), pack.batch)[0]
        return replace(pack, old_logprobs=old, ref_logprobs=ref)

    def _optimiser_step(
        self,
        trees: Sequence[Tree],
        part: Sequence[int],
        packs: Sequence[_Pack],
        tally: _Tally,
        written: dict[int, dict[str, Step]],
    ) -> None:
        denominators = self._denominators([trees[index] for index in part])
        for pack in packs:
            logprobs, entropies = self.scores(pack.batch)
            old = logprobs.detach() if pack.old_logprobs is None else pack.old_logprobs
            loss = self._pack_loss(pack, logprobs, entropies, old, denominators, tally)
            torch.autograd.backward(loss)
            self.optimiser.collect()
            write_back(pack, trees, old, logprobs.detach(), written)
        tally.grad_norms.append(self.optimiser.step())
        tally.lrs.append(self.optimiser.last_lr)

    def _denominators(self, trees: Iterable[Tree]) -> Denominators:
        groups, tokens = 0, 0.0
        for tree in trees:
            groups += 1
            tokens += sum(path.leaf.weight * _num_counted(path) for path in tree.trajectories())
        return Denominators(groups, tokens, self._length_constant)

    def _pack_loss(
        self,
        pack: _Pack,
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        old: torch.Tensor,
        denominators: Denominators,
        tally: _Tally,
    ) -> torch.Tensor:
        """Σ over contributions of factor · l, the pack's share of the optimiser step's loss."""
        batch, settings = pack.batch, self._loss
        rows = batch.carries_loss.nonzero()[:, 0]
        tokens, owners = batch.tokens[rows], batch.trajectories[rows]
        lengths = torch.bincount(owners, minlength=len(batch.paths)).to(torch.float64)
        leaves = [path.leaf for path in batch.paths]
        weights = torch.tensor([leaf.weight for leaf in leaves], dtype=torch.float64, device=rows.device)
        advantages = torch.tensor([leaf.advantage or 0.0 for leaf in leaves], dtype=torch.float32, device=rows.device)
        factors = contribution_weights(weights, lengths, denominators, settings.aggregation).float()[owners]
        new = logprobs.index_select(0, tokens)
        terms = clipped_surrogate(
            new,
            old.index_select(0, tokens),
            advantages[owners],
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
        )
        losses = terms.losses
        if pack.ref_logprobs is not None:
            divergence = k3_divergence(new, pack.ref_logprobs.index_select(0, tokens))
            losses = losses + settings.kl_coef * divergence
            tally.add("learn/kl", divergence.detach())
        loss = (factors * losses).sum()
        tally.loss += float(loss.detach())
        tally.add("learn/clip_frac", terms.is_clipped.float())
        tally.add("learn/entropy", entropies.detach().index_select(0, tokens))
        log_ratios = torch.log(terms.ratios)
        tally.add("learn/approx_kl", terms.ratios - 1.0 - log_ratios)
        tally.ratio_max = max(tally.ratio_max, float(terms.ratios.max()) if terms.ratios.numel() else 1.0)
        gap = (old - batch.sampling_logprobs).abs()
        tally.add("learn/engine_gap", gap)
        return loss

    def _static_metrics(self, trees: Sequence[Tree], packs: Mapping[Any, Sequence[_Pack]]) -> dict[str, float]:
        batches = [pack.batch for group in packs.values() for pack in group]
        unique = sum(batch.num_tokens for batch in batches)
        return {
            "learn/num_unique_tokens": float(unique),
            "learn/unique_frac": unique / max(1, sum(batch.num_path_tokens for batch in batches)),
            "learn/num_contributions": float(sum(int(batch.carries_loss.sum()) for batch in batches)),
        }

    # ------------------------------------------------------------------ weights

    def export_weights(self) -> dict[str, torch.Tensor]:
        """Returns the plain model's state dict, adapters merged into it, detached."""
        return plain_weights(self.model)

    def state(self) -> dict[str, torch.Tensor]:
        """Returns everything that training needs to go on: master weights, optimiser moments, counters."""
        return self.optimiser.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores `state()`.

        Raises:
            CheckpointError: the state belongs to another model.
        """
        try:
            self.optimiser.load_state(state)
        except KeyError as error:
            raise CheckpointError(f"the optimiser state does not fit the model: {error}") from error


def _num_counted(path: Trajectory) -> int:
    """|y| for the denominators, by the status table: truncated paths count also where they carry no loss."""
    if not LEARNING_RULES[path.status].in_denominator:
        return 0
    return sum(sum(step.loss_mask) for step in path.steps)


def _check_head(model: nn.Module) -> None:
    if base_model(model).config._attn_implementation != ATTENTION and (problem := head_problem(model)):
        raise ModelError(f"learner: this model cannot be trained here: {problem}; its head has a tail that is not known yet")


def write_back(
    pack: _Pack, trees: Sequence[Tree], old: torch.Tensor, new: torch.Tensor, written: dict[int, dict[str, Step]]
) -> None:
    """Fills old log-probabilities and ratios into the pack's steps, for the record."""
    packed_old = torch.zeros(pack.batch.num_tokens)
    packed_ratio = torch.ones(pack.batch.num_tokens)
    packed_old[pack.batch.sampled.cpu()] = old.detach().float().cpu()
    packed_ratio[pack.batch.sampled.cpu()] = torch.exp((new - old).float()).cpu()
    olds, ratios = packed_old.tolist(), packed_ratio.tolist()
    for index, offsets in zip(pack.indices, pack.batch.step_offsets, strict=True):
        steps = written.setdefault(index, {})
        for step in trees[index].steps:
            part = slice(offsets[step.id], offsets[step.id] + len(step.token_ids))
            steps[step.id] = replace(step, old_logprobs=tuple(olds[part]), ratios=tuple(ratios[part]))


def split_evenly(count: int, parts: int) -> list[tuple[int, ...]]:
    """Returns 0..count-1 cut into `parts` runs whose lengths differ by at most one; short of items, some are empty."""
    bounds = [count * n // parts for n in range(parts + 1)]
    return [tuple(range(a, b)) for a, b in pairwise(bounds)]


def plain_weights(model: Any) -> dict[str, torch.Tensor]:
    """Returns a state dict with the names of the plain model, LoRA's products added to the weights they adapt.

    W' = W + scale · B A, formed anew each time: merging in place and undoing it would drift by rounding.
    """
    if not hasattr(model, "get_base_model"):
        return {name: tensor.detach() for name, tensor in model.state_dict().items()}
    from peft.tuners.lora import LoraLayer

    inner = model.get_base_model()
    adapted = [(name, module) for name, module in inner.named_modules() if isinstance(module, LoraLayer)]
    deltas = {name: module.get_delta_weight("default") for name, module in adapted}  # type: ignore[attr-defined]
    merged = {}
    for name, tensor in inner.state_dict().items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        owner = name.removesuffix(".base_layer.weight")
        merged[plain] = (tensor + deltas[owner]).detach() if owner != name and owner in deltas else tensor.detach()
    return merged


class _Tally:
    """Sums of diagnostics over the contributions of an update."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.ratio_max = 1.0
        self.grad_norms: list[float] = []
        self.lrs: list[float] = []
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, key: str, values: torch.Tensor) -> None:
        self._sums[key] = self._sums.get(key, 0.0) + float(values.sum(dtype=torch.float64))
        self._counts[key] = self._counts.get(key, 0) + values.numel()

    def metrics(self, num_steps: int) -> dict[str, float]:
        """Means over contributions; loss and gradient norm are means over optimiser steps."""
        means = {key: total / max(1, self._counts[key]) for key, total in self._sums.items()}
        steps = max(1, num_steps)
        return means | {
            "learn/loss": self.loss / steps,
            "learn/ratio_max": self.ratio_max,
            "learn/grad_norm": math.fsum(self.grad_norms) / steps,
            "learn/lr": self.lrs[-1] if self.lrs else 0.0,
            "learn/num_optimiser_steps": float(num_steps),
        }
