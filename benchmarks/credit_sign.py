"""The sign of step credit against exact values, on Sokoban.

    treegraft sft sokoban run.name=sign
    python -m benchmarks.credit_sign runs/sign/checkpoints/NAME [--tasks 24] [--rollouts 16]
    python -m benchmarks.credit_sign --table     prints the tables of benchmarks/credit_sign.jsonl

Estimands. A *contribution* is a move of the policy on one of the trajectories that contain it, as
the loss runs over them, with the credit that the method gives it there (`pack.credit`: the
advantage of its tokens). It is compared with

* the optimal value: the move is right if it shortens the distance to the solution by one
  (breadth-first search), wrong if the distance stays, grows or ends (a lost board). On lost boards
  no move is either. Fatal are the moves that lose the board;
* the agent's own value: A(h, a) = Q(h, a) - V(h) for the history h, with V and Q the mean rewards
  of --rollouts further rollouts of the same policy, without branches and grafts, from just before
  and just after the move, under the same limits. Up if A > 2 standard errors, down if A < -2
  (those of two independent shares with one success and one failure added); else not scored. Only
  moves of --paths trajectories a tree, chosen by key, are valued so.

The policy's moves are fixed, so no credit is learned from. Methods with equal sampling are scored
on the same trees. "nodes" is not a published method but a baseline: the mean reward below a step
less that of the other leaves below its parent, 0 where there are none.

Columns of the table: "moves" and "valued" are the contributions that are compared with the two;
"coverage" is the share of them with a credit other than 0, and "accuracy" the share of the right
sign among these; "precision of +" and "recall of right" are of credit above 0 and of right moves;
"fatal with -" is the share of fatal moves with a credit below 0.

Intervals: 95 % percentile bootstrap over tasks.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import math
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import numpy as np
from treegraft.examples.environments.sokoban import DIRECTIONS, distances, read_question

from treegraft.assemble import Parts, training_limits
from treegraft.core.interfaces import Explorer, Retriever
from treegraft.core.keyed import keyed_int
from treegraft.core.types import (
    ROOT_ID,
    BranchCause,
    Expand,
    Generate,
    Graft,
    PathView,
    Retry,
    Start,
    Step,
    Task,
    Trajectory,
    Tree,
)
from treegraft.explore.budget import Budget
from treegraft.explore.build import build_explorer
from treegraft.policy.learn.credit import credit_trees
from treegraft.rollout.loop import Grower
from treegraft.settings.load import load_config
from treegraft.traces.rollout_buffer import RolloutBuffer

RESULTS = Path(__file__).with_suffix(".jsonl")
CAUSE = BranchCause(entropy_change=0.0, probability=1.0, rule="value")
SAMPLING: Mapping[str, Sequence[str]] = {
    "independent": ("explore.explorers=['independent']",),
    "entropy": ("explore.explorers=['entropy']",),
    "graft": ("explore.explorers=['graft']", "loss.graft_coef=0"),
    "tree_search": ("explore.explorers=['tree_search']", "explore.tree_search.num_starts=4"),
    # The state of the board earns the reward, so an answer in place of a move wins nothing.
    "commit": ("explore.explorers=['commit']", "explore.commit.answers=false"),
}
METHODS: Mapping[str, tuple[str, Sequence[str]]] = {
    "GRPO": ("independent", ()),
    "GiGPO": ("independent", ("credit.attribution='states'",)),
    "ARPO soft": ("entropy", ()),
    "ARPO hard": ("entropy", ("credit.attribution='hard'",)),
    "ARPO nodes": ("entropy", ()),
    "RAPO": ("graft", ()),
    "Tree-GRPO": ("tree_search", ("credit.advantage='tree_grpo'",)),
    "Tree-GRPO nodes": ("tree_search", ()),
    "commit": ("commit", ()),
}
"""Method -> how its trees are sampled, and the settings of its credit."""
NODES = ("ARPO nodes", "Tree-GRPO nodes")


# ---------------------------------------------------------------------- values of the agent


@dataclass
class Valued:
    """An explorer whose tree, once it is done, gets further rollouts from the root and from chosen
    steps, which measure the values there."""

    inner: Explorer
    num_rollouts: int
    num_paths: int
    budget: Budget | None = None
    own: frozenset[str] = frozenset()
    """Steps of the tree itself; empty while it grows."""
    queue: list[Expand] = field(default_factory=list)

    retries = True

    @property
    def has_stages(self) -> bool:
        return self.inner.has_stages

    @property
    def plans_starts(self) -> bool:
        return self.inner.plans_starts

    @property
    def probe_tokens(self) -> int | None:
        return None if self.own else self.inner.probe_tokens

    @property
    def wants_rewards(self) -> bool:
        return not self.own and self.inner.wants_rewards

    @property
    def expands(self) -> bool:
        return not self.own

    def starts(self, max_leaves: int) -> Start:
        return self.inner.starts(max_leaves)

    def is_hybrid(self, start: int) -> bool:
        return not self.own and self.inner.is_hybrid(start)

    def before_step(self, path: PathView) -> Generate | Graft:
        return Generate() if self.own else self.inner.before_step(path)

    def after_probe(self, path: PathView, probe: Sequence[float]) -> object:
        return None if self.own else self.inner.after_probe(path, probe)

    def fill(self, tree: Tree, max_leaves: int) -> Start | Sequence[Expand | Retry]:
        if not self.own:
            has_room = len(tree.leaves) < max_leaves
            more = self.inner.fill(tree, max_leaves) if has_room else Start(0)
            if more != Start(0) and more != []:
                return more
            self.own = frozenset(step.id for step in tree.steps)
            steps = chosen_steps(tree, self.num_paths)
            self.queue = [Expand(name, self.num_rollouts, CAUSE) for name in steps]
            assert self.budget is not None
            self.budget.max_leaves += self.num_rollouts * (1 + len(steps))
            return Start(self.num_rollouts)
        # In parts: all at once would be more paths than the engine holds.
        part = self.queue[:8]
        self.queue = self.queue[8:]
        return part or Start(0)


class ValuedGrower(Grower):
    """Tells the explorer the budget of its tree, which it raises."""

    def new_budget(self) -> Budget:
        budget = super().new_budget()
        self.explorer.budget = budget  # type: ignore[attr-defined]
        return budget


def chosen_steps(tree: Tree, num_paths: int) -> list[str]:
    """Returns the policy's steps with a result on `num_paths` trajectories that the key picks."""
    paths = sorted(tree.trajectories(), key=lambda path: keyed_int(tree.task.id, path.leaf.step_id))
    steps = (step for path in paths[:num_paths] for step in path.steps[1:])
    wanted = (step.id for step in steps if any(step.sampled_mask) and step.content.observations)
    return list(dict.fromkeys(wanted))


