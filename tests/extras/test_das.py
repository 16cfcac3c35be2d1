"""DAS' preference pairs: which decisions get their other side, what is preferred, and the gradient
of the loss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.extras.test_axpo import finished, retries_of
from tests.extras.test_commit import WRONG, by_answer
from tests.rollout.test_growth import grow, make
from tests.rollout.test_loop import ANSWER, SEARCH
from tests.support.families import build_model, word_tokenizer
from tests.support.slow_learner import distance, gradient_of, make_learner, shift_weights
from tests.support.trees import Part, build_tree

from treegraft.algo.advantages import assign_credit
from treegraft.core.types import Origin, Retry, RetryCause, Start, StepContent, ToolCall, Tree
from treegraft.extras.methods.das import RULE, Counterfactual, CounterfactualSettings
from treegraft.extras.methods.das_loss import decisions, learn_pairs, preference_loss
from treegraft.policy.learn.metrics import MetricSums
from treegraft.settings.load import load_config
from treegraft.settings.policy import LossSettings


def counterfactual(**fields: Any) -> Counterfactual:
    return Counterfactual(CounterfactualSettings(**{"num_starts": 2, **fields}))


def loss_settings(**fields: Any) -> Any:
    found = load_config("demo", [f'explorers=["{RULE}"]', "loss.pair_coef=1"]).loss
    return found.model_copy(update=fields)


# ---------------------------------------------------------------------- the tree


def stops(path: str) -> str:
    """Answers after its first result, wrongly; right is the answer after its second."""
    if path.endswith("<search>"):
        return "w1 </search>"
    if "<result>" not in path:
        return SEARCH
    return ANSWER if path.count("<result>") == 2 else WRONG


def goes_on(path: str) -> str:
    """Answers after its third result, wrongly; right is the answer after its first."""
    if path.endswith("<answer>"):
        return "\\boxed{ w9 }</answer>" if path.count("<result>") == 1 else WRONG[len("<answer>") :]
    return SEARCH if path.count("<result>") < 3 else WRONG


def grown(replies: Any, num_leaves: int, **fields: Any) -> Tree:
    grower = make(counterfactual(**fields), replies, num_leaves=num_leaves)
    grower.scorer = by_answer
    return grow(grower)


def test_a_call_is_preferred_where_it_earned_more() -> None:
    """Both rollouts answer wrongly after one result. Beside each answer a call is begun; after its
    result the answer is right."""
    tree = grown(stops, 4)
    words = word_tokenizer()
    call, answer = words.encode("<search>"), words.encode("<answer>")
    found = decisions(tree)
    assert [one.step.id for one in found] == ["0.0.0", "0.1.0"]
    assert [one.sides for one in found] == [(*answer, *call)] * 2
    assert [one.rewards for one in found] == [(0.0, 1.0)] * 2
    assert all(one.prefers_call and not one.is_tied for one in found)
    pair = found[0].pair()
    assert [step.token_ids.tolist() for step in pair.steps[1:]] == [list(call), list(answer)]
    before = [token for step in tree.path("0.0") for token in step.token_ids]
    assert list(pair.root.token_ids) == before
    # What was forced carries no loss in the tree itself, and is not imitated.
    for step in retries_of(tree):
        assert not step.loss_mask[0] and step.origins[0] == Origin.FORCED and not step.lesson_ids


def test_an_answer_is_preferred_where_it_earned_more() -> None:
    """Each of two rollouts makes three calls and answers wrongly. Three decisions of each follow a
    result; of these six, three are taken, evenly: the first call and the answer of one rollout, the
    second call of the other. The answer in place of the first call is right; the others tie."""
    tree = grown(goes_on, 5)
    found = {one.step.id: one for one in decisions(tree)}
    assert set(found) == {"0.0.0", "0.0.0.0.0", "0.1.0.0"}
    assert found["0.0.0"].rewards == (0.0, 1.0) and not found["0.0.0"].prefers_call
    assert found["0.0.0.0.0"].is_tied and found["0.1.0.0"].is_tied
    # Without answers the two last steps remain.
    ends = decisions(grown(goes_on, 5, answers=False))
    assert [one.step.id for one in ends] == ["0.0.0.0.0", "0.1.0.0.0"]


def test_it_asks_once_and_whatever_came_of_the_group() -> None:
    explorer = counterfactual()
    mixed = finished((1.0, 0.5, 0.1), (0.0, 0.5, 0.1))
    asked = explorer.fill(mixed, 9)
    assert isinstance(asked, list) and {one.opens for one in asked} <= {"call", "answer"}
    assert all(isinstance(one, Retry) and one.num == 1 for one in asked)
    assert explorer.fill(mixed, len(mixed.leaves)) == Start(0)
    assert explorer.fill(grown(stops, 4), 99) == Start(0)


def test_a_step_is_begun_anew_up_to_the_first_token_that_differs() -> None:
    """One rollout thinks w2 and answers after its first result, the other thinks w1 and searches:
    the other's thought is begun, so the deciding token is w1 or w2, not the mark."""
    seen: dict[str, int] = {}

    def thinks(path: str) -> str:
        thought = path.rpartition("<think>")[2].split()
        if "<think>" in path and not path.endswith(">"):
            return f"</think>{SEARCH if thought == ['w1'] else WRONG}"
        if "<result>" not in path:
            return f"<think> w1 </think>{SEARCH}"
        seen[path] = seen.get(path, 0) + 1
        goes = path.count("<result>") == 1 and seen[path] == 1
        return f"<think> w1 </think>{SEARCH}" if goes else f"<think> w2 </think>{WRONG}"

    words = word_tokenizer()
    tree = grown(thinks, 5, form="anew")
    sides = {words.decode(list(one.sides)) for one in decisions(tree)}
    assert sides <= {"w1 w2", "w2 w1"} and len(sides) == 2
    kept = grown(thinks, 5, form="kept")
    assert {words.decode(list(one.sides)) for one in decisions(kept)} <= {
        "<answer> <search>",
        "<search> <answer>",
    }


