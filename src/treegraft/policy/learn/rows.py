"""Trees as rows, one for each trajectory or context of its own, for the loss of any trainer.
Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treegraft.algo.rapo import shaping_factor
from treegraft.core.errors import SettingError
from treegraft.core.types import LEARNING_RULES, Origin, Row, Tree
from treegraft.settings.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRow:
    """One trajectory as a row, or a part of one: where contexts were written anew, each context is
    a row, and all rows of the trajectory have its weight, its reward and its |y|. T is the number
    of tokens after the prompt; every list [T] has one entry for each of them.

    A search, its result and an answer (s sampled, t tool):

        completion_ids   s     s     t     t     s
        loss_mask        True  True  False False True
        advantages       0.7   0.7   0.0   0.0   0.9
    """

    prompt_ids: list[int]
    """The root's tokens, or the part of the context that an earlier row has too."""
    completion_ids: list[int]
    """[T] what engine and tools wrote, never tokenised again; may be empty."""
    loss_mask: list[bool]
    """[T] True where the token carries loss; False for tools, grafts and forced text."""
    advantages: list[float]
    """[T] `Trajectory.token_advantages`; 0.0 where the policy did not sample."""
    sampling_logprobs: list[float]
    """[T] natural logarithms, of the engine; 0.0 where the policy did not sample."""
    temperatures: list[float]
    """[T] T of softmax(logits / T), 1.0 where a token was greedy."""
    origins: list[Origin]
    """[T] who wrote the token."""
    shaping: float
    """RAPO's 1 + m F (eq. 8), by which ratios are multiplied before clipping: not its logarithm. 1
    without grafts. A trainer that knows ratios alone subtracts log(shaping) from the old
    log-probabilities."""
    weight: float
    """w_i, 0..1; those of a group sum to 1."""
    num_denominator: int
    """|y_i| in tokens, for denominators: also of a truncated path whose loss mask is empty because
    the recipe says so."""
    reward: float | None
    is_correct: bool | None
    """None without a reference."""
    group_id: str
    """Of its tree: rows that are compared with each other."""
    leaf_id: str
    """Its last step within the tree, as "0.1.0"."""
    policy_version: int
    """The newest that sampled one of its steps; 0 where none was sampled."""


def leaf_rows(trees: Sequence[Tree], config: Config) -> list[LeafRow]:
    """Returns the rows of each leaf that counts in the loss, in the order of trees and leaves: one,
    or one for each context of its own. Failed leaves have none, and the others of their group share
    their weight.

    With ρ = π(y_t) / π_old(y_t), l(r, A) = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) and
    |G| the number of different `group_id`, the loss of an optimiser step over rows i is, with j
    over trajectories (rows of one `group_id` and `leaf_id` once),

        L = Σ_i c_i Σ_t loss_mask_it · l(shaping_i · ρ_it, advantages_it)

        token-mean      c_i = w_i / Σ_j w_j |y_j|
        sequence-mean   c_i = w_i / (|y_i| |G|)
        sequence-sum    c_i = w_i / (constant |G|)        constant: loss.length_constant, else
                                                          rollout.max_completion_tokens

    This is the loss of `Learner.learn` on the trees of that step, and its gradient (float32,
    relative: 1e-5). Terms per token, such as KL, are added to l. Sources: RAPO (arXiv 2603.03078,
    eq. 8 and 11); token-mean of DAPO (2503.14476), sequence-mean of GRPO (2402.03300, eq. 3),
    sequence-sum of Dr.GRPO (2503.20783).

    Args:
        trees: with credit, as `credit_trees` and `Session.credit` return them.
        config: for loss.shaping_weight.

    Raises:
        SettingError: loss.graft_coef is above 0 and there are grafts to imitate: rows hold only
            what the policy sampled.
    """
    coef = config.loss.graft_coef
    if coef and any(step.lesson_ids for tree in trees for step in tree.steps):
        raise SettingError(
            f"leaf_rows: loss.graft_coef is {coef:g} and these trees have grafts to imitate, which"
            " rows cannot say; expected 0. Set it to 0, or learn from the trees with"
            " Learner.learn.",
            code="grafts-in-rows",
        )
    rows = []
    for tree in trees:
        for path in tree.trajectories():
            if LEARNING_RULES[path.status].in_denominator:
                num_denominator = path.num_loss_tokens
                for row in path.rows():
                    how = (tree.group_id, config.loss.shaping_weight, num_denominator)
                    rows.append(_row(row, *how))
    return rows


def _row(row: Row, group_id: str, shaping_weight: float, num_denominator: int) -> LeafRow:
    path = row.path
    leaf = path.leaf
    # Other trainers have the prompt in a column of its own.
    num_shared = max(1, row.num_shared)
    steps = path.steps[num_shared:]
    start = sum(step.num_tokens for step in path.steps[:num_shared])
    return LeafRow(
        prompt_ids=path.token_ids[:start],
        completion_ids=path.token_ids[start:],
        loss_mask=path.loss_mask[start:],
        advantages=path.token_advantages[start:],
        sampling_logprobs=path.sampling_logprobs[start:],
        temperatures=[step.temperature or 1.0 for step in steps for _ in range(step.num_tokens)],
        origins=path.origins[start:],
        shaping=shaping_factor(leaf.retrieved_frac, shaping_weight),
        weight=leaf.weight,
        num_denominator=num_denominator,
        reward=leaf.reward,
        is_correct=leaf.is_correct,
        group_id=group_id,
        leaf_id=leaf.step_id,
        policy_version=max((s.policy_version for s in steps if s.num_sampled), default=0),
    )
