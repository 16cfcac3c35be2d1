"""The learner: optimiser steps on packed trees, exact per trajectory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from treegraft.algo.losses import (
    Denominators,
    contribution_weights,
    engine_correction,
    k3_divergence,
    lesson_loss,
)
from treegraft.algo.rapo import graft_neighbours, shaping_factor
from treegraft.core.errors import CheckpointError, ModelError
from treegraft.core.types import LEARNING_RULES, EntropyKind, Step, Tree
from treegraft.policy.head import Head, base_model, head_problem
from treegraft.policy.hook import ATTENTION, install_attention, tree_attention
from treegraft.policy.learn.objective import surrogate
from treegraft.policy.learn.optimiser import MasterAdamW
from treegraft.policy.learn.pack import (
    TreeBatch,
    credit,
    num_lesson_tokens,
    num_tree_tokens,
    pack_trees,
    plan_packs,
    split_tree,
)
from treegraft.policy.learn.reference import Reference
from treegraft.policy.learn.scores import (
    Scores,
    chunked_argmax,
    chunked_scores,
    packed_hidden,
    packing_problem,
    rowwise_hidden,
)
from treegraft.policy.learn.tally import Tally, size_metrics
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
    """Trees of one forward and backward pass with their scores."""

    indices: tuple[int, ...]
    """Which of the update's trees each part of the batch is of."""
    batch: TreeBatch
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None