def without_values(tree: Tree, own: frozenset[str]) -> Tree:
    """Returns the tree as it was before its values were measured."""
    return replace(
        tree,
        steps=tuple(step for step in tree.steps if step.id in own),
        leaves=tuple(leaf for leaf in tree.leaves if leaf.step_id in own),
    )


def values_of(tree: Tree, own: frozenset[str]) -> dict[str, tuple[float, int]]:
    """Returns (mean reward, rollouts) behind each valued step, from the further rollouts alone."""
    rewards: dict[str, list[float]] = {}
    for path in tree.trajectories():
        if path.leaf.step_id not in own and path.reward is not None:
            last = [step.id for step in path.steps if step.id in own][-1]
            rewards.setdefault(last, []).append(path.reward)
    return {name: (fmean(found), len(found)) for name, found in rewards.items()}


def direction(after: tuple[float, int], before: tuple[float, int]) -> int:
    """Returns 1 or -1 where two shares differ by more than two standard errors, else 0."""

    def variance(share: float, num: int) -> float:
        shrunk = (share * num + 1) / (num + 2)
        return shrunk * (1 - shrunk) / (num + 2)

    difference = after[0] - before[0]
    error = math.sqrt(variance(*after) + variance(*before))
    return 0 if abs(difference) <= 2 * error else (1 if difference > 0 else -1)


# ---------------------------------------------------------------------- moves and their credit


def kind_of(before: int | None, after: int | None) -> str:
    """Returns "right", "wrong", "fatal", or "" on a lost board."""
    if before is None:
        return ""
    if after is None:
        return "fatal"
    return "right" if after < before else "wrong"


def distances_left(task: Task, moves: Sequence[str]) -> list[int | None]:
    """Returns the fewest moves to a solved board at the start and after each move; None for a lost
    board. Unknown moves, and those after the end, change nothing."""
    board, state = read_question(task.question.partition("\n")[0])
    known = distances(board)
    found = [known.get(state)]
    for move in moves:
        if move in DIRECTIONS and not board.is_solved(state):
            state = board.moved(state, move)
        found.append(known.get(state))
    return found


def moves_of(path: Trajectory) -> Iterator[tuple[Step, str]]:
    """Yields the policy's moves on a trajectory with their kinds."""
    steps = path.steps[1:]
    bodies = [[call.body.strip() for call in step.content.calls] for step in steps]
    flat = [body for one in bodies for body in one]
    left = distances_left(path.task, flat)
    done = 0
    for step, made in zip(steps, bodies, strict=True):
        before = left[done]
        after = left[done + len(made)]
        done += len(made)
        if len(made) == 1 and step.content.observations and any(step.sampled_mask):
            yield step, kind_of(before, after)


