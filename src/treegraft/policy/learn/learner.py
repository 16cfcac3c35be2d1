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
    engine_correction,
    k3_divergence,
    lesson_loss,
)
from treegraft.algo.rapo import graft_neighbours, shaping_factor
from treegraft.core.errors import CheckpointError, ModelError
from treegraft.core.types import LEARNING_RULES, EntropyKind, Step, Trajectory, Tree
from treegraft.policy.head import Head, base_model, head_problem
from treegraft.policy.hook import ATTENTION, install_attention, tree_attention
from treegraft.policy.learn.optimiser import MasterAdamW
from treegraft.policy.learn.pack import (
    TreeBatch,
    credit,
    num_lesson_tokens,
    num_tree_tokens,
    pack_trees,
    pack_with_lessons,
    plan_packs,
    split_tree,
)
from treegraft.policy.learn.scores import (
    Scores,
    chunked_argmax,
    chunked_scores,
    packed_hidden,
    packing_problem,
    rowwise_hidden,
)
from treegraft.policy.weights import ModelWeights, plain_weights
from treegraft.settings.policy import LearnSettings, LossSettings

DEFAULT_CHUNK = 2048


def token_scores(model: nn.Module, batch: TreeBatch, *, vocab_chunk: int = DEFAULT_CHUNK) -> Scores:
    """Returns (logprobs, entropies), each [U] float32, of the batch's unique sampled tokens in the
    order of `batch.sampled`.

    Both are of softmax(logits / T) with T of the token's step. Our attention is installed for the
    call and the model's own restored after it; a model that cannot take it is run once per
    trajectory. Gradients flow to the model, except under its own gradient checkpointing, for which
    `Learner` keeps the attention installed.

    Raises:
        ModelError: its logits cannot be had from hidden states and output embeddings.
    """
    _check_head(model)
    if packing_problem(model) is not None:
        hidden = rowwise_hidden(model, batch)
    else:
        with tree_attention(model):
            hidden = packed_hidden(model, batch)
    sampled = hidden[: batch.sampled.numel()]
    return chunked_scores(
        Head(model), sampled, batch.token_ids[batch.sampled], batch.temperatures, vocab_chunk
    )


@dataclass(frozen=True, slots=True)
class _Pack:
    """Trees of one forward and backward pass with what was computed for them."""

    indices: tuple[int, ...]
    """Which of the update's trees each part of the batch is of."""
    batch: TreeBatch
    old_logprobs: torch.Tensor | None
    ref_logprobs: torch.Tensor | None


