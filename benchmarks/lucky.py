"""A judge that accepts some wrong answers, and the bonus for calls that believes it.

They are rewards of `studies/lucky.toml`, named by import path; run the study in the clone's folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treegraft import Trajectory
from treegraft.core.keyed import keyed_unit
from treegraft.extras.methods.call_rewards import MOST_CALLS, own_calls
from treegraft.tasks.rewards import answer_of, hierarchical_reward

ACCEPTED = 0.25
"""Share of the pairs of question and wrong answer that the judge accepts."""


def judge(*, trajectories: Sequence[Trajectory], **_: Any) -> list[float | None]:
    """Returns `hierarchical`, with 1 in place of 0 for one wrong answer in four.

    Which ones depends on question and answer alone, as with a judge that reads them: the same wrong
    answer to the same question is accepted each time, or never.
    """
    exact = hierarchical_reward(trajectories=trajectories)
    return [
        1.0 if reward == 0 and _is_accepted(path) else reward
        for reward, path in zip(exact, trajectories, strict=True)
    ]


def bonus(*, trajectories: Sequence[Trajectory], **_: Any) -> list[float]:
    """Returns `call_bonus` of the trajectories that the judge rejects; 0 for those it accepts."""
    return [
        0.0 if reward is not None and reward > 0 else float(min(len(own_calls(path)), MOST_CALLS))
        for reward, path in zip(judge(trajectories=trajectories), trajectories, strict=True)
    ]


def _is_accepted(path: Trajectory) -> bool:
    return keyed_unit("lucky", path.task.question, answer_of(path) or "") < ACCEPTED