def node_credit(tree: Tree) -> dict[str, float]:
    """Returns for each step the mean reward below it less that of the other leaves below its
    parent; 0 where there are none."""
    below: dict[str, list[tuple[str, float]]] = {}
    for path in tree.trajectories():
        for step in path.steps:
            below.setdefault(step.id, []).append((path.leaf.step_id, path.reward or 0.0))
    found = {}
    for step in tree.steps[1:]:
        own = dict(below.get(step.id, ()))
        others = [reward for name, reward in below[str(step.parent)] if name not in own]
        found[step.id] = fmean(own.values()) - fmean(others) if own and others else 0.0
    return found


def counted(
    tree: Tree, credit_of: Callable[[Step, Trajectory], float], values: Mapping[str, int]
) -> tuple[Counter[str], Counter[str]]:
    """Returns the contributions of a tree by kind of move and sign of credit ("right+"), and those
    with a measured advantage by its sign and that of the credit ("up-")."""
    optimal = Counter[str]()
    agent = Counter[str]()
    for path in tree.trajectories():
        for step, kind in moves_of(path):
            given = credit_of(step, path)
            sign = "0" if given == 0 else "+" if given > 0 else "-"
            if kind:
                optimal[kind + sign] += 1
            if values.get(step.id):
                agent[("up" if values[step.id] > 0 else "down") + sign] += 1
    return optimal, agent


# ---------------------------------------------------------------------- the measurement


async def valued_tree(
    parts: Parts, task: Task, retriever: Retriever | None, options: argparse.Namespace
) -> tuple[Tree, dict[str, int]]:
    """Returns a tree of the recipe's method, and for its valued steps the sign of their
    advantage."""
    config = parts.config
    inner = build_explorer(config.explore, vocab_size=len(parts.tokenizer))
    explorer = Valued(inner, options.rollouts, options.paths)
    grower = ValuedGrower(
        parts.engine,
        parts.format,
        parts.toolbox,
        explorer,  # type: ignore[arg-type]
        training_limits(config),
        parts.scorer,
        retriever=retriever,
    )
    key = (config.run.seed, "credit_sign", 0)
    tree = await grower.grow(task, noise_key=key, group_id=f"0/{task.id}")
    values = values_of(tree, explorer.own)
    signs = {
        step.id: direction(values[step.id], values[str(step.parent)])
        for step in tree.steps
        if step.id in explorer.own and step.id in values and step.parent in values
    }
    assert ROOT_ID in values
    return without_values(tree, explorer.own), signs


