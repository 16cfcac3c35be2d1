"""Likelihoods of successes, what first steps say about their question, and what searches found: on
paper, and in real runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.test_format_chat import TOOLS, ends_of, tokenizer_of
from tests.support.chat_templates import GOOD
from tests.support.families import build_model
from tests.support.tiny import is_timing, tiny
from tests.support.trees import Part, build_tree

from treegraft.core.demonstration import Written, tree_of_paths
from treegraft.core.types import Observation, StepContent, Task, ToolCall, Tree
from treegraft.policy.learn.learner import Learner
from treegraft.policy.learn.symptoms import (
    opening_probs,
    question_information,
    success_change,
    symptoms,
)
from treegraft.rollout.copied import found_metrics
from treegraft.rollout.formats.chat import ChatFormat
from treegraft.rollout.formats.tags import TagsFormat
from treegraft.runs.record import read_metrics, read_trees
from treegraft.settings.policy import LearnSettings, LossSettings
from treegraft.train import train


class Table:
    """Scores trees by a table: the log-probability of a whole first step, by question and step."""

    def __init__(self, scores: Mapping[tuple[int, int], float]) -> None:
        self.scores = scores

    def with_logprobs(self, trees: Sequence[Tree]) -> list[Tree]:
        def scored(tree: Tree) -> Tree:
            (question,) = tree.root.token_ids.tolist()
            steps = [
                replace(step, old_logprobs=(self.scores[question, int(step.token_ids[0])],))
                for step in tree.steps[1:]
            ]
            return replace(tree, steps=(tree.root, *steps))

        return [scored(tree) for tree in trees]


def asked(question: int) -> Tree:
    """A question of one token, and a first step of one token that is 10 more, with its result."""
    tree = build_tree(Part.of("p", Part.of("sr", Part("s", reward=1.0))))
    root, first, last = tree.steps
    root = replace(
        root,
        token_ids=(question,),
        origins=root.origins[:1],
        loss_mask=(False,),
        sampling_logprobs=(0.0,),
        entropies=(0.0,),
    )
    first = replace(first, token_ids=(10 + question, *first.token_ids[1:]))
    return replace(tree, steps=(root, first, last))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        # Twice as likely under its own question as the mean of both: ln (p / (p / 2)) / ln 2.
        (-1e9, 1.0),
        # Equally likely under both.
        (-1.0, 0.0),
        # p = e^-1 and p / 3: ln (1 / ((1 + 1/3) / 2)) / ln 2.
        (-1.0 - math.log(3), math.log(1.5) / math.log(2)),
    ],
)
def test_information_on_paper(other: float, expected: float) -> None:
    table = Table({(1, 11): -1.0, (2, 12): -1.0, (1, 12): other, (2, 11): other})
    found = question_information(table, [asked(1), asked(2)])  # type: ignore[arg-type]
    assert found == {"learn/question_information": pytest.approx(expected)}
    # One question alone, asked twice, has no other to be compared with.
    assert question_information(table, [asked(1), asked(1)]) == {}  # type: ignore[arg-type]


class Later:
    """A learner whose tokens are by 0.5 nats more likely than before."""

    def with_logprobs(self, trees: Sequence[Tree]) -> list[Tree]:
        def more(tree: Tree) -> Tree:
            steps = [
                replace(
                    step, old_logprobs=tuple(one + 0.5 if one else 0.0 for one in step.old_logprobs)
                )
                if step.old_logprobs is not None
                else step
                for step in tree.steps
            ]
            return replace(tree, steps=tuple(steps))

        return [more(tree) for tree in trees]


def test_the_change_of_successes_is_of_learned_trees_and_sampled_tokens() -> None:
    tree = build_tree(Part.of("p", Part.of("srr", Part("ss", reward=1.0)), Part("s", reward=0.0)))
    assert success_change(Later(), [tree]) == {}  # type: ignore[arg-type]
    learned = replace(
        tree,
        steps=tuple(
            replace(step, old_logprobs=tuple(-1.0 if own else 0.0 for own in step.sampled_mask))
            for step in tree.steps
        ),
        leaves=tuple(replace(leaf, is_correct=leaf.reward == 1.0) for leaf in tree.leaves),
    )
    assert success_change(Later(), [tree, learned]) == {  # type: ignore[arg-type]
        "learn/success_logprob_change": 0.5
    }
    # A step that had no score before has nothing that it is compared with.
    fresh = replace(learned.steps[0], old_logprobs=None)
    partly = replace(learned, steps=(fresh, *learned.steps[1:]))
    scored = replace(fresh, old_logprobs=(-9.0,) * len(fresh.token_ids))

    class Whole(Later):
        def with_logprobs(self, trees: Sequence[Tree]) -> list[Tree]:
            made = super().with_logprobs(trees)
            return [replace(one, steps=(scored, *one.steps[1:])) for one in made]

    assert success_change(Whole(), [partly]) == {  # type: ignore[arg-type]
        "learn/success_logprob_change": 0.5
    }
    # Against an engine's scores it would be the gap of two implementations.
    shut: Any = object()  # a format that can open nothing
    both = symptoms(Later(), [tree, learned], shut, [])  # type: ignore[arg-type]
    own = symptoms(Later(), [tree, learned], shut, [], has_own_scores=False)  # type: ignore[arg-type]
    assert "learn/success_logprob_change" in both and own == {}
    failed = replace(
        learned, leaves=tuple(replace(leaf, is_correct=False) for leaf in learned.leaves)
    )
    assert success_change(Later(), [failed]) == {}  # type: ignore[arg-type]


NAMES = [tool.name for tool in TOOLS]


class ByText:
    """Scores each token by its text, 0 where it is not named."""

    def __init__(self, tokenizer: Any, scores: Mapping[str, float]) -> None:
        self.tokenizer, self.scores = tokenizer, scores

    def with_logprobs(self, trees: Sequence[Tree]) -> list[Tree]:
        def score(token: int) -> float:
            return self.scores.get(self.tokenizer.decode([token]), 0.0)

        return [
            replace(
                tree,
                steps=tuple(
                    replace(step, old_logprobs=tuple(map(score, step.token_ids.tolist())))
                    for step in tree.steps
                ),
            )
            for tree in trees
        ]


def wrote(form: Any, *steps: StepContent) -> Tree:
    """A tree of one trajectory that the policy wrote."""
    task = Task(id="t", question="q", reference=("4",))
    path = [Written(content, form.render_step(content)) for content in steps]
    return tree_of_paths(task, "g", form.prompt_ids(task), [path])


def test_probabilities_of_openings_on_paper() -> None:
    """Behind the thought, "<", "search" and ">" are tokens of their own in this tokenizer."""
    words = tokenizer_of("qwen25")
    form = TagsFormat(words, TOOLS, end_ids=ends_of("qwen25"))
    call = StepContent(
        thought="so I search",
        calls=(ToolCall("search", "x"),),
        observations=(Observation(text="y"),),
    )
    tree = wrote(form, call, StepContent(thought="an answer", answer="4"))
    # The same words in a thought do not count, though they have the same scores.
    learner = ByText(words, {"search": -1.0, "answer": -2.0, " search": -5.0, " answer": -5.0})
    found = opening_probs(learner, [tree], form, ["search"])  # type: ignore[arg-type]
    assert found == {
        "learn/open_call_prob": pytest.approx(math.exp(-1)),
        "learn/open_answer_prob": pytest.approx(math.exp(-2)),
        "learn/open_prob": pytest.approx(math.exp(-1) + math.exp(-2)),
    }
    # A second tool counts beside the first one, called or not.
    both = opening_probs(learner, [tree], form, NAMES)  # type: ignore[arg-type]
    assert both["learn/open_call_prob"] == pytest.approx(math.exp(-1) + 1)
    # Nobody decided anything on a trajectory that broke the format, or is another agent's.
    broken = replace(tree, steps=(tree.root, *(replace(s, violation="x") for s in tree.steps[1:])))
    assert opening_probs(learner, [broken], form, NAMES) == {}  # type: ignore[arg-type]
    assert opening_probs(learner, [tree], object(), NAMES) == {}  # type: ignore[arg-type]
    # Without tools there is no call to open.
    bare = TagsFormat(words, [], end_ids=ends_of("qwen25"))
    alone = wrote(bare, StepContent(thought="an answer", answer="4"))
    assert opening_probs(learner, [alone], bare, []) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", sorted(GOOD))
def test_chat_formats_score_the_openings_of_calls(kind: str) -> None:
    """Every token has the log-probability 0, so what is opened is certain."""
    tokenizer = tokenizer_of(kind)
    learner = ByText(tokenizer, {})
    for tools, names in ((TOOLS, NAMES), ([], [])):
        form = ChatFormat(tokenizer, tools, end_ids=ends_of(kind), require_think=kind != "llama31")
        tree = wrote(form, StepContent(answer="4"))
        found = opening_probs(learner, [tree], form, names)  # type: ignore[arg-type]
        assert found == ({"learn/open_call_prob": 1.0} if tools else {})


def searched(reference: str, *results: str, name: str = "search") -> Any:
    """A trajectory with one call for each result; "!" begins an error."""
    calls = tuple(ToolCall(name, "q") for _ in results)
    seen = tuple(Observation(text=one, is_error=one.startswith("!")) for one in results)
    (path,) = build_tree(Part.of("p", Part("s", reward=0.0))).trajectories()
    task = Task(id="t", question="q", reference=(reference,) if reference else ())
    content = StepContent(calls=calls, observations=seen)
    steps = (path.steps[0], replace(path.steps[1], content=content))
    return replace(path, task=task, steps=steps)


def test_found_answers_on_paper() -> None:
    paths = [
        searched("New York", "nothing", "in new  york city"),
        searched("4", "41 and 14"),
        searched("4", "!4"),  # an error is no result
        searched("", "anything"),  # no reference, no judgement
        searched("4", "4", name="python"),  # computes and looks nothing up
        searched("a b", "b a", name="wiki_search"),
    ]
    assert found_metrics(paths) == {
        "tools/search_found_frac": 0.5,
        "tools/wiki_search_found_frac": 0.0,
    }


def test_runs_are_the_same_with_and_without_symptoms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, every: int) -> Path:
        monkeypatch.setattr("treegraft.session.DIAGNOSED_EVERY", every)
        own = {"name": name, "dir": str(tmp_path)}
        tables = {"explore": {"num_leaves": 6}}
        no_eval = {"every": 0, "at_start": False, "at_end": False}
        return train(tiny(run=own, eval=no_eval, **tables)).run_dir

    with_them, without = run("with", 1), run("without", 1000)
    keys = {"learn/success_logprob_change", "learn/question_information"}
    keys |= {"learn/open_call_prob", "learn/open_answer_prob", "learn/open_prob"}
    lines = [
        [
            {key: value for key, value in line.items() if not is_timing(key)}
            for line in read_metrics(folder)
        ]
        for folder in (with_them, without)
    ]
    measured = [keys & line.keys() for line in lines[0]]
    assert keys in measured and not any(keys & line.keys() for line in lines[1])
    assert [{k: v for k, v in line.items() if k not in keys} for line in lines[0]] == lines[1]
    assert read_trees(with_them) == read_trees(without)


def test_scores_are_those_of_learning_and_rise_where_one_success_is_learned_from() -> None:
    learner = Learner(
        build_model("llama"), LearnSettings(lr=1e-2), LossSettings(), length_constant=7
    )
    tree = build_tree(Part.of("pp", Part.of("sst", Part("ss", reward=1.0)), Part("s", reward=0.0)))
    leaves = [
        replace(leaf, advantage=sign, is_correct=sign > 0, weight=0.5)
        for leaf, sign in zip(tree.leaves, (1.0, -1.0), strict=True)
    ]
    tree = replace(tree, leaves=tuple(leaves))
    (scored,) = learner.with_logprobs([tree])
    learned, _ = learner.learn([tree])
    for ours, theirs in zip(scored.steps[1:], learned[0].steps[1:], strict=True):
        assert ours.old_logprobs == pytest.approx(theirs.old_logprobs, abs=1e-5)
    assert success_change(learner, learned)["learn/success_logprob_change"] > 0.01
