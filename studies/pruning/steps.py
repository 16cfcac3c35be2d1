"""Steps of stored successes that did nothing, cut out by the likelihood of what follows them.

    D_j = log π(s_{j+1..n} | q, s_1..s_j) - log π(s_{j+1..n} | q, s_1..s_{j-1})
    repeat: j* = argmin_{j<n} D_j;  if D_{j*} < margin: drop s_{j*}, else stop

π is an agent that knows the task's tools: a step that the rest leans on makes the rest likelier, a
detour makes it less likely. A result counts as context only. Greedy and the worst first, since
beside a detour right steps have D < 0 as well. No call is made and nothing is sampled.

In an environment a walk that comes back to where it was is cut first: its single steps are not
idle, since without one of them the next no longer fits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from studies.pruning import judging
from treegraft import Origin, Status, Step, StepContent, Task, Tree
from treegraft.parts import Leaf

Score = Callable[[Sequence[Tree]], Sequence[Mapping[str, float]]]
"""Gives for each tree, by step, Σ log π over the step's tokens of the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A trajectory as the agent would have written it."""

    task: Task
    prompt_ids: tuple[int, ...]
    steps: tuple[judging.Written, ...]
    """In order; the last one answers."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """A step with its D. Weighed(1, -26.9, is_cut=True)"""

    position: int
    """In the trajectory as it was stored."""
    gain: float | None
    """D in nats: of a step that was cut at that moment, of another in the end; None for the answer
    and for a step of a circle."""
    is_cut: bool


def cut_idle_steps(
    trajectories: Sequence[Trajectory],
    score: Score,
    *,
    margin: float = 0.0,
    is_kept: Callable[[StepContent], bool] = lambda content: False,
    circles: Sequence[Collection[int]] = (),
) -> list[list[Weighed]]:
    """Returns for each trajectory its steps in order, each with its D and whether it is cut.

    Args:
        score: is given one tree for each trajectory that is not done yet, round after round.
        margin: nats; a step is cut while its D, the smallest, is below.
        is_kept: steps that stay whatever their D is.
        circles: positions that are cut before anything is weighed, for each trajectory; none for
            an empty sequence.
    """
    gone = circles or [()] * len(trajectories)
    left = [
        [j for j in range(len(one.steps)) if j not in cut]
        for one, cut in zip(trajectories, gone, strict=True)
    ]
    found = [{j: Weighed(j, None, is_cut=True) for j in cut} for cut in gone]
    active = [n for n, positions in enumerate(left) if len(positions) > 1]
    for n, one in enumerate(trajectories):
        last = len(one.steps) - 1
        found[n][last] = Weighed(last, None, is_cut=False)
    while active:
        trees = [deletions_tree(trajectories[n], left[n]) for n in active]
        remaining = []
        for n, sums in zip(active, score(trees), strict=True):
            # The answer has no D.
            gains = dict(zip(left[n][:-1], gains_of(sums, len(left[n])), strict=True))
            found[n] |= {j: Weighed(j, gain, is_cut=False) for j, gain in gains.items()}
            steps = trajectories[n].steps
            loose = [j for j in gains if not is_kept(steps[j].content)]
            worst = min(loose, key=gains.__getitem__, default=None)
            if worst is not None and gains[worst] < margin:
                found[n][worst] = Weighed(worst, gains[worst], is_cut=True)
                left[n].remove(worst)
                if len(left[n]) > 1:
                    remaining.append(n)
        active = remaining
    return [[by_position[j] for j in sorted(by_position)] for by_position in found]


def circling(contents: Sequence[StepContent]) -> list[range]:
    """Returns the positions of the steps that led back to an earlier result, walk by walk: of steps
    with equal results the first stays, and all that lies behind it up to the last is a walk.

        results  a b c b d    ->    steps 2 and 3
    """
    results = [tuple(one.text for one in content.observations) for content in contents]
    last = {result: position for position, result in enumerate(results) if result}
    found = []
    position = 0
    while position < len(results):
        end = last.get(results[position], position)
        if end > position:
            found.append(range(position + 1, end + 1))
        position = end + 1
    return found


def deletions_tree(trajectory: Trajectory, positions: Sequence[int]) -> Tree:
    """Returns the trajectory's steps at these positions as one path, and beside it a branch for
    every step but the last: the rest of the path without that step.

        0: q    0.0: s_1    0.0.0: s_2    0.0.0.0: s_3 = answer     whole
                            0.0.1: s_3                              without s_2
                0.1: s_2    0.1.0: s_3                              without s_1

    What stands before a step that is left out is shared, so it is computed once.
    """
    path = [trajectory.steps[position] for position in positions]
    root = judging.Written(
        StepContent(thought=trajectory.task.question), [(trajectory.prompt_ids, Origin.PROMPT)]
    )
    places = _places(len(path))
    steps: list[Step] = [judging.plain_step(judging.ROOT_ID, None, root)]
    for chain, written in zip(
        places, [path, *(path[j:] for j in range(1, len(path)))], strict=True
    ):
        for step_id, one in zip(chain, written, strict=True):
            steps.append(judging.plain_step(step_id, step_id.rpartition(".")[0], one))
    steps.sort(key=lambda step: step.ordinals)
    ends = sorted((chain[-1] for chain in places), key=lambda name: [*map(int, name.split("."))])
    leaves = (Leaf(step_id=end, status=Status.COMPLETED, weight=1.0 / len(places)) for end in ends)
    return Tree(
        task=trajectory.task,
        group_id=f"prune/{trajectory.task.id}",
        steps=tuple(steps),
        leaves=tuple(leaves),
    )


def gains_of(sums: Mapping[str, float], num_steps: int) -> list[float]:
    """Returns D_1 .. D_{n-1} from the log-probabilities of a `deletions_tree` of n steps."""
    whole, *without = _places(num_steps)
    # From the end: the log-probability of everything after step j.
    after = [*accumulate((sums[name] for name in reversed(whole)), initial=0.0)][::-1]
    return [
        after[j] - sum(sums[name] for name in branch) for j, branch in enumerate(without, start=1)
    ]


def _places(num_steps: int) -> list[list[str]]:
    """Ids of the steps of the whole path, then of each branch: the one without step j begins
    beside step j."""
    whole = [
        *accumulate(["0"] * num_steps, lambda name, one: f"{name}.{one}", initial=judging.ROOT_ID)
    ]
    chains = [whole[1:]]
    for j in range(1, num_steps):
        first = f"{whole[j - 1]}.1"
        chains.append([first + ".0" * k for k in range(num_steps - j)])
    return chains
