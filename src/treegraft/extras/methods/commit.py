"""Commit branching: where every rollout failed, answers are begun in place of calls and calls in
place of answers, deeper and deeper, until one succeeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import fmean
from typing import Any, Literal

from treegraft import Origin, Step, Trajectory, Tree
from treegraft.parts import (
    ExplorerKind,
    Independent,
    Registry,
    Retry,
    RetryCause,
    Settings,
    Start,
    setting,
    value_of,
)

RULE = "commit"
MIN_REWARD = 1.0
"""Reward from which a rollout did not fail: that of a right answer."""


def _quarter_of_the_leaves(config: Any) -> int:
    return max(1, int(value_of(config, "explore.num_leaves")) // 4)


class CommitSettings(Settings):
    """Calls in place of answers where every rollout failed, round after round."""

    num_starts: int = setting(4, ge=1, default_of=_quarter_of_the_leaves)
    """First-level rollouts, at most explore.num_leaves, of which a quarter is the default."""
    num_more: int = setting(0, ge=0)
    """Leaves at the prompt that follow where only some of the first rollouts succeeded, as far as
    explore.num_leaves allows."""
    form: Literal["kept", "anew"] = "kept"
    """What is forced: "kept", the mark that opens the call or the answer, behind the step's own
    thought; "anew", the step's beginning without its thought, up to the first token in which the
    tree's own steps of the other kind differ from it, where there is such a step. For agents that
    decide in their thoughts."""
    answers: bool = True
    """Whether answers are begun in place of calls, too, where no rollout has answered."""


class CommitBranching(Independent):
    """Opens a few first-level rollouts; where all of them failed, what the agent did not do is
    tried on the rollout with the most tool calls, round after round until one succeeds or the
    leaves are used up: first an answer after each of its results that has none, which costs no
    call, then a call in place of the answer at its end.

    Whether an agent answers or goes on is decided by the token that opens the one or the other. An
    agent that goes on with probability p needs p^-n rollouts for n such choices in a row; here they
    take n rounds. With `credit.restarts = "together"` all leaves are compared, so that the choices
    that failed lose probability; with `loss.graft_coef` > 0 the openings on trajectories that beat
    their group are imitated (see `losses.imitated_loss`): no policy gradient, since nobody sampled
    them.

    Ours, not of a paper. It differs from AXPO (arXiv 2605.28774) in its places
    (answers, and calls too many), in its rounds, and in what is learned.
    """

    num_retries = 2
    """Rollouts that go on in place of one answer in each round, the fewest that can differ."""
    expands = True
    retries = True
    wants_rewards = True

    def __init__(self, settings: CommitSettings) -> None:
        self._settings = settings

    def starts(self, max_leaves: int) -> Start:
        """Returns the first-level rollouts, or as many as there are leaves."""
        return Start(min(self._settings.num_starts, max_leaves))

    def fill(self, tree: Tree, max_leaves: int) -> Start | Sequence[Retry]:
        """Returns the next round where every rollout has failed; `num_more` leaves at the prompt,
        once, where only some of the first ones have; nothing after a success otherwise."""
        own = self._settings
        paths = tree.trajectories()
        members = [path for path in paths if path.status.rule.in_group]
        succeeded = [(path.reward or 0.0) >= MIN_REWARD for path in members]
        num_left = max_leaves - len(tree.leaves)
        if any(succeeded):
            # The second stage comes once: these are signs of it, or of a round of retries.
            has_more = len(tree.leaves) > own.num_starts or any(path.is_retry for path in members)
            return Start(0 if has_more or all(succeeded) else min(own.num_more, num_left))
        if num_left < 1:
            return Start(0)
        # What failed once is not begun the same way again.
        tried = {step.cause.beside for step in tree.steps if isinstance(step.cause, RetryCause)}
        return self._stops(members, tried, num_left) or self._calls(members, tried, num_left)

    def _stops(
        self, members: Sequence[Trajectory], tried: set[str], num_left: int
    ) -> Sequence[Retry]:
        """Answers in place of the calls of the rollout with the most, the last call first."""
        if not members or not self._settings.answers:
            return []
        # An answer there exists already, and was wrong.
        answered = {path.steps[-1].before for path in members if _has_answered(path)}
        longest = min(members, key=lambda path: (-path.num_tool_calls, path.steps[-1].ordinals))
        steps = []
        # Below the prompt nothing is known yet.
        for step in longest.steps[2:]:
            is_new = step.before not in answered and step.id not in tried
            if step.content.observations and _is_own(step) and is_new:
                steps.append(step)
        found = []
        # From the end up: an answer after more results is more often right.
        for one in steps[: -num_left - 1 : -1]:
            opening = next(self._openings(one, members, "answer"), ())
            found.append(Retry(one.id, 1, RULE, opens="answer", is_lesson=True, opening=opening))
        return found

    def _calls(
        self, members: Sequence[Trajectory], tried: set[str], num_left: int
    ) -> Start | Sequence[Retry]:
        """Calls in place of the answer that came after the most calls."""
        places = []
        for path in members:
            last = path.steps[-1]
            if _has_answered(path) and _is_own(last) and last.id not in tried:
                places.append((path.num_tool_calls, last))
        if not places:
            return Start(0)
        # Equal ones by their place in the tree.
        _, step = min(places, key=lambda one: (-one[0], -_uncertainty(one[1]), one[1].ordinals))
        begun = list(islice(self._openings(step, members, "call"), self.num_retries))
        ways: list[tuple[str | None, tuple[int, ...]]] = []
        for opening in begun:
            ways.append((None, opening))
        if not ways:
            for name in self._tools(members):
                ways.append((name, ()))
        num = min(max(self.num_retries, len(ways)), num_left)
        found = []
        for place, (tool, opening) in enumerate(ways):
            # Each way once at least; a retry more for the first ones where they do not go up
            # evenly.
            share = num // len(ways) + (place < num % len(ways))
            if share:
                found.append(Retry(step.id, share, RULE, tool, is_lesson=True, opening=opening))
        return found

    def _tools(self, members: Sequence[Trajectory]) -> list[str | None]:
        """The tools whose calls are begun in turn, those that were called; None, if that is one or
        none, for the first one that there is."""
        called: dict[str, None] = {}
        for path in members:
            for step in filter(_is_own, path.steps):
                called |= dict.fromkeys(call.name for call in step.content.calls)
        return [*called] if len(called) > 1 else [None]

    def _openings(
        self, step: Step, members: Sequence[Trajectory], kind: Literal["call", "answer"]
    ) -> Iterator[tuple[int, ...]]:
        """Different beginnings of the tree's own steps of a kind, up to the first token that is not
        the one of `step`, those after the most results first; none if its thought is kept."""
        # Then the format forces the mark alone.
        if self._settings.form == "kept":
            return
        steps = {one.id: one for path in members for one in path.steps[1:] if _is_own(one)}
        seen = set[tuple[int, ...]]()
        for one in sorted(steps.values(), key=lambda one: (-one.depth, one.ordinals)):
            if not self._is_of(one, kind):
                continue
            num = _first_difference(step.written_ids, one.written_ids)
            opening = one.written_ids[: num + 1]
            if num < len(one.written_ids) and opening not in seen:
                seen.add(opening)
                yield opening

    def _is_of(self, step: Step, kind: Literal["call", "answer"]) -> bool:
        """Whether a step answered, or called a tool."""
        return step.content.answer is not None if kind == "answer" else bool(step.content.calls)


def _is_own(step: Step) -> bool:
    """Whether the policy wrote the step, in its format."""
    return step.origin is Origin.POLICY and not step.violation


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """The first place at which two steps differ, the shorter one's length if the other begins with
    it."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def _has_answered(path: Trajectory) -> bool:
    return path.steps[-1].content.answer is not None


def _uncertainty(step: Step) -> float:
    return fmean(step.sampled_entropies)


def register(registry: Registry) -> None:
    """Registers commit branching."""
    registry.explorer(
        "commit",
        ExplorerKind(
            make=lambda explore, facts: CommitBranching(explore.commit),
            title="commit branching",
            leads=True,
            leaves="explore.commit.num_starts",
            opens_at_once=True,
            branches=True,
            begins_below=True,
            compares_together=True,
            teaches=lambda config: True,
        ),
        table=CommitSettings,
    )