class Learner:
    """Owns the trained weights and their optimiser."""

    def __init__(
        self, model: Any, learn: LearnSettings, loss: LossSettings, *, length_constant: int
    ) -> None:
        """Takes over `model` (nobody else may train it).

        Args:
            length_constant: divisor of "sequence-sum" in tokens, used where loss.length_constant is
                None.

        Raises:
            ModelError: its logits cannot be had from hidden states and output embeddings.
        """
        self.model = model
        self.settings = learn
        self._loss = loss
        self._length_constant = float(loss.length_constant or length_constant)
        _check_head(model)
        self.packing_problem = packing_problem(model, compile_kernels=learn.compile_kernels)
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
        """Returns (logprobs, entropies) of the unique sampled tokens, with gradients where they are
        enabled."""
        return self._scores_of(self.model, self._head, batch)

    def scores_with_lessons(
        self, batch: TreeBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (logprobs [U], entropies [U], log-probabilities of the lesson tokens [L]) of one
        pass, as `scores`."""
        if batch.lessons is None:
            logprobs, entropies = self.scores(batch)
            return logprobs, entropies, logprobs.new_zeros(0)
        targets = batch.token_ids[torch.cat([batch.sampled, batch.lessons.packed])]
        temperatures = torch.cat([batch.temperatures, batch.lessons.temperatures])
        hidden = self._hidden(self.model, batch)
        logprobs, entropies = chunked_scores(
            self._head, hidden, targets, temperatures, self.settings.vocab_chunk
        )
        count = batch.sampled.numel()
        return logprobs[:count], entropies[:count], logprobs[count:]

    def argmax(self, batch: TreeBatch) -> torch.Tensor:
        """Returns [U] the most likely token where each unique sampled token stands."""
        return chunked_argmax(
            self._head,
            self._hidden(self.model, batch)[: batch.sampled.numel()],
            self.settings.vocab_chunk,
        )

    @torch.no_grad()
    def with_exact_entropies(self, trees: Sequence[Tree]) -> list[Tree]:
        """Returns the trees with exact entropies around grafts, which the retrieval reward is made
        of.

        An engine that knows its top-k entropies only leaves the steps before and after a graft to
        be scored here, at the temperature they were sampled at. Trees without such a step come back
        as they are, at no cost.
        """
        wanted = [_inexact_neighbours(tree) for tree in trees]
        done = list(trees)
        for chosen, batch in self._batches(
            trees, [n for n, names in enumerate(wanted) if names], takes_lessons=False
        ):
            packed = torch.zeros(batch.num_tokens)
            packed[batch.sampled.cpu()] = self.scores(batch)[1].float().cpu()
            values = packed.tolist()
            for n, offsets in zip(chosen, batch.step_offsets, strict=True):
                names = wanted[n] & offsets.keys()
                steps = [
                    _with_entropies(s, values, offsets[s.id]) if s.id in names else s
                    for s in done[n].steps
                ]
                done[n] = replace(done[n], steps=tuple(steps))
        return done

    def _batches(
        self, trees: Sequence[Tree], indices: Sequence[int], *, takes_lessons: bool
    ) -> list[tuple[tuple[int, ...], TreeBatch]]:
        """What goes through the model together, with the tree that each part of it is of; too large
        trees are split."""
        limit = self.settings.max_pack_tokens
        parts = [
            (n, part)
            for n in indices
            for part in split_tree(trees[n], limit, with_lessons=takes_lessons)
        ]
        sizes = [
            num_tree_tokens(part) + (num_lesson_tokens(part) if takes_lessons else 0)
            for _, part in parts
        ]
        pack = pack_with_lessons if takes_lessons else pack_trees
        return [
            (
                tuple(parts[n][0] for n in group),
                pack([parts[n][1] for n in group], device=self.device),
            )
            for group in plan_packs(sizes, limit)
        ]

    def _scores_of(self, model: Any, head: Head, batch: TreeBatch) -> Scores:
        targets = batch.token_ids[batch.sampled]
        hidden = self._hidden(model, batch)[: batch.sampled.numel()]
        return chunked_scores(head, hidden, targets, batch.temperatures, self.settings.vocab_chunk)

    def _hidden(self, model: Any, batch: TreeBatch) -> torch.Tensor:
        if self.packing_problem is not None:
            return rowwise_hidden(model, batch)
        return packed_hidden(model, batch, compile_kernels=self.settings.compile_kernels)

    def keep_reference(self) -> None:
        """Freezes the present weights as the reference of the KL term."""
        self._reference = copy.deepcopy(self.model).requires_grad_(False)

    def save_reference(self, folder: Path) -> None:
        """Writes the reference, for a resumed run."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / ".reference.partial"
        save_file(
            {
                name: tensor.contiguous().clone()
                for name, tensor in self._reference.state_dict().items()
            },
            partial,
        )
        partial.replace(folder / "reference.safetensors")

    def load_reference(self, folder: Path) -> None:
        """Restores what `save_reference` wrote.

        Raises:
            CheckpointError: it is missing.
        """
        path = folder / "reference.safetensors"
        if not path.exists():
            raise CheckpointError(
                f"'{path}' is missing; a run with loss.kl_coef > 0 cannot be resumed without its"
                " reference"
            )
        self.keep_reference()
        self._reference.load_state_dict(load_file(path))

    # ------------------------------------------------------------------ one update

    def learn(self, trees: Sequence[Tree]) -> tuple[list[Tree], dict[str, float]]:
        """Returns the trees with old log-probabilities and ratios filled in, and the update's
        metrics.

        Groups without variance are left out of the passes (unless the KL term needs them) and
        counted in the denominators.
        """
        minibatches = split_evenly(len(trees), self.settings.num_minibatches)
        passes = [part for _ in range(self.settings.num_epochs) for part in minibatches if part]
        packs = {part: self._packs(trees, part) for part in dict.fromkeys(passes)}
        # The first step's own pass is by the old weights, so it needs none before it.
        packs = {
            part: [self._scored(pack, part != passes[0]) for pack in group]
            for part, group in packs.items()
        }
        tally = _Tally()
        written: dict[int, dict[str, Step]] = {}
        for part in passes:
            packs[part] = self._optimiser_step(trees, part, packs[part], tally, written)
        skipped = sum(not self._is_learned(tree) for tree in trees)
        metrics = tally.metrics(len(passes)) | self._static_metrics(trees, packs)
        metrics["learn/skipped_groups_frac"] = skipped / max(1, len(trees))
        done = [
            replace(tree, steps=tuple(written.get(n, {}).get(s.id, s) for s in tree.steps))
            for n, tree in enumerate(trees)
        ]
        return [
            self._with_factors(tree) if self._is_learned(tree) else tree for tree in done
        ], metrics

    def _with_factors(self, tree: Tree) -> Tree:
        """The tree with the shaping factor that each trajectory was learned with, for the
        record."""
        weight = self._loss.shaping_weight
        factors = [
            shaping_factor(leaf.retrieved_frac, weight) if leaf.has_loss else None
            for leaf in tree.leaves
        ]
        leaves = [
            replace(leaf, shaping_factor=factor)
            for leaf, factor in zip(tree.leaves, factors, strict=True)
        ]
        return replace(tree, leaves=tuple(leaves))

    def _is_learned(self, tree: Tree) -> bool:
        if _has_signal(tree) or (self._loss.graft_coef > 0 and num_lesson_tokens(tree) > 0):
            return True
        return self._reference is not None and any(leaf.has_loss for leaf in tree.leaves)

    def _packs(self, trees: Sequence[Tree], part: Sequence[int]) -> list[_Pack]:
        kept = [index for index in part if self._is_learned(trees[index])]
        batches = self._batches(trees, kept, takes_lessons=self._loss.graft_coef > 0)
        return [_Pack(indices, batch, None, None) for indices, batch in batches]

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
    ) -> list[_Pack]:
        """Returns the packs with their old log-probabilities, for steps of later epochs."""
        denominators = self._denominators([trees[index] for index in part])
        done = []
        for pack in packs:
            logprobs, entropies, lessons = self.scores_with_lessons(pack.batch)
            old = logprobs.detach() if pack.old_logprobs is None else pack.old_logprobs
            factors = self._factors(pack.batch, denominators)
            loss = self._pack_loss(pack, logprobs, entropies, old, factors, tally)
            if pack.batch.lessons is not None:
                loss = loss + self._lesson_loss(pack.batch, lessons, factors, tally)
            tally.loss += float(loss.detach())
            torch.autograd.backward(loss)
            self.optimiser.collect()
            write_back(pack, trees, old, logprobs.detach(), written)
            done.append(replace(pack, old_logprobs=old))
        tally.grad_norms.append(self.optimiser.step())
        tally.lrs.append(self.optimiser.last_lr)
        return done

    def _denominators(self, trees: Iterable[Tree]) -> Denominators:
        groups, tokens = 0, 0.0
        for tree in trees:
            groups += any(LEARNING_RULES[leaf.status].in_denominator for leaf in tree.leaves)
            tokens += sum(path.leaf.weight * _num_counted(path) for path in tree.trajectories())
        return Denominators(groups, tokens, self._length_constant)

    def _factors(self, batch: TreeBatch, denominators: Denominators) -> torch.Tensor:
        """[N] the factor of every contribution of each trajectory."""
        owners = batch.trajectories[batch.carries_loss]
        lengths = torch.bincount(owners, minlength=len(batch.paths)).to(torch.float64)
        weights = torch.tensor(
            [path.leaf.weight for path in batch.paths], dtype=torch.float64, device=owners.device
        )
        return contribution_weights(weights, lengths, denominators, self._loss.aggregation).float()

    def _pack_loss(
        self,
        pack: _Pack,
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        old: torch.Tensor,
        factors: torch.Tensor,
        tally: _Tally,
    ) -> torch.Tensor:
        """Σ over contributions of factor · l, the pack's share of the optimiser step's loss on
        sampled tokens."""
        batch, settings = pack.batch, self._loss
        rows = batch.carries_loss.nonzero()[:, 0]
        tokens, owners = batch.tokens[rows], batch.trajectories[rows]
        shaping = [
            shaping_factor(path.leaf.retrieved_frac, settings.shaping_weight)
            for path in batch.paths
        ]
        new = logprobs.index_select(0, tokens)
        terms = clipped_surrogate(
            new,
            old.index_select(0, tokens),
            batch.advantages[rows],
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
            shaping=torch.tensor(shaping, dtype=torch.float32, device=rows.device)[owners],
        )
        losses = terms.losses
        if settings.engine_ratio_cap is not None:
            sampled_at = batch.sampling_logprobs.index_select(0, tokens)
            weights, is_capped = engine_correction(
                old.index_select(0, tokens), sampled_at, settings.engine_ratio_cap
            )
            losses = losses * weights
            tally.add("learn/engine_capped_frac", is_capped.float())
        if pack.ref_logprobs is not None:
            divergence = k3_divergence(new, pack.ref_logprobs.index_select(0, tokens))
            losses = losses + settings.kl_coef * divergence
            tally.add("learn/kl", divergence.detach())
        signs = batch.advantages[rows]
        if (signs != 0).any():
            tally.add("learn/positive_frac", (signs[signs != 0] > 0).float())
        tally.add("learn/clip_frac", terms.is_clipped.float())
        tally.add("learn/entropy", entropies.detach().index_select(0, tokens))
        log_ratios = torch.log(terms.ratios)
        tally.add("learn/approx_kl", terms.ratios - 1.0 - log_ratios)
        tally.ratio_max = max(
            tally.ratio_max, float(terms.ratios.max()) if terms.ratios.numel() else 1.0
        )
        tally.add("learn/engine_gap", (old - batch.sampling_logprobs).abs())
        return (factors[owners] * losses).sum()

    def _lesson_loss(
        self, batch: TreeBatch, logprobs: torch.Tensor, factors: torch.Tensor, tally: _Tally
    ) -> torch.Tensor:
        """Σ over lesson contributions of factor · l, with the factor that the trajectory's sampled
        tokens have."""
        assert batch.lessons is not None
        owners = batch.lessons.trajectories
        advantages = [path.leaf.advantage or 0.0 for path in batch.paths]
        chosen = logprobs.index_select(0, batch.lessons.tokens)
        losses = lesson_loss(
            chosen,
            torch.tensor(advantages, dtype=torch.float32, device=owners.device)[owners],
            coef=self._loss.graft_coef,
            form=self._loss.graft_form,
            gamma=self._loss.graft_gamma,
        )
        tally.add("learn/lesson_logprob", chosen.detach())
        return (factors[owners] * losses).sum()

    def _static_metrics(
        self, trees: Sequence[Tree], packs: Mapping[Any, Sequence[_Pack]]
    ) -> dict[str, float]:
        batches = [pack.batch for group in packs.values() for pack in group]
        unique = sum(batch.num_tokens for batch in batches)
        taught = sum(batch.lessons.packed.numel() for batch in batches if batch.lessons is not None)
        metrics = {
            "learn/num_unique_tokens": float(unique),
            "learn/unique_frac": (
                (unique - taught) / max(1, sum(batch.num_path_tokens for batch in batches))
            ),
            "learn/num_contributions": float(
                sum(int(batch.carries_loss.sum()) for batch in batches)
            ),
        }
        return metrics | (
            {"learn/num_lesson_tokens": float(taught)} if self._loss.graft_coef > 0 else {}
        )

    # ------------------------------------------------------------------ weights

    def weights(self) -> ModelWeights:
        """Returns the plain model's weights, adapters merged into them, detached."""
        return ModelWeights(plain_weights(self.model))

    def state(self) -> dict[str, torch.Tensor]:
        """Returns everything that training needs to go on: master weights, optimiser moments,
        counters."""
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


