"""Dynamic sampling: rounds of tasks until enough groups vary, and runs that go on with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.tiny import differing, tiny
from tests.support.trees import Part, build_tree

from treegraft.core.types import Task, Tree
from treegraft.rollout.rounds import Trees, sample_rounds
from treegraft.runs.checkpoint import read_state
from treegraft.runs.record import read_metrics, read_trees
from treegraft.tasks.rewards import overlong_reward
from treegraft.train import train

VARIED = (1.0, 0.0)
FLAT = (1.0, 1.0)


def tree_of(task: Task, rewards: Sequence[float], overlong: Sequence[float] = ()) -> Tree:
    tree = build_tree(
        Part("p", tuple(Part("s", reward=one) for one in rewards)), task_id=task.id, seed=1
    )
    leaves = tuple(
        replace(leaf, reward_parts={"overlong": part})
        for leaf, part in zip(tree.leaves, overlong or (0.0,) * len(rewards), strict=True)
    )
    return replace(tree, group_id=f"1/{task.id}", leaves=leaves)


def sample(
    varied: str, *, size: int = 2, max_rounds: int = 3, tasks: str = "abcdefgh"
) -> tuple[Trees, list[str]]:
    """The trees of one update over tasks in the order of the letters, of which some vary."""
    asked: list[str] = []

    def draw(num_drawn: int, without: set[str]) -> list[Task]:
        names = [one for one in tasks[num_drawn : num_drawn + size] if one not in without]
        return [Task(id=one, question="?", reference=()) for one in names]

    async def grow(chosen: Sequence[Task]) -> list[Tree]:
        asked.append("".join(task.id for task in chosen))
        return [tree_of(task, VARIED if task.id in varied else FLAT) for task in chosen]

    found = asyncio.run(sample_rounds(draw, grow, size=size, max_rounds=max_rounds))
    return found, asked


def names(trees: Sequence[Tree]) -> str:
    return "".join(tree.task.id for tree in trees)


def test_one_round_keeps_every_group() -> None:
    found, asked = sample("b", max_rounds=1)
    assert (names(found), names(found.dropped), asked) == ("ab", "", ["ab"])
    assert found.metrics == {"rollout/num_dropped_groups": 0.0}


def test_rounds_go_on_until_enough_groups_vary() -> None:
    found, asked = sample("bcde")
    # b alone in the first round; of c and d one is too many.
    assert (names(found), names(found.dropped), asked) == ("bc", "ad", ["ab", "cd"])
    assert found.num_drawn == 4


def test_the_update_goes_on_with_what_was_found() -> None:
    found, asked = sample("f")
    assert (names(found), names(found.dropped), asked) == ("f", "abcde", ["ab", "cd", "ef"])
    assert found.num_drawn == 6
    # Nothing varies: the first groups, so that there is something to record.
    found, _ = sample("")
    assert (names(found), names(found.dropped)) == ("ab", "cdef")


def test_a_small_set_is_drawn_once() -> None:
    found, asked = sample("z", tasks="abab")
    assert asked == ["ab"] and names(found) == "ab" and found.num_drawn == 2


def test_the_penalty_for_length_is_no_variance() -> None:
    task = Task(id="a", question="?", reference=())

    async def grow(_: Sequence[Task]) -> list[Tree]:
        return [tree_of(task, (1.0, 0.5), overlong=(0.0, -1.0))]

    def rounds(penalty: float) -> int:
        sampling = sample_rounds(lambda *_: [task], grow, size=1, max_rounds=2, penalty=penalty)
        return asyncio.run(sampling).num_drawn

    # 1 and 1/2 + 1/2 are equally right; with a penalty of weight 1/4 they are 1 and 3/4.
    assert (rounds(0.5), rounds(0.25)) == (2, 1)


@pytest.mark.parametrize(
    ("num", "penalty"), [(0, 0.0), (12, 0.0), (13, -0.25), (15, -0.75), (16, -1.0), (20, -1.0)]
)
def test_overlong_by_hand(num: int, penalty: float) -> None:
    """L = 16, B = 4: nothing up to 12 tokens, then a quarter each; results do not count."""
    tree = build_tree(Part.of("p", Part("s" * num + "t" * 30 or "t")))
    found = overlong_reward(trajectories=list(tree.trajectories()), limit=16, buffer=4)
    assert found == [penalty]


def test_a_run_samples_in_rounds_and_resumes(tmp_path: Path) -> None:
    settings = tiny(
        run={"num_updates": 2, "dir": str(tmp_path)},
        rollout={"max_rounds": 3},
        eval={"every": 0, "at_start": False, "at_end": False},
        checkpoint={"every": 1, "keep": 1},
    )
    whole = train(settings, recipe="whole")
    lines = read_metrics(whole.run_dir)[1:]
    size = settings["run"]["tasks_per_update"]
    assert 2 * size <= read_state(whole.checkpoint_dir).num_drawn <= 2 * 3 * size
    for line in lines:
        trees = read_trees(whole.run_dir / "trees" / f"update-{line['update']:06d}.jsonl")
        varies = [len({leaf.reward for leaf in tree.leaves}) > 1 for tree in trees]
        num_kept = len(trees) - int(line["rollout/num_dropped_groups"])
        # What is learned from comes first; one that varies is dropped only as one too many.
        assert num_kept <= size and (all(varies[:num_kept]) or not any(varies))
        assert not any(varies[num_kept:]) or num_kept == size
        assert len({tree.task.id for tree in trees}) == len(trees)
    half = train(settings | {"run": {**settings["run"], "num_updates": 1}}, recipe="half")
    on = train(settings, resume=half.run_dir)
    assert differing(whole.run_dir, on.run_dir) == []
