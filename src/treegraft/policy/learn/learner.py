"""The learner: optimiser steps on packed trees, exact per trajectory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treegraft.algo.loss import ImitatedBatch, LossBatch, PassScores, loss_terms, total_loss
from treegraft.algo.losses import Denominators, contribution_weights
from treegraft.algo.rapo import inexact_neighbours, inexact_steps, shaping_factor
from treegraft.core.errors import CheckpointError, SettingError
from treegraft.core.interfaces import WeightSource
from treegraft.core.team import Alone, Team
from treegraft.core.types import EntropyKind, Step, Tree
from treegraft.policy.attention_hook import install_attention
from treegraft.policy.checkpoint import optimiser_file, optimiser_files, write_model
from treegraft.policy.deal import deal
from treegraft.policy.learn.imitation import imitation_packs
from treegraft.policy.learn.lessons import lessons_loss, shared_out, weight_of
from treegraft.policy.learn.metrics import MetricSums
from treegraft.policy.learn.objective import find_form
from treegraft.policy.learn.optimiser import MasterAdamW
from treegraft.policy.learn.pack import (
    TreeBatch,
    blank_batch,
    newest_of_several,
    num_imitated_tokens,
    num_tree_tokens,
    pack_trees,
    without_branches,
)
from treegraft.policy.learn.plan import (
    Pack,
    Part,
    Plan,
    by_step,
    combined,
    exchanged,
    gathered,
    plan_passes,
    split_evenly,
    spread,
    with_steps,
)
from treegraft.policy.learn.reference import Reference
from treegraft.policy.learn.scores import Scores, ScoringModel, check_head, packing_problem
from treegraft.policy.output_head import base_model
from treegraft.policy.shards import write_rows
from treegraft.policy.weights import ModelWeights, named_weights, plain_weights
from treegraft.settings.policy import LearnSettings, LossSettings


@dataclass(frozen=True, slots=True)
class _Pack:
    """Trees of one forward and backward pass with their scores."""

    parts: Pack
    """Empty where other ranks make a pass and this one has none left."""
    batch: TreeBatch
    old_logprobs: Tensor | None = None
    """[U] by the weights before the first optimiser step."""
    ref_logprobs: Tensor | None = None
    """[U] by the reference."""
    new_logprobs: Tensor | None = None
    """[U] of its last pass."""


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
        team: Team | None = None,
    ) -> None:
        """Takes over `model`, which must not be trained elsewhere.

        Args:
            length_constant: divisor of "sequence-sum" in tokens, used where loss.length_constant is
                None.
            num_updates: those of the whole run, for a schedule of the learning rate.
            team: the processes that learn together, each of which makes the same calls with the
                same trees; None for this one alone.

        Raises:
            ModelError: its logits cannot be had from hidden states and output embeddings.
            SettingError: grafts are to be imitated by a model whose trees cannot be packed.
        """
        self.model = model
        self.settings = learn
        self._loss = loss
        self._form = find_form(loss)
        self._length_constant = float(loss.length_constant or length_constant)
        check_head(model)
        self.packing_problem = packing_problem(model)
        """Why trees are run row by row; None where they are packed."""
        # For good, not for each pass: gradient checkpointing runs the layers once more backward.
        if is_packed := self.packing_problem is None:
            install_attention(model)
        elif loss.graft_coef:
            raise SettingError(
                f"loss.graft_coef: got {loss.graft_coef:g}, expected 0 for a model whose trees are"
                f" run row by row, since {self.packing_problem}.",
                code="grafts-not-packed",
            )
        self._team = team or Alone()
        self._scoring = self._placed(ScoringModel(model, is_packed=is_packed))
        self.optimiser = MasterAdamW(
            model, learn, num_planned=num_updates * learn.num_epochs * learn.num_minibatches
        )
        self.reference: Reference | None = None
        """Of the KL term; None without one."""

    def _placed(self, scoring: ScoringModel) -> ScoringModel:
        """The module through which all passes run, where its weights are to lie."""
        return scoring

    @property
    def device(self) -> torch.device:
        return torch.device(base_model(self.model).device)

    # ------------------------------------------------------------------ scores

    def scores(self, batch: TreeBatch) -> Scores:
        """Returns (logprobs, entropies) of the unique sampled tokens, with gradients where they are
        enabled."""
        found: Scores = self._scoring(batch)
        return found

    def scores_with_imitated(self, batch: TreeBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (logprobs [U], entropies [U], log-probabilities [L] of the imitated tokens) of
        one pass, as `scores`."""
        logprobs, entropies = self._scoring(batch, takes_imitated=True)
        count = batch.sampled.numel()
        return logprobs[:count], entropies[:count], logprobs[count:]

    @torch.no_grad()
    def with_exact_entropies(
        self, trees: Sequence[Tree], *, everywhere: bool = False
    ) -> list[Tree]:
        """Returns the trees with exact entropies around grafts, for the retrieval reward.

        An engine that knows its top-k entropies only leaves the steps before and after a graft to
        be scored here, at the temperature they were sampled at. Trees without such a step come back
        as they are, at no cost.

        Args:
            everywhere: where any step is scored, so are all of all trees: a comparison of tokens by
                entropy, as in `algo.aepo`, needs them of one kind.
        """
        wanted = list(map(inexact_neighbours, trees))
        if everywhere and any(wanted):
            wanted = list(map(inexact_steps, trees))
        indices = [n for n, names in enumerate(wanted) if names]
        exact = []
        for n, step, values in self._scored_steps(trees, indices, entropies=True):
            # A tree is scored whole; the engine's own exact entropies stay.
            if step.id in wanted[n]:
                column = spread(step, values, 0.0)
                exact.append((n, replace(step, entropies=column, entropy_kind=EntropyKind.EXACT)))
        return exchanged(trees, exact)

    @torch.no_grad()
    def with_logprobs(self, trees: Sequence[Tree]) -> list[Tree]:
        """Returns the trees with the log-probabilities of their sampled tokens under the present
        weights as `Step.old_logprobs`."""
        steps = []
        for n, step, values in self._scored_steps(trees, range(len(trees)), entropies=False):
            steps.append((n, replace(step, old_logprobs=spread(step, values, 0.0))))
        return exchanged(trees, steps)

    def _scored_steps(
        self, trees: Sequence[Tree], indices: Sequence[int], *, entropies: bool
    ) -> Iterator[tuple[int, Step, list[float]]]:
        """The policy's steps of some trees with their index, and what all ranks found for them."""
        plan = self._plan(trees, indices)
        columns = []
        for pack, batch in self._batches(plan):
            found = self.scores(batch)[int(entropies)]
            # A blank batch is scored with the other ranks, and counts for nothing.
            if pack:
                columns.append(found)
        # By step, not by tree: a tree that is split comes in several packs.
        return by_step(plan, gathered(self._team, plan, columns))

    def _plan(
        self, trees: Sequence[Tree], indices: Sequence[int], *, takes_imitated: bool = False
    ) -> Plan:
        limit = self.settings.max_pack_tokens
        num_ranks = self._team.size
        return plan_passes(trees, indices, limit, num_ranks, takes_imitated=takes_imitated)

    def _batches(
        self, plan: Plan, *, takes_imitated: bool = False
    ) -> Iterator[tuple[Pack, TreeBatch]]:
        """The passes of this process; an empty pack has a batch all the same."""
        for pack in plan.own(self._team.rank):
            if pack:
                trees = [part.tree for part in pack]
                yield pack, pack_trees(trees, device=self.device, takes_imitated=takes_imitated)
            else:
                yield pack, blank_batch(self.device)

    # ------------------------------------------------------------------ demonstrations

    def imitate(self, trees: Sequence[Tree], lr: float, weight_decay: float | None = None) -> float:
        """Returns the mean loss per token, after one optimiser step on demonstrations; without a
        weight decay, with that of [learn]. NaN: the gradient was not finite, and the step was
        skipped."""
        # Over all packs: the loss is a mean over tokens, however they are packed.
        count = sum(step.num_loss_tokens for tree in trees for step in tree.steps)

        def loss_of(batch: TreeBatch, logprobs: Tensor) -> Tensor:
            chosen = logprobs.index_select(0, batch.tokens[batch.carries_loss])
            return -chosen.sum() / max(1, count)

        total = self._imitate(trees, loss_of)
        norm = self.optimiser.step(lr, weight_decay)
        mean = float(combined(self._team, total, sum))
        return mean if math.isfinite(norm) else math.nan

    def _imitate(
        self, trees: Sequence[Tree], loss_of: Callable[[TreeBatch, Tensor], Tensor]
    ) -> float:
        """Adds the gradient of trees that are no rollouts, each packed whole, and returns the loss
        of this process's passes."""
        whole = []
        sizes = []
        for pack in imitation_packs(trees, self.settings.max_pack_tokens):
            whole.append(tuple(Part(0, tree) for tree in pack))
            sizes.append(sum(map(num_tree_tokens, pack)))
        total = 0.0
        for _, batch in self._batches(Plan(tuple(whole), deal(sizes, self._team.size))):
            loss = loss_of(batch, self.scores(batch)[0])
            torch.autograd.backward(loss)
            total += float(loss.detach())
        return total

    def _teach(self, lessons: Sequence[Tree], sums: MetricSums) -> None:
        """Adds the gradient of an optimiser step's lessons."""

        def loss_of(batch: TreeBatch, logprobs: Tensor) -> Tensor:
            return lessons_loss(batch, logprobs, self._loss.lesson_coef, len(lessons))

        if weighty := [lesson for lesson in lessons if weight_of(lesson)]:
            sums.loss += self._imitate(weighty, loss_of)

    # ------------------------------------------------------------------ one update

    def learn(
        self, trees: Sequence[Tree], lessons: Sequence[Tree] = (), spent: float = 0.0
    ) -> tuple[list[Tree], dict[str, float]]:
        """Returns the trees with old log-probabilities and ratios filled in, and the update's
        metrics.

        Groups without variance are left out of the passes (unless the KL term or an entropy bonus
        needs them) and counted in the denominators. `lessons` are of a `LessonBook`, spread over
        the mini-batches; `spent` as in `LearnerLike.learn`.
        """
        self.optimiser.spent = spent
        minibatches = split_evenly(len(trees), self.settings.num_minibatches)
        passes = [part for part in minibatches if part] * self.settings.num_epochs
        taught = shared_out(lessons, minibatches)
        takes_imitated = self._loss.graft_coef > 0
        is_learned = list(map(self._is_learned, trees))
        shown = list(map(without_branches, trees))
        learned = {}
        plans = {}
        packs = {}
        for part in dict.fromkeys(passes):
            learned[part] = [n for n in part if is_learned[n]]
            plans[part] = self._plan(shown, learned[part], takes_imitated=takes_imitated)
            # Every other minibatch is scored before the first optimiser step, by the weights that
            # its ratios are against. The first step's own pass is still by those, so it needs none.
            packs[part] = self._scored_packs(plans[part], needs_old=part != passes[0])
        sums = MetricSums(newest_of_several(trees))
        for part in passes:
            # Gradients add up until the step.
            self._teach(taught[part], sums)
            denominators = self._denominators(trees[n] for n in part)
            packs[part] = self._optimiser_step(packs[part], denominators, sums)
        # The schedule counts those that had no tree too, as its plan does.
        self.optimiser.num_steps += self.settings.num_epochs * len(minibatches) - len(passes)
        for own in packs.values():
            for pack in own:
                if pack.parts:
                    sums.add_sizes(pack.batch)
        sums = combined(self._team, sums.state(), MetricSums.of)
        # A minibatch of skipped groups alone moves no weight.
        num_steps = 0
        for part in passes:
            num_steps += any(map(weight_of, taught[part])) or bool(learned[part])
        metrics = sums.metrics(num_steps, takes_imitated=takes_imitated)
        metrics["learn/skipped_groups_frac"] = is_learned.count(False) / max(1, len(trees))
        written: dict[int, dict[str, Step]] = {}
        for part, plan in plans.items():
            self._write_back(plan, packs[part], written)
        recorded = list(trees)
        for n, tree in enumerate(trees):
            if is_learned[n]:
                recorded[n] = self._recorded(tree, written.get(n, {}))
        return recorded, metrics

    def _write_back(
        self, plan: Plan, packs: Sequence[_Pack], written: dict[int, dict[str, Step]]
    ) -> None:
        """Fills old log-probabilities and the last epoch's ratios into the steps of a plan."""
        own_olds = []
        own_news = []
        for pack in packs:
            if pack.parts:
                assert pack.old_logprobs is not None and pack.new_logprobs is not None
                own_olds.append(pack.old_logprobs)
                own_news.append(pack.new_logprobs)
        olds = gathered(self._team, plan, own_olds)
        news = gathered(self._team, plan, own_news)
        # In float32, as the loss forms them.
        ratios = [torch.exp(new - old) for old, new in zip(olds, news, strict=True)]
        for (n, step, old), (_, _, ratio) in zip(
            by_step(plan, olds), by_step(plan, ratios), strict=True
        ):
            # Tokens that were not sampled: log-probability 0, ratio 1.
            written.setdefault(n, {})[step.id] = replace(
                step, old_logprobs=spread(step, old, 0.0), ratios=spread(step, ratio, 1.0)
            )

    def _recorded(self, tree: Tree, written: Mapping[str, Step]) -> Tree:
        """The tree with its old log-probabilities and ratios, and with the shaping factor that each
        trajectory was learned with."""
        leaves = []
        for leaf in tree.leaves:
            known = shaping_factor(leaf.retrieved_frac, self._loss.shaping_weight)
            leaves.append(replace(leaf, shaping_factor=known if leaf.has_loss else None))
        return replace(with_steps(tree, written), leaves=tuple(leaves))

    def _is_learned(self, tree: Tree) -> bool:
        for path in tree.trajectories():
            for step in path.steps if path.leaf.has_loss else ():
                if step.loss_mask.any() and step.advantage_below(path.leaf) != 0.0:
                    return True
        if self._loss.graft_coef > 0 and num_imitated_tokens(tree) > 0:
            return True
        # Without an advantage, the KL term still pulls to the reference, the bonus to entropy.
        has_more = bool(self.reference or self._loss.entropy_coef)
        return has_more and any(leaf.has_loss for leaf in tree.leaves)

    @torch.no_grad()
    def _scored_packs(self, plan: Plan, *, needs_old: bool) -> list[_Pack]:
        packs = []
        for parts, batch in self._batches(plan, takes_imitated=self._loss.graft_coef > 0):
            old = None
            if self._loss.old_logprobs != "learner":
                old = batch.sampling_logprobs
            elif needs_old:
                old = self.scores(batch)[0]
            packs.append(_Pack(parts, batch, old))
        if self.reference is None:
            return packs
        # Once for all packs: putting the reference in place copies every weight.
        with self.reference.in_place():
            return [replace(pack, ref_logprobs=self.scores(pack.batch)[0]) for pack in packs]

    def _optimiser_step(
        self, packs: Sequence[_Pack], denominators: Denominators, sums: MetricSums
    ) -> list[_Pack]:
        """Returns the packs with their old and new log-probabilities.

        Args:
            denominators: of all packs of the step at once: each pack's loss is then a share of one
                sum, so neither the split into packs nor their order changes the sum of the
                gradients.
        """
        done = []
        for pack in packs:
            logprobs, entropies, imitated = self.scores_with_imitated(pack.batch)
            # Detached from this very pass, the ratio is exactly 1 and keeps its gradient.
            old = logprobs.detach() if pack.old_logprobs is None else pack.old_logprobs
            if pack.parts:
                scores = PassScores(
                    logprobs=logprobs,
                    entropies=entropies,
                    old_logprobs=old,
                    imitated_logprobs=imitated,
                    ref_logprobs=pack.ref_logprobs,
                )
                loss = self._pack_loss(pack.batch, scores, denominators, sums)
                sums.loss += float(loss.detach())
            else:
                loss = logprobs.sum() * 0.0
            # Backward for each pack, so that only one pack's activations are alive.
            torch.autograd.backward(loss)
            done.append(replace(pack, old_logprobs=old, new_logprobs=logprobs.detach()))
        sums.add_step(self.optimiser.step(), self.optimiser.last_lr)
        return done

    def _denominators(self, trees: Iterable[Tree]) -> Denominators:
        """Over whole trees, the groups in no pack included: leaving out a group without
        variance must not make the others weigh more."""
        groups = 0
        tokens = 0.0
        for tree in trees:
            own = 0.0
            # A truncated path counts also if it carries no loss: without it, answers cut short
            # would raise the weight of those that remain.
            counted = [path for path in tree.trajectories() if path.status.rule.in_denominator]
            for path in counted:
                own += path.leaf.weight * path.num_loss_tokens
            groups += bool(counted)
            tokens += own
        return Denominators(groups, tokens, self._length_constant)

    def _pack_loss(
        self, batch: TreeBatch, scores: PassScores, denominators: Denominators, sums: MetricSums
    ) -> Tensor:
        """The pack's share of the optimiser step's loss, with its gradient."""
        own = self._loss_batch(batch, denominators)
        terms = loss_terms(own, scores, self._form)
        sums.add_terms(terms)
        # Over unique tokens, each once: it compares two implementations, not trajectories. Where
        # the engine's own are the old ones, the learner's are those of the first step that has
        # gradients: its weights still are the engine's.
        is_learners = self._loss.old_logprobs == "learner"
        if is_learners or not any(sums.grad_norms):
            known = scores.old_logprobs if is_learners else scores.logprobs.detach()
            sums.add("learn/engine_gap", batch.engine_gaps(known, sums.newest))
        return total_loss(terms, own, self._form)

    def _loss_batch(self, batch: TreeBatch, denominators: Denominators) -> LossBatch:
        """What the loss reads of a pack, on its device."""
        weights = batch.lengths.new_tensor([path.leaf.weight for path in batch.paths])
        factors = contribution_weights(weights, batch.lengths, denominators, self._loss.aggregation)
        rows = batch.carries_loss.nonzero()[:, 0]
        tokens = batch.tokens[rows]
        owners = batch.trajectories[rows]
        shaping = []
        for path in batch.paths:
            shaping.append(shaping_factor(path.leaf.retrieved_frac, self._loss.shaping_weight))
        return LossBatch(
            tokens=tokens,
            owners=owners,
            advantages=batch.advantages[rows],
            shaping=torch.tensor(shaping, dtype=torch.float32, device=rows.device)[owners],
            positions=batch.position_ids[batch.sampled[tokens]],
            sampling_logprobs=batch.sampling_logprobs,
            factors=factors.float(),
            imitated=_imitated(batch),
        )

    # ------------------------------------------------------------------ weights

    def weights(self) -> WeightSource:
        """Returns the plain model's weights, adapters merged into them, detached."""
        return ModelWeights(plain_weights(self.model))

    def keep_reference(self, folder: Path | None = None, *, is_new: bool = True) -> None:
        """Freezes the reference of the KL term: the present weights, which are written to the
        folder if there is one, or for a resumed run those in the folder.

        Raises:
            CheckpointError: they are not in the folder.
        """
        self.reference = Reference(self.model)
        if folder is None:
            return
        is_first = self._team.rank == 0
        if is_new and is_first:
            Reference.clear(folder)
        # No rank may write before rank 0 has deleted what an earlier run left.
        self._meet()
        if is_new:
            self.reference.save(folder, self._suffix, is_first=is_first)
        else:
            self.reference.load(folder)
        self._meet()

    @property
    def _suffix(self) -> str:
        """The end of the names of this rank's files."""
        size = self._team.size
        return "" if size == 1 else f"-{self._team.rank + 1:05d}-of-{size:05d}"

    def _meet(self) -> None:
        """Waits until every rank is here."""
        self._team.gather(torch.zeros(0, dtype=torch.float32))

    def forget_moments(self) -> None:
        """Resets the optimiser, as between warm-up and training."""
        self.optimiser.reset()

    def save(self, folder: Path) -> None:
        """Writes the plain model, adapters merged into it, and the optimiser's state into the
        folder of a checkpoint; of several ranks each its rows."""
        self._write_model(folder)
        path = optimiser_file(folder, self._suffix)
        write_rows(path, self.optimiser.state(), is_first=self._team.rank == 0)
        self._meet()

    def _write_model(self, folder: Path) -> None:
        write_model(folder, self.model, named_weights(self.model))

    def load(self, folder: Path) -> None:
        """Goes on from the trained weights and the optimiser's state in a checkpoint, whatever
        number of ranks wrote it.

        Raises:
            CheckpointError: it is damaged, or belongs to another model, or this model was loaded
                from it and has adapters or a reference: these need the model that its run began
                with.
        """
        inner = base_model(self.model)
        origin = inner.config.name_or_path
        is_own = bool(origin) and Path(origin).resolve() == Path(folder).resolve()
        if is_own and (inner is not self.model or self.reference is not None):
            raise CheckpointError(
                f"checkpoint '{folder}': got a model that was loaded from it, expected the one that"
                " its run began with: adapters would be added twice, and the KL term would have"
                " another reference. Name that model in model.path, then load and publish.",
                code="loaded-onto-itself",
            )
        try:
            self.optimiser.load(optimiser_files(folder))
        except KeyError as error:
            raise CheckpointError(
                f"checkpoint '{folder}': the optimiser's state lacks {error}; expected that of this"
                " model, in the files of all ranks that wrote it. Take another checkpoint.",
                code="optimiser-mismatch",
            ) from error


def _imitated(batch: TreeBatch) -> ImitatedBatch | None:
    """What the loss reads of the imitated tokens of a pack."""
    if batch.imitated is None:
        return None
    owners = batch.imitated.trajectories
    advantages = [path.leaf.advantage or 0.0 for path in batch.paths]
    column = torch.tensor(advantages, dtype=torch.float32, device=owners.device)
    return ImitatedBatch(tokens=batch.imitated.tokens, owners=owners, advantages=column[owners])