def _has_signal(tree: Tree) -> bool:
    """Whether any token that carries loss has an advantage other than 0."""
    paths = (path for path in tree.trajectories() if path.leaf.has_loss)
    return any(
        credit(step, path.leaf) != 0.0
        for path in paths
        for step in path.steps
        if any(step.loss_mask)
    )


def _inexact_neighbours(tree: Tree) -> set[str]:
    """Ids of the steps beside grafts whose entropies the engine knew in part only."""
    pairs = (pair for path in tree.trajectories() for pair in graft_neighbours(path.steps))
    return {
        step.id for pair in pairs for step in pair if step.entropy_kind is not EntropyKind.EXACT
    }


def _with_entropies(step: Step, packed: Sequence[float], offset: int) -> Step:
    entropies = tuple(packed[offset : offset + len(step.token_ids)])
    return replace(step, entropies=entropies, entropy_kind=EntropyKind.EXACT)


def _num_counted(path: Trajectory) -> int:
    """|y| for the denominators: truncated paths count also where they carry no loss."""
    if not LEARNING_RULES[path.status].in_denominator:
        return 0
    return sum(sum(step.loss_mask) for step in path.steps)


def _check_head(model: nn.Module) -> None:
    if base_model(model).config._attn_implementation != ATTENTION and (
        problem := head_problem(model)
    ):
        raise ModelError(
            f"learner: this model cannot be trained here: {problem}; its head has a tail that is"
            " not known yet"
        )


