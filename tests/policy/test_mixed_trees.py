"""Branches and grafts together: the packed learner against an independent implementation, one
trajectory and token at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.families import build_model
from tests.support.slow_learner import WAYS, attend_by, distance, gradient_of, make_learner
from tests.support.trees import Part, build_tree, mixed_trees, text_of

from treegraft.algo.advantages import assign_credit
from treegraft.algo.loss import PassScores
from treegraft.core.types import EntropyKind, Origin, Status, Trajectory, Tree
from treegraft.policy.learn.metrics import MetricSums
from treegraft.policy.learn.pack import imitated_steps, pack_trees
from treegraft.policy.learn.scores import token_scores
from treegraft.runs.metrics import meaning
from treegraft.settings.policy import LossSettings

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # of torch: FlexAttention is not compiled here

CONSTANT = 7.0

RICH = Part.of(
    "pppp",
    Part.of(
        "sst",
        # A graft, the policy's step after it, another graft, and branches below that.
        Part.of(
            "rrr",
            Part.of(
                "sSt",
                Part.of(
                    "rr", Part("s", reward=1.0), Part("ss", reward=0.0, temperature=0.7), lesson=2
                ),
                Part("s", reward=0.5),
                Part.of("r", Part("", status=Status.FAILED), lesson=1),
            ),
            lesson=3,
        ),
        Part.of("st", Part("ss", reward=1.0), Part("s", reward=-1.0, status=Status.TRUNCATED)),
        # Nothing was left for the policy after this graft.
        Part("rr", reward=-1.0, status=Status.TRUNCATED, lesson=2),
    ),
    Part.of(
        "ss",
        Part.of("r", Part("sss", reward=1.0), lesson=2),
        Part("sf", reward=0.0, status=Status.FORMAT_VIOLATION),
    ),
    Part("sss", reward=1.0),
)
SMALL = Part.of(
    "pp",
    Part.of("st", Part.of("rr", Part("s", reward=1.0), lesson=2), Part("ss", reward=-1.0)),
    Part("s", reward=0.0),
)


# ---------------------------------------------------------------------- the plain way, written from


@dataclass
class Rules:
    """What the reference reads of a recipe."""

    loss: LossSettings
    attribution: str = "soft"


def logprobs_of(model: Any, ids: Sequence[int], temperatures: Sequence[float]) -> torch.Tensor:
    """log π of every token but the first, from a forward pass of the plain sequence."""
    logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, :-1].double()
    table = torch.log_softmax(
        logits / torch.tensor(temperatures[1:], dtype=torch.float64)[:, None], dim=-1
    )
    return table.gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0]


def group_z(values: Sequence[float]) -> list[float]:
    if len(values) < 2 or len(set(values)) == 1:
        return [0.0] * len(values)
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return [(v - mean) / (deviation + 1e-6) for v in values]


def plain_retrieval_reward(path: Trajectory) -> float:
    rewards = []
    for place, step in enumerate(path.steps):
        if not step.lesson_ids and Origin.RETRIEVED not in step.origins:
            continue
        sides = [
            [s for s in part if s.num_sampled]
            for part in (path.steps[:place], path.steps[place + 1 :])
        ]
        if not sides[0] or not sides[1]:
            continue
        means = []
        for chosen in (sides[0][-1], sides[1][0]):
            own = [
                h
                for h, o in zip(chosen.entropies.tolist(), chosen.origins, strict=True)
                if o == Origin.POLICY
            ]
            means.append(sum(own) / len(own))
        before, after = means
        rewards.append(math.tanh(2 * (before - after) / before) * before if before > 0 else 0.0)
    return sum(rewards) / len(rewards) if rewards else 0.0


def plain_loss(model: Any, trees: Sequence[Tree], rules: Rules, old: Any = None) -> torch.Tensor:
    """The objectives over uncredited trees; `old` gives the old log-probabilities, None takes the
    present ones."""
    loss = rules.loss
    total = torch.zeros((), dtype=torch.float64)
    live = [
        [path for path in tree.trajectories() if path.status is not Status.FAILED] for tree in trees
    ]
    num_groups = sum(bool(paths) for paths in live)
    num_weighted_tokens = sum(
        sum(step.num_loss_tokens for step in path.steps) / len(paths)
        for paths in live
        for path in paths
    )
    for paths in live:
        outcomes = group_z([float(path.reward or 0.0) for path in paths])
        helped = group_z([plain_retrieval_reward(path) for path in paths])
        advantages = [(1 + 0.2 * z) * a for a, z in zip(outcomes, helped, strict=True)]
        for path, advantage in zip(paths, advantages, strict=True):
            if path.status is Status.TRUNCATED and not loss.learn_from_truncated:
                continue
            length = sum(step.num_loss_tokens for step in path.steps)
            if not length:
                continue
            divisor = {
                "token-mean": num_weighted_tokens,
                "sequence-mean": length * num_groups,
                "sequence-sum": CONSTANT * num_groups,
            }[loss.aggregation]
            factor = 1 / len(paths) / divisor
            after_prompt = [origin for step in path.steps[1:] for origin in step.origins.tolist()]
            shaping = 1 + loss.shaping_weight * after_prompt.count(Origin.RETRIEVED) / len(
                after_prompt
            )
            temperatures = [step.temperature for step in path.steps for _ in step.token_ids]
            new = logprobs_of(model, path.token_ids, temperatures)
            with torch.no_grad():
                before = (
                    new.detach() if old is None else logprobs_of(old, path.token_ids, temperatures)
                )
            place = -1
            for step in path.steps:
                carried = advantage
                if rules.attribution == "hard":
                    sharers = [a for p, a in zip(paths, advantages, strict=True) if step in p.steps]
                    carried = sum(sharers) / len(sharers)
                for carries in step.loss_mask:
                    if carries:
                        ratio = shaping * torch.exp(new[place] - before[place])
                        bounded = torch.clamp(ratio, 1 - loss.clip_low, 1 + loss.clip_high)
                        total = total - factor * torch.minimum(ratio * carried, bounded * carried)
                    place += 1
            total = total + factor * plain_imitated(model, path, advantage, loss)
    return total


def plain_imitated(
    model: Any, path: Trajectory, advantage: float, loss: LossSettings
) -> torch.Tensor:
    """Each imitated text after the path above its graft, in a forward pass of its own."""
    total = torch.zeros((), dtype=torch.float64)
    if not loss.graft_coef or advantage <= 0:
        return total
    for place, step in enumerate(path.steps):
        if not step.lesson_ids:
            continue
        above = [token for s in path.steps[:place] for token in s.token_ids.tolist()]
        ids = [*above, *step.lesson_ids]
        for logprob in logprobs_of(model, ids, [step.temperature] * len(ids))[len(above) - 1 :]:
            prob = torch.exp(logprob)
            gain = logprob if loss.graft_form == "log" else prob / (prob + 0.1)
            total = total - loss.graft_coef * advantage * gain
    return total


# ---------------------------------------------------------------------- law 1


def credited(trees: Sequence[Tree], rules: Rules) -> list[Tree]:
    truncated = rules.loss.learn_from_truncated
    return [
        assign_credit(t, attribution=rules.attribution, learn_from_truncated=truncated)
        for t in trees
    ]  # type: ignore[arg-type]


def assert_exact(trees: Sequence[Tree], rules: Rules) -> None:
    """One optimiser step, packed and plain: loss within 1e-6 of its size where that is above 1,
    gradient within 1e-5 relative norm."""
    model = build_model("llama")
    twin = build_model("llama")
    learner, descent = make_learner(model, rules.loss)
    _, metrics = learner.learn(credited(trees, rules))
    assert all(map(meaning, metrics))
    expected = plain_loss(twin, trees, rules)
    loss = float(expected.detach())
    assert abs(metrics["learn/loss"] - loss) < 1e-6 * max(1.0, abs(loss))
    if expected.requires_grad:
        expected.backward()
    theirs = gradient_of(twin)
    assert (descent.gradients[0] - theirs).norm() <= 1e-5 * theirs.norm() + 1e-7


def loss_settings(**fields: Any) -> LossSettings:
    return LossSettings(**{"shaping_weight": 0.3, "clip_low": 0.28, "clip_high": 0.28} | fields)


AGGREGATIONS = ["token-mean", "sequence-mean", "sequence-sum"]
IMITATED = [{"graft_coef": 0.0}, {"graft_coef": 1.5}, {"graft_coef": 0.7, "graft_form": "luffy"}]


@pytest.fixture(params=WAYS)
def path_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ways of running a batch."""
    attend_by(request.param, monkeypatch)
    return str(request.param)