# ---------------------------------------------------------------------- the loss


def test_the_loss_by_hand() -> None:
    """π(a) = .3 where π_ref(a) = .5, π(b) = .6 where π_ref(b) = .5; β = 2: the argument of σ is
    2 log(.6 / 1.2) = log 1/4, σ = 1/5, so l = log 5. By ∂l/∂log π(a) = -β (1 - σ): -8/5."""
    logprobs = torch.tensor([[0.3, 0.6]]).log().requires_grad_()
    ref = torch.tensor([[0.5, 0.5]]).log()
    loss = preference_loss(logprobs, ref, 2.0)
    assert loss.tolist() == [pytest.approx(math.log(5))]
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[pytest.approx(-1.6), pytest.approx(1.6)]]
    # Where the policy is the reference: log 2, whatever β is.
    assert preference_loss(ref, ref, 7.0).tolist() == [pytest.approx(math.log(2))]


@given(
    st.lists(st.floats(-9, 0), min_size=4, max_size=4), st.floats(0.01, 10.0), st.floats(0.0, 3.0)
)
def test_it_falls_as_the_preferred_side_gains(
    values: list[float], beta: float, gain: float
) -> None:
    """And the losses of a pair and of the pair turned round are -log σ(h) and -log σ(-h)."""
    logprobs, ref = torch.tensor(values, dtype=torch.float64).view(2, 1, 2)
    one, other = (
        preference_loss(*pair, beta)
        for pair in ((logprobs, ref), (_turned(logprobs), _turned(ref)))
    )
    moved = preference_loss(logprobs + torch.tensor([gain, 0.0]), ref, beta)
    assert (moved <= one).all() and (one > 0).all()
    assert float(torch.exp(-one) + torch.exp(-other)) == pytest.approx(1.0)


def _turned(column: torch.Tensor) -> torch.Tensor:
    return column.flip(1)


def forked(first: float, second: float, *, seed: int = 1) -> Tree:
    """A rollout that called after its result and then earned `first`; beside the call an answer was
    begun, which earned `second`. Their first tokens differ."""
    tree = build_tree(
        Part.of(
            "ppp",
            Part.of("sst", Part.of("sst", Part("ss", reward=first)), Part("fss", reward=second)),
        ),
        seed=seed,
    )
    cause = RetryCause(rule=RULE, beside="0.0.0")
    calls = StepContent(calls=(ToolCall("search", "w1"),))
    steps = (
        replace(step, cause=cause)
        if step.id == "0.0.1"
        else replace(step, content=calls)
        if step.id == "0.0.0"
        else step
        for step in tree.steps
    )
    return replace(tree, steps=tuple(steps))


