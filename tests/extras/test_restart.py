"""Rollouts below stored steps, and stored trajectories in the group: what is opened, what is
masked, who is compared with whom."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rollout.test_growth import OneTrace, grow, make
from tests.rollout.test_loop import TASKS, by_step
from tests.support.error_codes import raises_code
from tests.support.families import build_model, word_tokenizer
from tests.support.slow_learner import distance, gradient_of, make_learner, plain_scores, slow_loss
from tests.support.tiny import tiny
from tests.support.trees import Part, build_tree
from tests.support.worlds import CopiedKeyDoor, ReplayedKeyDoor
from tests.tools import test_environments as worlds

from treegraft.algo.advantages import assign_credit, batch_outcomes
from treegraft.algo.groups import by_place
from treegraft.algo.rapo import path_retrieved_frac
from treegraft.core.errors import SettingError
from treegraft.core.interfaces import Restarting
from treegraft.core.types import (
    Below,
    Observation,
    Origin,
    RestartCause,
    Start,
    Status,
    Step,
    StepContent,
    Stored,
    StoredCause,
    Task,
    ToolCall,
    Trace,
    Tree,
)
from treegraft.explore.compose import Composed
from treegraft.explore.independent import Independent
from treegraft.extras.methods.prefix import (
    PrefixSettings,
    UniformPrefix,
    WholeTrajectory,
)
from treegraft.extras.methods.tree_search import TREE_GRPO
from treegraft.policy.learn.credit import credit_trees
from treegraft.rollout.measure import rollout_metrics
from treegraft.rollout.rounds import sample_rounds
from treegraft.settings.explore import BufferSettings
from treegraft.settings.load import load_config
from treegraft.settings.policy import LossSettings
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.keys import split_steps
from treegraft.traces.retrieve import BufferRetriever
from treegraft.traces.rollout_buffer import own_traces


def path_of(*words: str, answer: str | None = "w9", reward: float = 1.0) -> tuple[Trace, ...]:
    """A stored trajectory that searches each word, then answers."""
    steps = [
        StepContent(
            calls=(ToolCall("search", word),), observations=(Observation(text=f"{word} w2"),)
        )
        for word in words
    ]
    if answer is not None:
        steps.append(StepContent(answer=answer))
    name = "-".join(words)
    return tuple(split_steps("t/0", "w0", steps, reward=reward, source="expert", trajectory=name))


class Kept(OneTrace):
    """A buffer with these trajectories of every task."""

    def __init__(self, *paths: tuple[Trace, ...]) -> None:
        super().__init__(None)
        self._paths = paths

    async def trajectories(self, task: Task) -> Sequence[tuple[Trace, ...]]:
        await asyncio.sleep(0)
        return self._paths


class Opens(Independent):
    """Opens these, one list after the other."""

    def __init__(self, *rounds: Sequence[Start]) -> None:
        self._rounds = list(rounds)
        self.seen: list[tuple[Tree, tuple[Stored, ...]]] = []

    def restarts(self, tree: Tree, stored: Any, max_leaves: int, key: Any) -> Sequence[Start]:
        self.seen.append((tree, tuple(stored)))
        return self._rounds.pop(0) if self._rounds else []


def below(num: int, num_steps: int | None, stored: int = 0) -> Start:
    return Start(num, Below(stored, num_steps, "mine"))


THREE = path_of("w3", "w4", "w5")


# ---------------------------------------------------------------------- the tree


def test_depths_of_one_trajectory_share_its_steps() -> None:
    """Below one stored step, below three, and at the prompt."""
    explorer = Opens([Start(1), below(2, 3), below(1, 1)])
    tree = grow(make(explorer, retriever=Kept(THREE)))
    kinds = {step.id: type(step.cause).__name__ for step in tree.steps[1:]}
    assert kinds == {
        "0.0": "StoredCause",
        "0.0.0": "StoredCause",
        "0.0.0.0": "StoredCause",
        "0.0.0.0.0": "RestartCause",
        "0.0.0.0.1": "RestartCause",
        "0.0.1": "RestartCause",
        "0.1": "StartCause",
        "0.1.0": "ContinuationCause",
    }
    stored = [step for step in tree.steps if isinstance(step.cause, StoredCause)]
    decode = word_tokenizer().decode
    written = " ".join(decode(list(step.token_ids)) for step in stored).split()
    shown = [f"<search> w{n} </search> <result> w{n} w2 </result>" for n in (3, 4, 5)]
    assert written == " ".join(shown).split()
    assert {origin for step in stored for origin in step.origins} == {Origin.RETRIEVED}
    assert not any(mask for step in stored for mask in step.loss_mask)
    assert [path.start_id for path in tree.trajectories()] == [*["0.0.0.0"] * 2, "0.0", "0"]
    # One call was made, at the prompt; three more results were shown.
    assert tree.budget.num_tool_calls == 1 and tree.budget.num_leaves == 4
    metrics = rollout_metrics([tree])
    assert metrics["rollout/num_tool_calls"] == 1
    assert metrics["rollout/retrieved_frac"] == 0
    assert "graft/num_grafts" not in metrics


def test_the_engine_is_given_the_stored_steps_as_the_agent_would_have_written_them() -> None:
    grower = make(Opens([below(1, 2)]), retriever=Kept(THREE))
    tree = grow(grower)
    path = tree.trajectories()[0]
    seen = word_tokenizer().decode(path.token_ids[: -len(path.steps[-1].token_ids)])
    assert "<retrieve>" not in seen and seen.count("<search>") == 2
    assert path_retrieved_frac(path) == 0 and path.num_tool_calls == 0


def test_what_an_explorer_sees_of_stored_trajectories() -> None:
    cut = path_of("w3", answer=None)
    unknown = (replace(THREE[0], value="a text of which nothing is known"), *THREE[1:])
    explorer = Opens([Start(1)])
    grow(make(explorer, retriever=Kept(THREE, cut, unknown)))
    whole, without_answer, text = explorer.seen[0][1]
    assert whole == Stored(num_steps=3, has_answer=True, reward=1.0, source="expert")
    assert (without_answer.num_steps, without_answer.has_answer) == (1, False)
    assert (text.num_steps, text.has_answer) == (0, False)
    assert [len(tree.leaves) for tree, _ in explorer.seen] == [0, 1]


def test_steps_that_leave_no_room_are_not_begun_below() -> None:
    """Seven tokens a step; a rollout has to have 16 left of 37."""
    explorer = Opens([below(1, 3)])
    grow(make(explorer, retriever=Kept(THREE), max_completion_tokens=37))
    size = explorer.seen[0][1][0]
    assert size.num_steps == 3 and size.has_answer
    explorer = Opens([below(1, 3)])
    tree = grow(make(explorer, retriever=Kept(THREE), max_completion_tokens=36))
    assert explorer.seen[0][1][0].num_steps == 2
    # There is no such place, so the rollout begins at the prompt.
    assert [path.start_id for path in tree.trajectories()] == ["0"]


def test_nothing_stored_means_the_prompt() -> None:
    for explorer in (UniformPrefix, WholeTrajectory):
        tree = grow(make(explorer(PrefixSettings(num_restarts=2)), retriever=Kept()))
        assert [path.start_id for path in tree.trajectories()] == ["0"] * 4
    tree = grow(make(UniformPrefix(PrefixSettings(num_restarts=2)), retriever=None))
    assert len(tree.leaves) == 4


def test_a_trajectory_below_stored_steps_is_no_graft_of_rapo() -> None:
    tree = grow(make(Opens([Start(2), below(2, 2)]), retriever=Kept(THREE)))
    credited = assign_credit(tree)
    assert [leaf.retrieval_reward for leaf in credited.leaves] == [0.0] * 4
    assert [leaf.retrieved_frac for leaf in credited.leaves] == [0.0] * 4


# ---------------------------------------------------------------------- rules


def restarts_of(tree: Tree) -> dict[int, int]:
    found: dict[int, int] = {}
    for path in tree.trajectories():
        causes = [step.cause for step in path.steps if isinstance(step.cause, RestartCause)]
        count = causes[-1].num_steps if causes else 0
        found[count] = found.get(count, 0) + 1
    return found


def test_prefixrl_mixes_both_and_draws_the_place_evenly() -> None:
    explorer = UniformPrefix(PrefixSettings(num_restarts=2))
    tree = grow(make(explorer, retriever=Kept(THREE)))
    found = restarts_of(tree)
    assert found.pop(0) == 2 and list(found.values()) == [2]
    bare = replace(tree, leaves=())
    stored = [Stored(num_steps=3, has_answer=True, reward=1.0, source="e")]
    drawn = [explorer.restarts(bare, stored, 4, (seed, "train", 1, "t/0")) for seed in range(300)]
    places = [starts[1].below.num_steps or 0 for starts in drawn if starts[1].below is not None]
    assert sorted(set(places)) == [1, 2, 3]
    assert all(70 < places.count(place) < 130 for place in (1, 2, 3))


def test_only_trajectories_that_were_good_enough_are_used() -> None:
    bad = path_of("w6", reward=0.2)
    tree = grow(make(UniformPrefix(PrefixSettings(num_restarts=2)), retriever=Kept(bad)))
    assert restarts_of(tree) == {0: 4}
    tree = grow(
        make(UniformPrefix(PrefixSettings(num_restarts=2, min_reward=0.1)), retriever=Kept(bad))
    )
    assert restarts_of(tree) == {0: 2, 1: 2}


def test_a_tree_without_a_rollout_is_refused() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        grow(make(Opens([]), retriever=Kept(THREE)))
    assert caught.group_contains(SettingError, match=r"Opens opened no rollout of task 't/0'")


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["buffer.allow_same_task=false"], "settings-contradict"),
        (["buffer.terminal=allow"], "override-idle"),
        (["buffer.min_similarity=0.5"], "override-idle"),
        (["buffer.random_prob=0.5"], "override-idle"),
    ],
)
def test_settings_that_do_not_fit_stored_trajectories(overrides: list[str], code: str) -> None:
    data = tiny(
        explore={"explorers": ["prefix"], "num_leaves": 16}, buffer={"path": "buffer.sqlite"}
    )
    load_config(data, [])
    with raises_code(code):
        load_config(data, overrides)


class Broken(Kept):
    """Fails, or takes longer than any deadline of these tests."""

    async def trajectories(self, task: Task) -> Sequence[tuple[Trace, ...]]:
        if task is TASKS[0]:
            raise OSError("database is locked")
        await asyncio.sleep(60)
        return self._paths


@pytest.mark.parametrize("task", TASKS[:2])
def test_law_8_and_9_a_lookup_that_fails_or_hangs_means_the_prompt(
    task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    grower = make(
        UniformPrefix(PrefixSettings(num_restarts=2)), retriever=Broken(THREE), deadline_s=2.0
    )
    tree = grow(grower, task)
    assert [path.start_id for path in tree.trajectories()] == ["0"] * 4
    assert not any(leaf.status is Status.FAILED for leaf in tree.leaves)
    why = "OSError: database is locked" if task is TASKS[0] else "rollout.deadline_s = 2.0 s"
    assert why in caplog.text


# ---------------------------------------------------------------------- whole trajectories


def test_a_whole_trajectory_is_a_leaf_with_its_own_reward() -> None:
    explorer = WholeTrajectory(PrefixSettings(rule="whole", num_restarts=1))
    tree = grow(make(explorer, lambda _: "w7", retriever=Kept(THREE)))
    assert len(tree.leaves) == 4
    (own,) = [path for path in tree.trajectories() if path.is_stored]
    assert (own.leaf.status, own.leaf.answer, own.reward) == (Status.COMPLETED, "w9", 1.0)
    decode = word_tokenizer().decode
    taught = [decode(list(step.lesson_ids)) for step in own.steps[1:]]
    assert taught[0].split() == ["<search>", "w3", "</search>"] and "w9" in taught[-1]
    assert not any(own.loss_mask) and tree.budget.num_leaves == 4
    metrics = rollout_metrics([tree])
    # What the agent did: one step without a call, by three rollouts.
    assert metrics["reward/mean"] == -1 and metrics["reward/std"] == 0
    assert metrics["rollout/accuracy"] == metrics["rollout/completed_frac"] == 0
    assert metrics["rollout/violation_frac"] == 1
    assert metrics["rollout/num_trajectories"] == 4


def test_two_equal_trajectories_are_one_leaf() -> None:
    explorer = WholeTrajectory(PrefixSettings(rule="whole", num_restarts=2))
    tree = grow(make(explorer, retriever=Kept(THREE, THREE)))
    assert sum(path.is_stored for path in tree.trajectories()) == 1 and len(tree.leaves) == 4


# ---------------------------------------------------------------------- credit


def restarted(*parts: Part) -> Tree:
    """A tree whose steps of r are stored ones; what is sampled below them begins there."""
    tree = build_tree(Part.of("pp", *parts))
    by_id = {step.id: step for step in tree.steps}

    def caused(step: Step) -> Step:
        if step.origin is Origin.RETRIEVED:
            return replace(step, cause=StoredCause(source="expert", reward=1.0))
        above = by_id.get(str(step.parent))
        if above is not None and above.origin is Origin.RETRIEVED:
            return replace(step, cause=RestartCause(rule="mine", num_steps=above.depth))
        return step

    return replace(tree, steps=tuple(map(caused, tree.steps)))


def test_leaves_are_compared_where_they_began() -> None:
    """At the prompt 1 and 0; below one stored step 1, 1, -1; below two a single 0."""
    tree = restarted(
        Part.of(
            "rr",
            Part.of("rrr", Part("s", reward=0.0)),
            Part("ss", reward=1.0),
            Part("ss", reward=1.0),
            Part("s", reward=-1.0),
        ),
        Part("s", reward=1.0),
        Part("s", reward=0.0),
    )
    credited = assign_credit(tree, advantage="dr_grpo")
    found = [leaf.advantage for leaf in credited.leaves]
    assert found == pytest.approx([0.0, 2 / 3, 2 / 3, -4 / 3, 0.5, -0.5])
    together = assign_credit(tree, advantage="dr_grpo", restarts="together")
    assert [leaf.advantage for leaf in together.leaves] == pytest.approx(
        [-1 / 3, 2 / 3, 2 / 3, -4 / 3, 2 / 3, -1 / 3]
    )
    assert by_place([path.start_id for path in tree.trajectories()]) == [[0], [1, 2, 3], [4, 5]]
    (whole,) = batch_outcomes([tree], has_baseline=True, restarts="together")
    assert whole[4] - whole[0] == pytest.approx(whole[0] - whole[3])
    assert whole[1] == whole[2] == whole[4] > whole[0] == whole[5]
    config = load_config(
        tiny(
            explore={"explorers": ["prefix"]},
            buffer={"path": "b"},
            credit={"advantage": "reinforce++-baseline", "restarts": "together"},
        )
    )
    (by_settings,) = credit_trees([tree], config)
    assert [leaf.advantage for leaf in by_settings.leaves] == whole.tolist()
    (baseline,) = batch_outcomes([tree], has_baseline=True)
    # Whitened over the batch's tokens, whose mean is not 0: relative to the single one.
    relative = baseline - baseline[0]
    assert relative[1] == relative[2] > 0 > relative[3]
    assert relative[4] == pytest.approx(-relative[5]) and relative[4] > 0
    weights = assign_credit(tree, leaf_weight="inverse_branching").leaves
    assert [leaf.weight for leaf in weights] == pytest.approx([1 / 6] * 6)


def test_tree_grpo_compares_each_rollout_below_stored_steps_with_itself() -> None:
    """Three of them at one place, of which the first branched."""
    twins = Part.of("st", Part("s", reward=1.0), Part("s", reward=0.0))
    tree = restarted(Part.of("rr", twins, Part("ss", reward=0.0), Part("s", reward=1.0)))
    leaves = assign_credit(tree, advantage=TREE_GRPO, eps=1e-15).leaves
    # Mean 1/2 and deviation 1/√3 over the place; ± 1/√2 within the rollout that branched.
    place = math.sqrt(3) / 2
    start = 1 / math.sqrt(2)
    assert [leaf.advantage for leaf in leaves] == pytest.approx(
        [place + start, -place - start, -place, place]
    )


def test_groups_that_vary_between_places_alone_teach_nothing() -> None:
    """All equal at each place, so dynamic sampling drops the tree."""
    tree = restarted(
        Part.of("rr", Part("s", reward=1.0), Part("s", reward=1.0)),
        Part("s", reward=0.0),
        Part("s", reward=0.0),
    )
    assert [leaf.advantage for leaf in assign_credit(tree).leaves] == [0.0] * 4

    async def give(_: Any) -> list[Tree]:
        return [tree]

    sampled = asyncio.run(sample_rounds(lambda *_: [tree.task], give, size=1, max_rounds=2))
    assert sampled.num_drawn == 2


# ---------------------------------------------------------------------- law 1


def deep() -> Tree:
    """Rollouts at the prompt, below one stored step and below two."""
    tree = restarted(
        Part.of(
            "rrr",
            Part.of("rr", Part.of("sst", Part("ss", reward=1.0)), Part("s", reward=0.0)),
            Part("sss", reward=1.0),
            Part("s", reward=-1.0),
        ),
        Part.of("sst", Part("s", reward=1.0)),
        Part("ss", reward=0.0),
    )
    return assign_credit(tree)


@pytest.mark.parametrize(
    "loss",
    [
        LossSettings(aggregation="sequence-mean"),
        LossSettings(aggregation="token-mean", graft_coef=1.0),
        LossSettings(objective="gspo", clip_low=0.01, clip_high=0.02),
    ],
    ids=["grpo", "dapo", "gspo"],
)
def test_law_1_below_stored_steps(loss: LossSettings) -> None:
    """Stored steps are in no loss, length or shaping, however deep the leaves stand below them."""
    trees = [deep()]
    model = build_model("llama")
    twin = build_model("llama")
    learner, descent = make_learner(model, loss)
    _, metrics = learner.learn(trees)
    expected = slow_loss(twin, trees, loss.model_copy(update={"shaping_weight": 0.0}), 7.0)
    expected.backward()
    assert abs(metrics["learn/loss"] - float(expected.detach())) < 1e-6
    assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5


def with_whole(**credit: Any) -> Tree:
    """Two rollouts, and a stored trajectory of two steps whose agent wrote 2 and 3 tokens."""
    tree = restarted(
        Part("ss", reward=0.0),
        Part("sss", reward=0.5),
        Part.of("rrrr", Part("rrr", reward=1.0, lesson=3), lesson=2),
    )
    return assign_credit(tree, **credit)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "sequence-sum"])
def test_law_1_luffys_loss_on_a_whole_trajectory(aggregation: Any) -> None:
    """-A π/(π + .1) on the tokens that its agent wrote, each after those above its step."""
    loss = LossSettings(aggregation=aggregation, graft_coef=1.0, graft_form="luffy")
    tree = with_whole(advantage="dr_grpo")
    assert [leaf.advantage for leaf in tree.leaves] == pytest.approx([-0.5, 0.0, 0.5])
    model = build_model("llama")
    twin = build_model("llama")
    learner, descent = make_learner(model, loss)
    _, metrics = learner.learn([tree])
    own, _, stored = tree.trajectories()
    # 2 + 3 + 5 tokens of three leaves, each with weight 1/3.
    whole = {"token-mean": 1 / 10, "sequence-mean": 1 / 15, "sequence-sum": 1 / 21}[aggregation]
    first = {"token-mean": 1 / 10, "sequence-mean": 1 / 6, "sequence-sum": 1 / 21}[aggregation]
    logprobs = plain_scores(twin, own)[0]
    total = first * 0.5 * torch.exp(logprobs - logprobs.detach()).sum()
    above = stored.steps[0].token_ids.tolist()
    for step in stored.steps[1:]:
        ids = torch.tensor([[*above, *step.lesson_ids]])
        rows = torch.log_softmax(twin(input_ids=ids, use_cache=False).logits[0].float(), dim=-1)
        for offset, token in enumerate(step.lesson_ids):
            chance = rows[len(above) + offset - 1, token].exp()
            total = total - whole * 0.5 * chance / (chance + 0.1)
        above += step.token_ids.tolist()
    total.backward()
    assert abs(metrics["learn/loss"] - float(total.detach())) < 1e-6
    assert distance(descent.gradients[0], gradient_of(twin)) < 1e-5


def test_a_whole_trajectory_teaches_where_all_rollouts_fail() -> None:
    """The rollouts lose what the stored trajectory wins."""
    tree = restarted(
        Part("ss", reward=0.0), Part("s", reward=0.0), Part("rrr", reward=1.0, lesson=2)
    )
    credited = assign_credit(tree, advantage="dr_grpo")
    assert [leaf.advantage for leaf in credited.leaves] == pytest.approx([-1 / 3, -1 / 3, 2 / 3])
    learner, _ = make_learner(build_model("llama"), LossSettings(graft_coef=1.0))
    _, metrics = learner.learn([credited])
    assert metrics["learn/skipped_groups_frac"] == 0 and metrics["learn/loss"] > 0


# ---------------------------------------------------------------------- where they come from


def test_trajectories_of_a_task_best_first(tmp_path: Path) -> None:
    """Of the task itself, without gaps, by reward and then by length."""
    short = path_of("w3")
    long = path_of("w4", "w5")
    poor = path_of("w6", reward=0.5)
    gap = path_of("w7", "w8")[1:]
    other = tuple(replace(trace, task_id="t/1") for trace in short)
    answers = [StepContent(thought="so", answer="w9")]
    elsewhere = tuple(split_steps("t/0", "w8", answers, reward=1.0, source="x", trajectory="a"))
    with TraceBuffer(tmp_path / "b.sqlite", "hashing") as buffer:
        for path in (poor, long, short, gap, other, elsewhere):
            buffer.add(path)
        retriever = BufferRetriever(buffer, BufferSettings())
        assert asyncio.run(retriever.trajectories(TASKS[0])) == [short, long, poor]
        none = BufferRetriever(buffer, BufferSettings(allow_same_task=False))
        assert asyncio.run(none.trajectories(TASKS[0])) == []
        retriever.close()


# ---------------------------------------------------------------------- environments


def enter(*results: str) -> tuple[Trace, ...]:
    """A stored way through the door, with these results of taking the key and unlocking."""
    calls = (ToolCall("take", "w3"), ToolCall("unlock", "w5"), ToolCall("enter", "w5"))
    steps = [
        StepContent(calls=(call,), observations=(Observation(text=text),))
        for call, text in zip(calls, results, strict=False)
    ]
    steps.append(StepContent(answer="w9"))
    return tuple(
        split_steps("t/0", "w0", steps, reward=1.0, source="expert", trajectory=results[-1])
    )


@pytest.mark.parametrize("made", [CopiedKeyDoor, ReplayedKeyDoor])
def test_environments_stand_where_the_stored_steps_end(made: type) -> None:
    """Below two stored calls the door is unlocked, so that going in alone succeeds."""
    told = worlds.seen(worlds.grow(worlds.make(made, worlds.by_plan(*worlds.WAY_IN))))[0]
    explorer = Opens([Start(1), below(2, 2)])
    grower = worlds.make(
        made, worlds.by_plan(*worlds.WAY_IN), explorer, retriever=Kept(enter(*told)), num_leaves=3
    )
    tree = worlds.grow(grower)
    assert worlds.seen(tree) == [told] * 3
    assert [path.reward for path in tree.trajectories()] == [1.0] * 3
    # Three calls at the prompt and one each below; the stored ones are not counted.
    assert tree.budget.num_tool_calls == 5


def test_a_trajectory_that_the_environment_contradicts_is_left_out() -> None:
    false = enter("w1", "w8", "w8")
    explorer = Opens([Start(1), below(1, 2)], [below(1, 1)])
    grower = worlds.make(
        CopiedKeyDoor, worlds.by_plan(*worlds.WAY_IN), explorer, retriever=Kept(false), num_leaves=3
    )
    tree = worlds.grow(grower)
    assert [path.start_id for path in tree.trajectories()] == ["0"] * 3
    assert [sizes[0].num_steps for _, sizes in explorer.seen] == [3, 0, 0]


class Ending(CopiedKeyDoor):
    """The same, over once the agent is inside."""

    @property
    def done(self) -> bool:
        return bool(self.is_inside)


def test_a_stored_result_is_shown_as_the_environment_words_it() -> None:
    """Whoever stored it did not write that the episode was over; the agent is told."""
    told = worlds.seen(worlds.grow(worlds.make(Ending, worlds.by_plan(*worlds.WAY_IN))))[0]
    plain, note = told[-1].split("\n")
    assert "over" in note
    kept = Kept(enter(*told[:-1], plain))
    explorer = Opens([Start(1), below(1, None)])
    tree = worlds.grow(worlds.make(Ending, worlds.by_plan(), explorer, retriever=kept))
    (stored,) = (path for path in tree.trajectories() if path.is_stored)
    shown = [one.text for content in stored.contents for one in content.observations]
    assert shown == [*told[:-1], told[-1]]


def test_a_whole_trajectory_has_the_environments_reward() -> None:
    told = worlds.seen(worlds.grow(worlds.make(CopiedKeyDoor, worlds.by_plan(*worlds.WAY_IN))))[0]
    grower = worlds.make(
        CopiedKeyDoor,
        worlds.by_plan(),
        Opens([Start(1), below(1, None)]),
        retriever=Kept(enter(*told)),
    )
    rewards = {path.is_stored: path.reward for path in worlds.grow(grower).trajectories()}
    assert rewards[True] == 1.0 and rewards[False] != 1.0


def test_own_traces_are_not_those_of_a_stored_leaf() -> None:
    """The best is the stored one, in the buffer already; the second best is the agent's."""
    tree = grow(make(Opens([below(1, None), Start(2)]), by_step, retriever=Kept(THREE)))
    (traces,) = own_traces([tree], num_best=1, min_reward=1.0, update=3)
    assert [trace.source for trace in traces] == ["self", "self"]


def test_together_with_an_explorer_of_ones_own() -> None:
    both = Composed([UniformPrefix(PrefixSettings(num_restarts=2)), Independent()])
    assert restarts_of(grow(make(both, retriever=Kept(THREE)))).get(0) == 2
    assert not isinstance(Composed([Independent()]), Restarting)