def write_back(
    pack: _Pack,
    trees: Sequence[Tree],
    old: torch.Tensor,
    new: torch.Tensor,
    written: dict[int, dict[str, Step]],
) -> None:
    """Fills old log-probabilities and ratios into the pack's steps, for the record."""
    packed_old = torch.zeros(pack.batch.num_tokens)
    packed_ratio = torch.ones(pack.batch.num_tokens)
    packed_old[pack.batch.sampled.cpu()] = old.detach().float().cpu()
    packed_ratio[pack.batch.sampled.cpu()] = torch.exp((new - old).float()).cpu()
    olds, ratios = packed_old.tolist(), packed_ratio.tolist()
    for index, offsets in zip(pack.indices, pack.batch.step_offsets, strict=True):
        steps = written.setdefault(index, {})
        for step in (step for step in trees[index].steps if step.id in offsets):
            part = slice(offsets[step.id], offsets[step.id] + len(step.token_ids))
            steps[step.id] = replace(
                step, old_logprobs=tuple(olds[part]), ratios=tuple(ratios[part])
            )


def split_evenly(count: int, parts: int) -> list[tuple[int, ...]]:
    """Returns 0..count-1 cut into `parts` runs whose lengths differ by at most one; short of items,
    some are empty."""
    bounds = [count * n // parts for n in range(parts + 1)]
    return [tuple(range(a, b)) for a, b in pairwise(bounds)]


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