class Learner:
    """Owns the trained weights and their optimiser."""

    def __init__(
        self,
        model: Any,
        learn: LearnSettings,
        loss: LossSettings,
        *,
        length_constant: int,
        num_updates: int = 0,
    ) -> None:
        """Takes over `model`, which must not be trained elsewhere.

        Args:
            length_constant: divisor of "sequence-sum" in tokens, used where loss.length_constant is
                None.
            num_updates: those of the whole run, for a schedule of the learning rate.

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
        # For good, not for each pass: gradient checkpointing runs the layers once more backward.
        if self.packing_problem is None:
            install_attention(model)
        self._head = Head(model)
        self.optimiser = MasterAdamW(
            model, learn, num_planned=num_updates * learn.num_epochs * learn.num_minibatches
        )
        self._reference: Reference | None = None

    @property
    def device(self) -> torch.device:
        device: torch.device = base_model(self.model).device
        return device

    # ------------------------------------------------------------------ scores

    def scores(self, batch: TreeBatch) -> Scores:
        """Returns (logprobs, entropies) of the unique sampled tokens, with gradients where they are
        enabled."""
        return self._scores_of(self.model, self._head, batch)

    def scores_with_lessons(self, batch: TreeBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (logprobs [U], entropies [U], log-probabilities of the lesson tokens [L]) of one
        pass, as `scores`."""
        logprobs, entropies = self._scores_of(self.model, self._head, batch, takes_lessons=True)
        count = batch.sampled.numel()
        return logprobs[:count], entropies[:count], logprobs[count:]

    def argmax(self, batch: TreeBatch) -> Tensor:
        """Returns [U] the most likely token where each unique sampled token stands."""
        hidden = self._hidden(self.model, batch)[: batch.sampled.numel()]
        return chunked_argmax(self._head, hidden, self.settings.vocab_chunk)

    @torch.no_grad()
    def with_exact_entropies(self, trees: Sequence[Tree]) -> list[Tree]:
        """Returns the trees with exact entropies around grafts, for the retrieval reward.

        An engine that knows its top-k entropies only leaves the steps before and after a graft to
        be scored here, at the temperature they were sampled at. Trees without such a step come back
        as they are, at no cost.
        """
        wanted = [
            {
                step.id
                for path in tree.trajectories()
                for pair in graft_neighbours(path.steps)
                for step in pair
                if step.entropy_kind is not EntropyKind.EXACT
            }
            for tree in trees
        ]
        done = list(trees)
        chosen = [n for n, names in enumerate(wanted) if names]
        for indices, batch in self._batches(trees, chosen, takes_lessons=False):
            packed = torch.zeros(batch.num_tokens)
            packed[batch.sampled.cpu()] = self.scores(batch)[1].float().cpu()
            values = packed.tolist()
            # By step, not by tree: a tree that is split comes in several packs.
            for n, offsets in zip(indices, batch.step_offsets, strict=True):
                steps = []
                for step in done[n].steps:
                    if step.id in wanted[n] & offsets.keys():
                        start = offsets[step.id]
                        exact = tuple(values[start : start + len(step.token_ids)])
                        step = replace(step, entropies=exact, entropy_kind=EntropyKind.EXACT)
                    steps.append(step)
                done[n] = replace(done[n], steps=tuple(steps))
        return done

    def _batches(
        self, trees: Sequence[Tree], indices: Sequence[int], *, takes_lessons: bool
    ) -> list[tuple[tuple[int, ...], TreeBatch]]:
        """The batches that go through the model, and the tree that each part of one is of; trees
        that are too large are split."""
        limit = self.settings.max_pack_tokens
        parts = []
        for n in indices:
            parts += [(n, part) for part in split_tree(trees[n], limit, with_lessons=takes_lessons)]
        sizes = [
            num_tree_tokens(part) + (num_lesson_tokens(part) if takes_lessons else 0)
            for _, part in parts
        ]
        batches = []
        for group in plan_packs(sizes, limit):
            owners, chosen = zip(*(parts[n] for n in group), strict=True)
            batch = pack_trees(chosen, device=self.device, takes_lessons=takes_lessons)
            batches.append((owners, batch))
        return batches

    def _scores_of(
        self, model: Any, head: Head, batch: TreeBatch, *, takes_lessons: bool = False
    ) -> Scores:
        targets, temperatures = batch.sampled, batch.temperatures
        if takes_lessons and batch.lessons is not None:
            targets = torch.cat([targets, batch.lessons.packed])
            temperatures = torch.cat([temperatures, batch.lessons.temperatures])
        hidden = self._hidden(model, batch)[: targets.numel()]
        return chunked_scores(
            head, hidden, batch.token_ids[targets], temperatures, self.settings.vocab_chunk
        )

    def _hidden(self, model: Any, batch: TreeBatch) -> Tensor:
        if self.packing_problem is not None:
            return rowwise_hidden(model, batch)
        return packed_hidden(model, batch, compile_kernels=self.settings.compile_kernels)

    def keep_reference(self) -> Reference:
        """Freezes the present weights as the reference of the KL term."""
        self._reference = Reference(self.model)
        return self._reference

    # ------------------------------------------------------------------ one update

    def learn(self, trees: Sequence[Tree]) -> tuple[list[Tree], dict[str, float]]:
        """Returns the trees with old log-probabilities and ratios filled in, and the update's
        metrics.

        Groups without variance are left out of the passes (unless the KL term needs them) and
        counted in the denominators.
        """
        minibatches = split_evenly(len(trees), self.settings.num_minibatches)
        passes = [part for _ in range(self.settings.num_epochs) for part in minibatches if part]
        # Every other minibatch is scored before the first optimiser step, by the weights that its
        # ratios are against. The first step's own pass is still by those, so it needs none.
        scores_old = self._loss.old_logprobs == "learner"
        packs = {
            part: [
                self._scored(pack, scores_old and part != passes[0])
                for pack in self._packs(trees, part)
            ]
            for part in dict.fromkeys(passes)
        }
        tally = Tally()
        written: dict[int, dict[str, Step]] = {}
        for part in passes:
            packs[part] = self._optimiser_step(trees, part, packs[part], tally, written)
        batches = [pack.batch for group in packs.values() for pack in group]
        is_learned = [self._is_learned(tree) for tree in trees]
        # A minibatch of skipped groups alone moves no weight.
        metrics = tally.metrics(sum(any(is_learned[n] for n in part) for part in passes))
        metrics |= size_metrics(batches, takes_lessons=self._loss.graft_coef > 0)
        metrics["learn/skipped_groups_frac"] = is_learned.count(False) / max(1, len(trees))
        return [
            self._recorded(tree, written.get(n, {})) if is_learned[n] else tree
            for n, tree in enumerate(trees)
        ], metrics

    def _recorded(self, tree: Tree, written: Mapping[str, Step]) -> Tree:
        """The tree with its old log-probabilities and ratios, and with the shaping factor that each
        trajectory was learned with."""
        weight = self._loss.shaping_weight
        leaves = []
        for leaf in tree.leaves:
            factor = shaping_factor(leaf.retrieved_frac, weight) if leaf.has_loss else None
            leaves.append(replace(leaf, shaping_factor=factor))
        steps = tuple(written.get(step.id, step) for step in tree.steps)
        return replace(tree, steps=steps, leaves=tuple(leaves))

    def _is_learned(self, tree: Tree) -> bool:
        has_signal = any(
            credit(step, path.leaf) != 0.0
            for path in tree.trajectories()
            if path.leaf.has_loss
            for step in path.steps
            if any(step.loss_mask)
        )
        if has_signal or (self._loss.graft_coef > 0 and num_lesson_tokens(tree) > 0):
            return True
        # Without an advantage, the KL term alone still pulls to the reference.
        return self._reference is not None and any(leaf.has_loss for leaf in tree.leaves)

    def _packs(self, trees: Sequence[Tree], part: Sequence[int]) -> list[_Pack]:
        kept = [index for index in part if self._is_learned(trees[index])]
        batches = self._batches(trees, kept, takes_lessons=self._loss.graft_coef > 0)
        by_engine = self._loss.old_logprobs == "engine"
        return [
            _Pack(indices, batch, batch.sampling_logprobs if by_engine else None, None)
            for indices, batch in batches
        ]

    @torch.no_grad()
    def _scored(self, pack: _Pack, needs_old: bool) -> _Pack:
        old = self.scores(pack.batch)[0] if needs_old else pack.old_logprobs
        ref = None
        if self._reference is not None:
            ref = self._scores_of(self._reference.model, self._reference.head, pack.batch)[0]
        return replace(pack, old_logprobs=old, ref_logprobs=ref)

    def _optimiser_step(
        self,
        trees: Sequence[Tree],
        part: Sequence[int],
        packs: Sequence[_Pack],
        tally: Tally,
        written: dict[int, dict[str, Step]],
    ) -> list[_Pack]:
        """Returns the packs with their old log-probabilities, for steps of later epochs."""
        # Of all packs of the step at once: each pack's loss is then a share of one sum, so neither
        # the split into packs nor their order changes the sum of the gradients.
        denominators = self._denominators([trees[index] for index in part])
        done = []
        for pack in packs:
            logprobs, entropies, lessons = self.scores_with_lessons(pack.batch)
            # Detached from this very pass, the ratio is exactly 1 and keeps its gradient.
            old = logprobs.detach() if pack.old_logprobs is None else pack.old_logprobs
            factors = self._factors(pack.batch, denominators)
            loss = self._pack_loss(pack, logprobs, entropies, old, factors, tally)
            if pack.batch.lessons is not None:
                loss = loss + self._lesson_loss(pack.batch, lessons, factors, tally)
            tally.loss += float(loss.detach())
            # Backward for each pack, so that only one pack's activations are alive.
            torch.autograd.backward(loss)
            # The last epoch's ratios stay in the record, the old log-probabilities never change.
            write_back(pack, trees, old, logprobs.detach(), written)
            done.append(replace(pack, old_logprobs=old))
        tally.grad_norms.append(self.optimiser.step())
        tally.lrs.append(self.optimiser.last_lr)
        return done

    def _denominators(self, trees: Iterable[Tree]) -> Denominators:
        """Over whole trees, the groups that no pack holds included: leaving out a group without
        variance must not make the others weigh more."""
        groups, tokens = 0, 0.0
        for tree in trees:
            groups += any(LEARNING_RULES[leaf.status].in_denominator for leaf in tree.leaves)
            # A truncated path counts also where it carries no loss: without it, answers cut short
            # would raise the weight of those that remain.
            tokens += sum(
                path.leaf.weight * sum(sum(step.loss_mask) for step in path.steps)
                for path in tree.trajectories()
                if LEARNING_RULES[path.status].in_denominator
            )
        return Denominators(groups, tokens, self._length_constant)

    def _factors(self, batch: TreeBatch, denominators: Denominators) -> Tensor:
        """[N] the factor of every contribution of each trajectory."""
        # The pack holds the whole of |y|: also the parts of a split tree consist of whole paths.
        owners = batch.trajectories[batch.carries_loss]
        lengths = torch.bincount(owners, minlength=len(batch.paths)).to(torch.float64)
        weights = torch.tensor(
            [path.leaf.weight for path in batch.paths], dtype=torch.float64, device=owners.device
        )
        return contribution_weights(weights, lengths, denominators, self._loss.aggregation).float()

    def _pack_loss(
        self,
        pack: _Pack,
        logprobs: Tensor,
        entropies: Tensor,
        old: Tensor,
        factors: Tensor,
        tally: Tally,
    ) -> Tensor:
        """Σ over contributions of factor · l, the pack's share of the optimiser step's loss on
        sampled tokens."""
        batch, settings = pack.batch, self._loss
        rows = batch.carries_loss.nonzero()[:, 0]
        tokens, owners = batch.tokens[rows], batch.trajectories[rows]
        weight = settings.shaping_weight
        shaping = [shaping_factor(path.leaf.retrieved_frac, weight) for path in batch.paths]
        # Not logprobs[tokens]: where rows repeat, its backward pass adds them up in an order that
        # two threads do not repeat.
        new = logprobs.index_select(0, tokens)
        terms = surrogate(
            settings,
            new,
            old.index_select(0, tokens),
            batch.advantages[rows],
            owners=owners,
            shaping=torch.tensor(shaping, dtype=torch.float32, device=rows.device)[owners],
        )
        losses = terms.losses
        # Engine and learner differ at equal weights too, in bfloat16 by some per cent a token.
        if settings.engine_ratio_cap is not None:
            sampled_at = batch.sampling_logprobs.index_select(0, tokens)
            by_path = settings.engine_ratio == "sequence"
            weights, is_capped = engine_correction(
                old.index_select(0, tokens),
                sampled_at,
                settings.engine_ratio_cap,
                torch.bincount(owners, minlength=len(batch.paths)) if by_path else None,
            )
            losses = losses * weights
            tally.add("learn/engine_capped_frac", is_capped.float())
        if pack.ref_logprobs is not None:
            divergence = k3_divergence(new, pack.ref_logprobs.index_select(0, tokens))
            losses = losses + settings.kl_coef * divergence
            tally.add("learn/kl", divergence.detach())
        signs = batch.advantages[rows]
        # Of the contributions that push at all: those of 0 would make any share look small.
        if (signs != 0).any():
            tally.add("learn/positive_frac", (signs[signs != 0] > 0).float())
        tally.add("learn/clip_frac", terms.is_clipped.float())
        tally.add("learn/entropy", entropies.detach().index_select(0, tokens))
        log_ratios = torch.log(terms.ratios)
        tally.add("learn/approx_kl", terms.ratios - 1.0 - log_ratios)
        if terms.ratios.numel():
            tally.ratio_max = max(tally.ratio_max, float(terms.ratios.max()))
        # Over unique tokens, each once: it compares two implementations, not trajectories. Where
        # the engine's own are the old ones, the learner's are those of the first step alone, whose
        # weights still are the engine's.
        if settings.old_logprobs == "learner":
            tally.add("learn/engine_gap", (old - batch.sampling_logprobs).abs())
        elif not tally.grad_norms:
            tally.add("learn/engine_gap", (logprobs.detach() - batch.sampling_logprobs).abs())
        return (factors[owners] * losses).sum()

    def _lesson_loss(
        self, batch: TreeBatch, logprobs: Tensor, factors: Tensor, tally: Tally
    ) -> Tensor:
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

    # ------------------------------------------------------------------ weights

    def weights(self) -> ModelWeights:
        """Returns the plain model's weights, adapters merged into them, detached."""
        return ModelWeights(plain_weights(self.model))

    def state(self) -> dict[str, Tensor]:
        """Returns everything that training needs to go on: master weights, optimiser moments,
        counters."""
        return self.optimiser.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores `state()`.

        Raises:
            CheckpointError: the state belongs to another model.
        """
        try:
            self.optimiser.load_state(state)
        except KeyError as error:
            raise CheckpointError(f"the optimiser state does not fit the model: {error}") from error


def _check_head(model: nn.Module) -> None:
    # With our attention in place the model cannot be run plainly, and has been checked before.
    is_checked = base_model(model).config._attn_implementation == ATTENTION
    if not is_checked and (problem := head_problem(model)):
        raise ModelError(
            f"learner: this model cannot be trained here: {problem}; its head has a tail that is"
            " not known yet"
        )


def write_back(
    pack: _Pack,
    trees: Sequence[Tree],
    old: Tensor,
    new: Tensor,
    written: dict[int, dict[str, Step]],
) -> None:
    """Fills old log-probabilities and ratios into the pack's steps, for the record."""
    # Tokens that were not sampled: log-probability 0, ratio 1.
    packed_old = torch.zeros(pack.batch.num_tokens)
    packed_ratio = torch.ones(pack.batch.num_tokens)
    sampled = pack.batch.sampled.cpu()
    packed_old[sampled] = old.detach().float().cpu()
    packed_ratio[sampled] = torch.exp((new - old).float()).cpu()
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