def test_law_1_however_it_is_run(path_kind: str) -> None:
    for attribution, truncated in (("soft", True), ("hard", False)):
        rules = Rules(loss_settings(graft_coef=1.0, learn_from_truncated=truncated), attribution)
        assert_exact(
            [build_tree(RICH, seed=3), build_tree(SMALL, seed=4), build_tree(RICH, seed=5)], rules
        )


@given(
    st.lists(mixed_trees(), min_size=1, max_size=3),
    st.sampled_from(AGGREGATIONS),
    st.sampled_from(["soft", "hard"]),
    st.sampled_from(IMITATED),
    st.booleans(),
    st.sampled_from(WAYS),
)
@settings(max_examples=15, deadline=None)
def test_law_1_on_random_mixed_trees(
    trees: list[Tree],
    aggregation: str,
    attribution: str,
    imitated: dict[str, Any],
    truncated: bool,
    kind: str,
) -> None:
    rules = Rules(
        loss_settings(aggregation=aggregation, learn_from_truncated=truncated, **imitated),
        attribution,
    )
    with pytest.MonkeyPatch.context() as patch:
        attend_by(kind, patch)
        assert_exact(trees, rules)


def test_scores_of_samples_and_imitated_tokens_are_those_of_plain_passes(path_kind: str) -> None:
    trees = credited([build_tree(RICH, seed=1), build_tree(SMALL, seed=2)], Rules(loss_settings()))
    model = build_model("llama")
    learner, _ = make_learner(build_model("llama"))
    batch = pack_trees(trees, takes_imitated=True)
    assert batch.imitated is not None
    with torch.no_grad():
        logprobs, entropies, taught = learner.scores_with_imitated(batch)
        alone = token_scores(build_model("llama"), pack_trees(trees))
        torch.testing.assert_close(logprobs, alone[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(entropies, alone[1], atol=1e-5, rtol=0)
        for path, ours in zip(batch.paths, batch.per_trajectory(logprobs), strict=True):
            temperatures = [step.temperature for step in path.steps for _ in step.token_ids]
            plain = logprobs_of(model, path.token_ids, temperatures)[
                torch.tensor(path.sampled_mask[1:])
            ]
            torch.testing.assert_close(ours.double(), plain, atol=1e-5, rtol=0)
        for tree in trees:
            for step in sorted(imitated_steps(tree).values(), key=lambda one: one.ordinals):
                ours, taught = taught.split([step.num_tokens, len(taught) - step.num_tokens])
                ids = text_of(tree, step)
                plain = logprobs_of(model, ids, [1.0] * len(ids))[-len(ours) :]
                torch.testing.assert_close(ours.double(), plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attribution", ["soft", "hard"])
@pytest.mark.parametrize("imitated", IMITATED, ids=["none", "log", "luffy"])
def test_law_1_over_two_minibatches(attribution: str, imitated: dict[str, Any]) -> None:
    """RAPO's two mini-batches: old log-probabilities are those of the start, imitated tokens follow
    the policy as it is."""
    rules = Rules(loss_settings(clip_low=0.1, clip_high=0.1, **imitated), attribution)
    lr = 0.3
    trees = [
        build_tree(RICH, seed=1),
        build_tree(SMALL, seed=2),
        build_tree(SMALL, seed=6),
        build_tree(RICH, seed=7),
    ]
    model = build_model("llama")
    twin = build_model("llama")
    start = copy.deepcopy(twin)
    learner, _ = make_learner(model, rules.loss, lr, num_minibatches=2)
    _, metrics = learner.learn(credited(trees, rules))
    for part in (trees[:2], trees[2:]):
        twin.zero_grad()
        plain_loss(twin, part, rules, old=start).backward()
        with torch.no_grad():
            for weight in twin.parameters():
                weight -= lr * weight.grad
    ours, theirs, first = (
        torch.cat([w.detach().flatten() for w in m.parameters()]) for m in (model, twin, start)
    )
    assert distance(ours - first, theirs - first) < 1e-4
    assert metrics["learn/clip_frac"] > 0.0 and metrics["learn/num_optimiser_steps"] == 2.0


# ---------------------------------------------------------------------- what carries loss, and what


def gradient_rows(loss: LossSettings, trees: Sequence[Tree]) -> set[int]:
    """Packed places that predict something which the loss pulls at: where the last hidden state has
    a gradient."""
    model = build_model("llama")
    learner, _ = make_learner(model, loss)
    kept: list[torch.Tensor] = []

    def keep(_module: Any, _args: Any, output: Any) -> None:
        output.last_hidden_state.retain_grad()
        kept.append(output.last_hidden_state)

    handle = model.model.register_forward_hook(keep)
    learner.learn(trees)
    handle.remove()
    (hidden,) = kept
    assert hidden.grad is not None
    return set(hidden.grad[0].abs().sum(-1).nonzero()[:, 0].tolist())


def test_law_4_no_gradient_from_retrieved_tokens() -> None:
    """Without learning from grafts only what predicts a loss token is pulled at: no retrieved, tool
    or imitated token."""
    trees = credited([build_tree(RICH, seed=1)], Rules(loss_settings()))
    batch = pack_trees(trees)
    loss_tokens = {int(batch.tokens[row]) for row in batch.carries_loss.nonzero()[:, 0]}
    sources = {int(batch.sources[token]) for token in loss_tokens}
    assert gradient_rows(loss_settings(), trees) == sources
    pulled = gradient_rows(loss_settings(graft_coef=1.0), trees)
    taught = pack_trees(trees, takes_imitated=True)
    assert taught.imitated is not None
    own = {int(taught.sources[token]) for token in loss_tokens}
    assert pulled == own | set(taught.imitated.sources.tolist())


@pytest.mark.parametrize("graft_coef", [0.0, 1.0])
def test_law_4_what_is_known_of_retrieved_tokens_changes_nothing(graft_coef: float) -> None:
    """Other log-probabilities and entropies on the tokens of grafts: same gradient. Other imitated
    texts: only when they are learned."""
    tree = credited([build_tree(RICH, seed=1)], Rules(loss_settings()))[0]

    def gradient(steps: Sequence[Any]) -> torch.Tensor:
        learner, descent = make_learner(build_model("llama"), loss_settings(graft_coef=graft_coef))
        _, metrics = learner.learn([replace(tree, steps=tuple(steps))])
        assert ("learn/num_lesson_tokens" in metrics) == (graft_coef > 0)
        return descent.gradients[0]

    def other(step: Any) -> Any:
        if step.origin is not Origin.RETRIEVED:
            return step
        noise = tuple(-0.1 * n for n in range(1, len(step.token_ids) + 1))
        return replace(step, sampling_logprobs=noise, entropies=noise, old_logprobs=noise)

    plain = gradient(tree.steps)
    assert torch.equal(gradient([other(step) for step in tree.steps]), plain)
    taught = gradient(
        [replace(step, lesson_ids=tuple(96 - t for t in step.lesson_ids)) for step in tree.steps]
    )
    assert torch.equal(taught, plain) == (graft_coef == 0)


def test_imitated_tokens_are_counted_and_scored() -> None:
    """SMALL: the graft's leaf did best, so its two imitated tokens are learned once; without a
    coefficient nothing is packed."""
    trees = credited([build_tree(SMALL, seed=2)], Rules(loss_settings()))
    unique = sum(len(step.token_ids) for step in trees[0].steps)
    for coef, extra in ((0.0, 0), (1.0, 2)):
        model = build_model("llama")
        learner, _ = make_learner(model, loss_settings(graft_coef=coef))
        learned, metrics = learner.learn(trees)
        assert metrics["learn/num_unique_tokens"] == unique + extra
        assert metrics["learn/unique_frac"] == pytest.approx(
            unique / (2 + 2 + 2 + 1 + 2 + 2 + 2 + 2 + 1)
        )
        assert metrics.get("learn/num_lesson_tokens", 0.0) == extra
        assert ("learn/lesson_logprob" in metrics) == bool(extra)
        # The record holds what was sampled; imitated texts are no part of the tree.
        assert [step.id for step in learned[0].steps] == [step.id for step in trees[0].steps]
        assert learned[0].steps[2].old_logprobs.tolist() == [0.0] * learned[0].steps[2].num_tokens
    batch = pack_trees(trees, takes_imitated=True)
    assert batch.imitated is not None
    (text,) = imitated_steps(trees[0]).values()
    ids = text_of(trees[0], text)
    with torch.no_grad():
        expected = logprobs_of(build_model("llama"), ids, [1.0] * len(ids))[-2:].mean()
    assert metrics["learn/lesson_logprob"] == pytest.approx(float(expected), abs=1e-5)


def test_packs_leave_room_for_imitated_texts() -> None:
    """64 tokens a pack: two trees of 31 fit together, not with 8 imitated tokens each."""
    part = Part.of(
        "p" * 20,
        Part.of("s" * 4, Part.of("rrr", Part("s", reward=1.0), lesson=8), Part("ss")),
        Part("s"),
    )
    trees = credited([build_tree(part, seed=1), build_tree(part, seed=2)], Rules(loss_settings()))
    for coef, count in ((0.0, 1), (1.0, 2)):
        learner, _ = make_learner(
            build_model("llama"), loss_settings(graft_coef=coef), max_pack_tokens=64
        )
        packs = list(
            learner._batches(
                learner._plan(trees, (0, 1), takes_imitated=coef > 0), takes_imitated=coef > 0
            )
        )
        assert len(packs) == count and all(batch.num_tokens <= 64 for _, batch in packs)


# ---------------------------------------------------------------------- attribution


UNGRAFTED = Part.of(
    "ppp",
    Part.of(
        "ss",
        Part("s", reward=1.0),
        Part.of("sst", Part("s", reward=0.0), Part("sss", reward=1.0)),
        Part("ss", reward=0.0),
    ),
    Part("sss", reward=0.0),
)


def test_hard_equals_soft_unclipped_under_token_mean() -> None:
    """Σ over d copies of A_i ∇ = d · mean(A) ∇ where every copy has the same factor; 1/|y_i| of
    unequal lengths is none."""
    for aggregation, is_equal in (
        ("token-mean", True),
        ("sequence-sum", True),
        ("sequence-mean", False),
    ):
        gradients = []
        for attribution in ("soft", "hard"):
            rules = Rules(loss_settings(aggregation=aggregation), attribution)
            learner, descent = make_learner(build_model("llama"), rules.loss)
            learner.learn(credited([build_tree(UNGRAFTED, seed=1)], rules))
            gradients.append(descent.gradients[0])
        assert (distance(gradients[0], gradients[1]) < 1e-5) == is_equal


def test_hard_differs_where_clipping_acts() -> None:
    """min is taken per sign of A: of a shared token's A = 1 and -1, one is held beyond the ends,
    and their mean 0 is not."""
    tree = build_tree(Part.of("p", Part.of("s", Part("s", reward=1.0), Part("s", reward=-1.0))))
    values = {}
    for attribution in ("soft", "hard"):
        rules = Rules(
            LossSettings(aggregation="token-mean", clip_low=0.2, clip_high=0.2), attribution
        )
        learner, _ = make_learner(build_model("llama"), rules.loss)
        trees = [assign_credit(tree, advantage="dr_grpo", attribution=attribution)]  # type: ignore[arg-type]
        _, batch = next(learner._batches(learner._plan(trees, (0,))))
        new = torch.tensor([math.log(1.5), 0.0, 0.0], requires_grad=True)
        scores = PassScores(
            logprobs=new,
            entropies=torch.zeros(3),
            old_logprobs=torch.zeros(3),
            imitated_logprobs=torch.zeros(0),
        )
        loss = learner._pack_loss(batch, scores, learner._denominators(trees), MetricSums())
        loss.backward()
        assert new.grad is not None
        values[attribution] = (float(loss.detach()), new.grad.tolist())
    # Factors 1/2 / 2: soft -(1.2 - 1.5) / 4 and a gradient of 1.5 / 4 on the shared token; hard
    # nothing there.
    assert values["soft"] == (pytest.approx(0.075), pytest.approx([0.375, -0.25, 0.25]))
    assert values["hard"] == (pytest.approx(0.0, abs=1e-7), pytest.approx([0.0, -0.25, 0.25]))


def test_a_group_whose_steps_all_balance_is_skipped_unless_it_teaches() -> None:
    """Hard attribution: the only loss token is shared by A = 1/2 and -1/2. The leaf that did better
    ends on its graft."""
    graft = Part("rr", reward=1.0, status=Status.TRUNCATED, lesson=2)
    tree = build_tree(Part.of("p", Part.of("s", graft, Part("S", reward=0.0))))
    hard = [assign_credit(tree, advantage="dr_grpo", attribution="hard")]
    for coef, skipped in ((0.0, 1.0), (1.0, 0.0)):
        learner, descent = make_learner(build_model("llama"), LossSettings(graft_coef=coef))
        _, metrics = learner.learn(hard)
        assert metrics["learn/skipped_groups_frac"] == skipped
        assert bool(descent.gradients[0].any()) == (coef > 0)


# ---------------------------------------------------------------------- shaping


def test_clipping_acts_on_the_shaped_ratio_in_the_second_minibatch() -> None:
    """F = 2/4 with m = 0.8: r̂ starts at 1.4 and lies above 1 + 0.28 from the first step on, so a
    good graft's tokens are held."""
    tree = build_tree(
        Part.of("pp", Part.of("s", Part.of("rr", Part("s", reward=1.0))), Part("s", reward=0.0))
    )
    fractions = {}
    for weight in (0.0, 0.8):
        loss = LossSettings(shaping_weight=weight, clip_low=0.28, clip_high=0.28)
        rules = Rules(loss)
        learner, descent = make_learner(build_model("llama"), loss, lr=1e-4)
        learned, metrics = learner.learn(credited([tree], rules))
        assert [leaf.shaping_factor for leaf in learned[0].leaves] == [
            pytest.approx(1.0 + weight * 0.5),
            1.0,
        ]
        fractions[weight] = metrics["learn/clip_frac"]
        twin = build_model("llama")
        plain_loss(twin, [tree], rules).backward()
        assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5
        assert metrics["learn/ratio_max"] == 1.0  # of ρ
    # Two contributions of the grafted trajectory are held, the one of the other is not.
    assert fractions == {0.0: 0.0, 0.8: pytest.approx(2 / 3)}


# ---------------------------------------------------------------------- entropies that the engine d


def with_kind(tree: Tree, kind: EntropyKind) -> Tree:
    return replace(tree, steps=tuple(replace(step, entropy_kind=kind) for step in tree.steps))


def test_entropies_beside_grafts_are_made_exact() -> None:
    trees = [
        with_kind(build_tree(RICH, seed=1), EntropyKind.TOP_K),
        with_kind(build_tree(UNGRAFTED), EntropyKind.TOP_K),
    ]
    model = build_model("llama")
    learner, _ = make_learner(build_model("llama"))
    exact, untouched = learner.with_exact_entropies(trees)
    assert untouched is trees[1]
    changed = {s.id for s, t in zip(exact.steps, trees[0].steps, strict=True) if s != t}
    # Before and after each graft: 0.0 and 0.0.0.0; 0.0.0.0 and both steps below; 0.1 and 0.1.0.0.
    # None after the other two.
    assert changed == {"0.0", "0.0.0.0", "0.0.0.0.0.0", "0.0.0.0.0.1", "0.1", "0.1.0.0"}
    for path in exact.trajectories():
        logits = model(input_ids=torch.tensor([path.token_ids]), use_cache=False).logits[0]
        place = -1
        for step in path.steps:
            for value, is_sampled in zip(step.entropies, step.sampled_mask, strict=True):
                if step.id in changed:
                    assert step.entropy_kind is EntropyKind.EXACT
                    row = torch.log_softmax(logits[place].detach() / step.temperature, -1)
                    expected = float(-(row.exp() * row).sum()) if is_sampled else 0.0
                    assert value == pytest.approx(expected, abs=1e-5)
                place += 1
    # Exact ones are left as they are.
    again = learner.with_exact_entropies([exact])
    assert again[0] is exact
    # Tokens that are compared by entropy need them of one kind.
    for tree in learner.with_exact_entropies(trees, everywhere=True):
        kinds = {step.entropy_kind for step in tree.steps if any(step.sampled_mask)}
        assert kinds == {EntropyKind.EXACT}
    assert learner.with_exact_entropies([trees[1]], everywhere=True)[0] is trees[1]
