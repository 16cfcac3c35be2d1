"""ETC's continuation and REFT's first tokens on trees by hand; own lessons beside any explorer."""

from __future__ import annotations

import pytest
from tests.extras.test_axpo import finished, retries_of
from tests.extras.test_commit import WRONG, by_answer, places
from tests.rollout.test_growth import grow, make
from tests.rollout.test_loop import ANSWER, SEARCH
from tests.support.families import word_tokenizer

from treegraft import Origin, Tree, load_config
from treegraft.core.registry import CORE_NAMES, registered
from treegraft.extras.methods.continuation import Continuation, ContinuationSettings
from treegraft.extras.methods.reft import FirstTokens, FirstTokenSettings, decision
from treegraft.parts import Retry, Start


def stops(path: str) -> str:
    """Answers at once, and wrongly before its second result; goes on where a call is begun."""
    if path.endswith("<search>"):
        return "w1 </search>"
    return ANSWER if path.count("<result>") == 2 else WRONG


def continued(num_leaves: int) -> Tree:
    explorer = Continuation(ContinuationSettings(num_starts=2))
    grower = make(explorer, stops, num_leaves=num_leaves)
    grower.scorer = by_answer
    return grow(grower)


def test_each_wrong_answer_goes_on_until_it_is_right() -> None:
    """Beside the answers of both rollouts a call is begun; both answer wrongly after it, and are
    begun again; then they are right, and 4 of 10 leaves stay unused."""
    tree = continued(10)
    assert sorted(places(tree)) == ["0.0", "0.1", "0.2.0", "0.3.0"]
    assert sorted(leaf.reward or 0.0 for leaf in tree.leaves) == [0.0] * 4 + [1.0] * 2
    opening = word_tokenizer().encode("<search>")
    for step in retries_of(tree):
        assert step.origins[: len(opening)].tolist() == [Origin.FORCED] * len(opening)
        # Not imitated, unlike those of commit branching.
        assert not step.lesson_ids and not any(step.loss_mask[: len(opening)])
    assert sorted(places(continued(5))) == ["0.0", "0.1", "0.2.0"]


def test_it_does_not_wait_for_all_to_fail() -> None:
    explorer = Continuation(ContinuationSettings(num_starts=2))
    mixed = finished((1.0, 0.5, 0.1), (0.0, 0.5, 0.1), (0.0, None, 0.1))
    assert explorer.fill(mixed, 9) == [
        Retry("0.2", 1, "continuation"),
        Retry("0.1.0", 1, "continuation"),
    ]
    assert explorer.fill(mixed, 4) == [Retry("0.2", 1, "continuation")]
    assert explorer.fill(finished((1.0, 0.5, 0.1)), 9) == Start(0)


def test_steps_begin_with_the_other_tokens_of_their_group() -> None:
    """After the first result one rollout searches on and one answers: where each stands the other's
    first token is forced."""
    firsts = iter([True, False])
    known: dict[int, bool] = {}

    def agent(path: str) -> str:
        if path.endswith("<search>"):
            return "w1 </search>"
        if path.endswith("<answer>"):
            return "\\boxed{ w3 }</answer>"
        if path.count("<result>") == 1 and len(known) < 2:
            known[len(known)] = next(firsts)
            return SEARCH if known[len(known) - 1] else WRONG
        return WRONG if "<result>" in path else SEARCH

    explorer = FirstTokens(FirstTokenSettings(num_starts=2))
    tree = grow(make(explorer, agent, num_leaves=6))
    words = word_tokenizer()
    begun = {words.decode(list(step.token_ids[:1])) for step in retries_of(tree)}
    assert begun == {"<search>", "<answer>"}
    # Three steps followed a result: a search, and two answers.
    assert len(retries_of(tree)) == 3 and explorer.fill(tree, 99) == Start(0)
    assert all(
        step.origins[0] == Origin.FORCED and not step.loss_mask[0] for step in retries_of(tree)
    )


def test_the_decision_is_where_steps_first_differ() -> None:
    assert decision([(7, 1, 4), (7, 2, 4), (7, 2, 5), (7, 3)]) == (1, [2, 1, 3])
    assert decision([(7, 1), (7, 1)]) == decision([]) == (0, [])


@pytest.mark.parametrize("name", [*CORE_NAMES["explorer"], *registered("explorer")])
def test_own_lessons_go_with_every_explorer(name: str) -> None:
    """Settings that contradict each other would be refused here."""
    own = ["buffer.path=self", "loss.lesson_coef=2", "learn.num_lessons=36"]
    config = load_config("demo", [f'explorers=["{name}"]', *own])
    assert config.buffer.path == "self" and config.loss.lesson_coef == 2