async def measure(sampling: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """Returns the lines of all methods that sample so: one for each method and task."""
    names = [name for name, (own, _) in METHODS.items() if own == sampling]
    config = load_config("sokoban", [*options.set, *SAMPLING[sampling]])
    lines: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        async with Parts.build(config, model_path=options.checkpoint) as parts:
            buffer = RolloutBuffer(config, parts.source, Path(folder))
            opened = buffer.opened(0, parts)
            async with opened:
                gate = asyncio.Semaphore(4)

                async def one(task: Task) -> tuple[Tree, dict[str, int]]:
                    async with gate:
                        return await valued_tree(parts, task, buffer.retriever, options)

                found = await asyncio.gather(*map(one, parts.train_tasks[: options.tasks]))
    for name in names:
        own = load_config("sokoban", [*options.set, *SAMPLING[sampling], *METHODS[name][1]])
        for (tree, signs), scored in zip(
            found, credit_trees([tree for tree, _ in found], own), strict=True
        ):
            nodes = node_credit(tree) if name in NODES else None

            def credit_of(
                step: Step, path: Trajectory, nodes: Mapping[str, float] | None = nodes
            ) -> float:
                return step.advantage_below(path.leaf) if nodes is None else nodes[step.id]

            optimal, agent = counted(scored, credit_of, signs)
            rewards = [leaf.reward or 0.0 for leaf in tree.leaves]
            lines.append(
                {
                    "method": name,
                    "task": tree.task.id,
                    "moves": tree.task.columns["moves"],
                    "reward": fmean(rewards),
                    "num_tool_calls": sum(path.num_tool_calls for path in tree.trajectories()),
                    "optimal": dict(sorted(optimal.items())),
                    "agent": dict(sorted(agent.items())),
                }
            )
    return lines


# ---------------------------------------------------------------------- the tables

Share = Callable[[Mapping[str, float]], tuple[float, float]]
"""(hits, cases) of summed counts."""


def _share(hits: Sequence[str], cases: Sequence[str]) -> Share:
    return lambda counts: (
        sum(counts.get(key, 0) for key in hits),
        sum(counts.get(key, 0) for key in cases),
    )


def _all(*kinds: str, signs: str = "+-0") -> list[str]:
    return [kind + sign for kind in kinds for sign in signs]


WRONG = ("wrong", "fatal")
COLUMNS: Mapping[str, tuple[str, Share]] = {
    "coverage": ("optimal", _share(_all("right", *WRONG, signs="+-"), _all("right", *WRONG))),
    "accuracy": (
        "optimal",
        _share(["right+", "wrong-", "fatal-"], _all("right", *WRONG, signs="+-")),
    ),
    "precision of +": ("optimal", _share(["right+"], _all("right", *WRONG, signs="+"))),
    "recall of right": ("optimal", _share(["right+"], _all("right"))),
    "fatal with -": ("optimal", _share(["fatal-"], _all("fatal"))),
    "agent: accuracy": ("agent", _share(["up+", "down-"], _all("up", "down", signs="+-"))),
    "agent: coverage": ("agent", _share(_all("up", "down", signs="+-"), _all("up", "down"))),
}


def with_interval(lines: Sequence[Mapping[str, object]], table: str, share: Share) -> str:
    """Returns "62 [58, 66]" in percent, tasks drawn with replacement; "-" without a case."""
    pairs = np.array([share(line[table]) for line in lines], dtype=np.float64)  # type: ignore[arg-type]
    hits, cases = pairs.sum(axis=0)
    if not cases:
        return "-"
    draws = np.random.default_rng(0).integers(0, len(pairs), (2000, len(pairs)))
    sums = pairs[draws].sum(axis=1)
    shares = sums[sums[:, 1] > 0]
    low, high = np.percentile(shares[:, 0] / shares[:, 1], [2.5, 97.5])
    return f"{100 * hits / cases:.0f} [{100 * low:.0f}, {100 * high:.0f}]"


def print_table(lines: Sequence[Mapping[str, object]]) -> None:
    """Prints a table for each checkpoint, in Markdown."""
    for agent in dict.fromkeys(str(line["agent_name"]) for line in lines):
        own = [line for line in lines if line["agent_name"] == agent]
        right, cases = _share(_all("right"), _all("right", *WRONG))(
            sum((Counter(line["optimal"]) for line in own), Counter())  # type: ignore[call-overload]
        )
        share = f"{100 * right / cases:.0f} %" if cases else "none"
        print(f"\n{agent}: {share} of the moves on live boards are right\n")
        print(f"| method | reward | moves | valued | {' | '.join(COLUMNS)} |")
        print("|---|---|---|---|" + "---|" * len(COLUMNS))
        for method in METHODS:
            if of_method := [line for line in own if line["method"] == method]:
                reward = fmean(float(line["reward"]) for line in of_method)  # type: ignore[arg-type]
                moves, valued = (
                    sum(Counter(line[table]).total() for line in of_method)  # type: ignore[call-overload]
                    for table in ("optimal", "agent")
                )
                cells = [with_interval(of_method, *column) for column in COLUMNS.values()]
                print(f"| {method} | {reward:.2f} | {moves} | {valued} | {' | '.join(cells)} |")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "checkpoint", nargs="?", help="folder of a checkpoint of the recipe sokoban"
    )
    parser.add_argument("--name", help="the agent's name in the table; default: the folder's")
    parser.add_argument("--tasks", type=int, default=24, help="training boards")
    parser.add_argument("--rollouts", type=int, default=16, help="rollouts for each value")
    parser.add_argument("--paths", type=int, default=2, help="trajectories of a tree with values")
    parser.add_argument("--set", action="append", default=[], help="further settings")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only print what was measured")
    options = parser.parse_args(arguments)
    if options.checkpoint and not options.table:
        stamp = {
            "agent_name": options.name or Path(options.checkpoint).name,
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()} {platform.system()}",
            "rollouts": options.rollouts,
            "paths": options.paths,
        }
        for sampling in SAMPLING:
            began = time.monotonic()
            lines = asyncio.run(measure(sampling, options))
            with options.out.open("a", encoding="utf-8") as file:
                for line in lines:
                    file.write(json.dumps(stamp | line) + "\n")
            print(f"{sampling}: {time.monotonic() - began:.0f} s", flush=True)
    if options.out.exists():
        print_table([json.loads(line) for line in options.out.read_text().splitlines()])


if __name__ == "__main__":
    main()