def pair_gradient(trees: list[Tree], *, reference: bool = False, **fields: Any) -> torch.Tensor:
    """What `learn_pairs` adds, at the weights of a new model."""
    model = build_model("llama")
    learn = {name: fields.pop(name) for name in ("max_pack_tokens",) if name in fields}
    settings = loss_settings(**fields)
    learner, _ = make_learner(model, LossSettings(), **learn)
    if reference:
        learner.keep_reference()
        shift_weights(model)
    learn_pairs(trees, settings, learner, MetricSums())
    return gradient_of(model)


def slow_gradient(trees: list[Tree], beta: float, *, reference: bool = False) -> torch.Tensor:
    """The same from whole logits, one side at a time."""
    model, anchor = build_model("llama"), build_model("llama")
    if reference:
        shift_weights(model)
    total = torch.zeros(())
    for tree in trees:
        step = {one.id: one for one in tree.steps}
        ids = [token for one in tree.path("0.0") for token in one.token_ids]
        sides = [step[name].token_ids[0] for name in ("0.0.0", "0.0.1")]
        rewards = [leaf.reward or 0.0 for leaf in tree.leaves]
        best, worst = sides if rewards[0] > rewards[1] else sides[::-1]
        rows = []
        for one in (model, anchor):
            logits = one(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            rows.append(torch.log_softmax(logits.float(), dim=-1))
        now, then = rows[0], (rows[1] if reference else rows[0]).detach()
        inner = now[best] - then[best] - now[worst] + then[worst]
        total = total - torch.log(torch.sigmoid(beta * inner)) / len(trees)
    total.backward()
    return gradient_of(model)


def test_the_gradient_is_that_of_the_equation() -> None:
    """With the policy itself as reference, and with one from which it has moved."""
    trees = [forked(1.0, 0.0), forked(0.25, 0.75, seed=2)]
    ours = pair_gradient(trees, pair_beta=0.5)
    assert distance(ours, slow_gradient(trees, 0.5)) < 1e-5
    moved = pair_gradient(trees, pair_beta=0.5, reference=True)
    assert distance(moved, slow_gradient(trees, 0.5, reference=True)) < 1e-5
    # The coefficient multiplies it; it does not depend on packs.
    assert distance(pair_gradient(trees, pair_beta=0.5, pair_coef=3), 3 * ours) < 1e-6
    assert distance(pair_gradient(trees, pair_beta=0.5, max_pack_tokens=1), ours) < 1e-5


def test_ties_have_no_gradient_and_turned_rewards_the_opposite_one() -> None:
    assert not pair_gradient([forked(0.5, 0.5)]).any()
    assert distance(pair_gradient([forked(0.0, 1.0)]), -pair_gradient([forked(1.0, 0.0)])) < 1e-6
    # A tie beside a pair does not make it weigh less.
    both = pair_gradient([forked(1.0, 0.0), forked(0.5, 0.5, seed=2)])
    assert distance(both, pair_gradient([forked(1.0, 0.0)])) < 1e-6


@pytest.mark.parametrize(("rewards", "is_call"), [((1.0, 0.0), True), ((0.0, 1.0), False)])
def test_a_step_makes_the_better_side_likelier(rewards: tuple[float, float], is_call: bool) -> None:
    tree = forked(*rewards)
    model = build_model("llama")
    learner, descent = make_learner(model, LossSettings(), lr=0.01)

    def margin() -> float:
        sums = MetricSums()
        learn_pairs([tree], loss_settings(), learner, sums)
        return sums.metrics(1, takes_imitated=False)["pair/margin"]

    before = margin()
    descent.step()
    assert margin() > before
    # Which one that is: the call's token in the first tree, the answer's in the second.
    (one,) = decisions(tree)
    assert one.prefers_call == is_call


def test_a_learner_adds_it_to_its_own_loss() -> None:
    """The gradient of an optimiser step with pairs, less that without, is the pairs'."""
    trees = [assign_credit(forked(1.0, 0.0)), assign_credit(forked(0.25, 0.75, seed=2))]
    gradients = {}
    for coef in (0.0, 1.0):
        learner, descent = make_learner(build_model("llama"), loss_settings(pair_coef=coef))
        _, metrics = learner.learn(trees)
        gradients[coef] = descent.gradients[0]
    assert distance(gradients[1.0] - gradients[0.0], pair_gradient(trees)) < 1e-4
    assert metrics["pair/tied_frac"] == 0.0 and metrics["pair/calls_frac"] == 0.5
