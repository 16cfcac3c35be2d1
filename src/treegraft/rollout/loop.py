"""Growing trees: one asyncio task per trajectory, their deadlines, and failures that become data.

All leaves of all trees run at once. A slow tool holds up its own trajectory, and at most the branch
decisions of its own tree; no tree waits for another.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from treegraft.core.errors import DataError, EngineError, SettingError
from treegraft.core.interfaces import (
    Conversing,
    Engine,
    Explorer,
    Format,
    NoiseKey,
    Opening,
    Request,
    Restarting,
    Retrieved,
    Retriever,
    Rewriting,
    Span,
    TreeScorer,
)
from treegraft.core.sessions import Point, SessionOpener, Sessions
from treegraft.core.types import (
    ROOT_ID,
    Branch,
    BranchDecision,
    Cause,
    Completion,
    Expand,
    Graft,
    Origin,
    ParsedStep,
    PathView,
    Retry,
    RetryCause,
    Sampling,
    Start,
    Status,
    StepContent,
    StopReason,
    Task,
    Tree,
)
from treegraft.explore.budget import Budget, Rounds
from treegraft.explore.compose import asking
from treegraft.rollout.grafted import grafted
from treegraft.rollout.limits import MIN_ROOM, Limits
from treegraft.rollout.restart import StoredSteps
from treegraft.rollout.tree import OpenPath, OpenTree
from treegraft.settings.config import Config


@dataclass(slots=True)
class Watch:
    """The waits under way, by owner: {"engine": 40, "tool python": 2}."""

    waits: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def waiting(self, owner: str) -> Iterator[None]:
        """Counts one wait for the time of the block."""
        self.waits[owner] += 1
        try:
            yield
        finally:
            self.waits[owner] -= 1

    def __str__(self) -> str:
        """Returns "waiting for engine (40), tool python (2)"; "" where nothing is waited for."""
        waits = [f"{owner} ({count})" for owner, count in sorted(self.waits.items()) if count]
        return f"waiting for {', '.join(waits)}" if waits else ""


class Grower:
    """Grows trees of tasks with one engine, format, toolbox and explorer."""

    def __init__(
        self,
        engine: Engine,
        format: Format,
        toolbox: SessionOpener,
        explorer: Explorer,
        limits: Limits,
        scorer: TreeScorer,
        *,
        retriever: Retriever | None = None,
    ) -> None:
        """Args:
        retriever: where grafts come from; None, as in evaluation, grafts nothing.

        Raises:
            SettingError: the explorer begins calls and answers, and the format cannot.
        """
        if explorer.retries and not isinstance(format, Opening):
            raise SettingError(
                f"explore.explorers: {type(explorer).__name__} begins tool calls and answers for"
                f" the agent, but the format {type(format).__name__} has no methods call_opening"
                " and answer_opening; expected a format with them, as 'tags' is. Write them, or"
                " choose another format or explorer.",
                code="no-opening",
            )
        self.engine = engine
        self.format = format
        self.toolbox = toolbox
        self.explorer = explorer
        self.limits = limits
        self.scorer = scorer
        self.retriever = retriever
        self.watch = Watch()
        self.num_grafts_without_room = 0
        """Retrieved steps that were not attached: the trajectory's token limit was too near."""

    def take_metrics(self) -> dict[str, float]:
        """Returns graft/num_without_room if trees are grafted, and starts counting anew."""
        if self.retriever is None or isinstance(self.explorer, Restarting):
            return {}
        metrics = {"graft/num_without_room": float(self.num_grafts_without_room)}
        self.num_grafts_without_room = 0
        return metrics

    async def grow_all(
        self,
        tasks: Sequence[Task],
        *,
        noise_key: NoiseKey,
        group_prefix: str,
        max_live_trees: int,
        on_tree: Callable[[int, Tree], None] | None = None,
    ) -> list[Tree]:
        """Returns one scored tree per task, in the order of the tasks.

        Args:
            noise_key: (seed, purpose, update); task ids and step ids are appended to it.
            group_prefix: goes before the task id in `group_id`.
            max_live_trees: trees that grow at once; more would only wait for rows of the engine.
            on_tree: called with (number of trees done, tree) as each one ends.

        Raises:
            EngineError: the engine has died, or every trajectory of every tree failed for a reason
                of ours.
        """
        # Tasks in their order, so that the first trees end while others wait.
        gate = asyncio.Semaphore(max_live_trees)
        number = itertools.count(1)

        async def grow(task: Task) -> Tree:
            group_id = f"{group_prefix}/{task.id}"
            async with gate:
                tree = await self.grow(task, noise_key=noise_key, group_id=group_id)
            if on_tree is not None:
                on_tree(next(number), tree)
            return tree

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(grow(task)) for task in tasks]
        if (death := self.engine.death) is not None:
            # The trees that were done before are no fair sample of the tasks, so the update cannot
            # go on with them.
            raise EngineError(
                f"rollout: the engine has died: {death!r}; remove the cause and resume.",
                code="engine-died",
            ) from death
        trees = [task.result() for task in running]
        leaves = [leaf for tree in trees for leaf in tree.leaves]
        # One failure is data; all at once have one cause, and an update without rewards would only
        # hide it.
        if leaves and all(leaf.status is Status.FAILED for leaf in leaves):
            first = (leaves[0].error or "").rstrip(".")
            raise EngineError(
                f"rollout: all {len(leaves)} trajectories of {len(trees)} trees failed; the first:"
                f" {first}. Expected at least one to end by itself; remove the cause and resume.",
                code="all-failed",
            )
        return trees

    def new_budget(self) -> Budget:
        """Returns the budget of one tree."""
        return Budget(self.limits.num_leaves)

    async def grow(self, task: Task, *, noise_key: NoiseKey, group_id: str) -> Tree:
        """Returns one tree, scored."""
        budget = self.new_budget()
        explorer = self.explorer
        with asking(explorer, "starts", task.id):
            first = explorer.starts(budget.max_leaves)
        # At least one, whose first observation is part of the prompt.
        num_prepared = max(1, min(first.num, budget.max_leaves))
        async with self.toolbox.sessions(task) as sessions:
            with self.watch.waiting("environments"):
                shown = await sessions.prepare(num_prepared)
            task, prompt_ids = self._opening(task, shown, sessions)
            tree = OpenTree(task, group_id, prompt_ids, budget)
            growth = _Growth(self, tree, (*noise_key, task.id), sessions)
            if isinstance(explorer, Restarting):
                await growth.find_stored()
                closed = tree.close()
            else:
                await growth.open([first])
                closed = await self._closed(tree, is_scored=explorer.wants_rewards)
            # Only now is it known which leaves will never be branched off; fresh starts or
            # children of finished steps take them, so that every group has as many.
            while await growth.fill(growth.proposal(closed)):
                closed = await self._closed(tree, is_scored=explorer.wants_rewards)
            if not closed.leaves:
                raise SettingError(
                    f"explore.explorers: {type(explorer).__name__} opened no rollout of task"
                    f" '{task.id}', expected 1..{budget.max_leaves}: a tree needs a first start.",
                    code="no-start",
                )
        # Outside the sessions, so that environments are closed while rewards are computed.
        return closed if explorer.wants_rewards else await self._closed(tree, is_scored=True)

    async def _closed(self, tree: OpenTree, *, is_scored: bool) -> Tree:
        """The tree between two stages, or at its end."""
        if not is_scored:
            return tree.close()
        with self.watch.waiting("rewards"):
            return await self.scorer(tree.close())

    def _opening(self, bare: Task, task: Task, sessions: Sessions) -> tuple[Task, tuple[int, ...]]:
        """The task as prepared by its environment, and its prompt; the bare task where the first
        observation makes no prompt."""
        try:
            return task, self.format.prompt_ids(task)
        except DataError as error:
            if task is bare:
                raise
            # A long observation of one environment must not end the run: its trajectories fail.
            sessions.refuse(f"the environment's first observation makes no prompt: {error}")
            return bare, self.format.prompt_ids(bare)


class _Growth:
    """One tree under way: its trajectories, and the branches that they may open."""

    def __init__(self, grower: Grower, tree: OpenTree, key: NoiseKey, sessions: Sessions) -> None:
        self._g = grower
        self._tree = tree
        self._key = key
        self._sessions = sessions
        self._rounds = Rounds(tree.budget)
        self._forks: dict[tuple[int, ...], OpenPath] = {}
        """Where branches may be opened: a path that ends there, by the step's ordinals."""
        self._ends: dict[str, OpenPath] = {}
        """Where children may be opened once all leaves have ended, by the step above them; empty
        where the explorer opens none."""
        self._num_starts = 0
        # Of the tree: a probe's answer comes from the engine's thread, which has another one.
        self._context = contextvars.copy_context()
        self.stored: StoredSteps | None = None
        """What rollouts may begin below; None where the explorer never does."""
        self._group: asyncio.TaskGroup

    async def find_stored(self) -> None:
        """Looks up the stored trajectories of the task."""
        grower = self._g
        self.stored = StoredSteps(self._tree, self._sessions, grower.format, grower.limits)
        if grower.retriever is not None:
            with grower.watch.waiting("retrieval"):
                await self.stored.find(grower.retriever)

    def proposal(self, tree: Tree) -> Start | Sequence[Start] | Sequence[Expand | Retry]:
        """Returns what the explorer opens next."""
        explorer = self._g.explorer
        num = self._tree.budget.max_leaves
        if self.stored is not None and isinstance(explorer, Restarting):
            with asking(explorer, "restarts", tree.task.id):
                return explorer.restarts(tree, self.stored.stored, num, self._key)
        with asking(explorer, "fill", tree.task.id):
            return explorer.fill(tree, num)

    async def open(self, starts: Sequence[Start]) -> bool:
        """Opens what the budget grants of first-level rollouts, and of those below stored steps,
        and runs that to its end; returns whether there was anything."""
        num_granted = num_fresh = 0
        grown: list[tuple[OpenPath, Cause]] = []
        for start in starts:
            granted = self._tree.budget.grant(start)
            num_granted += granted
            paths: list[tuple[OpenPath, Cause]] | None = None
            if start.below is not None and self.stored is not None and granted:
                with self._g.watch.waiting("environments"):
                    paths = await self.stored.open(start.below, granted)
            # Where the environment contradicts them, the prompt.
            num_fresh += granted if paths is None else 0
            grown += paths or []
        await self._run_all(num_fresh, grown)
        return num_granted > 0

    async def _run_all(self, num_fresh: int, others: Sequence[tuple[OpenPath, Cause]]) -> None:
        """Runs first-level rollouts, and paths that begin elsewhere, and all that branches off
        them, to their ends."""
        async with asyncio.TaskGroup() as self._group:
            for _ in range(num_fresh):
                path = self._tree.open_path(self._begin())
                self._rounds.open_start(path)
                self._launch(path, None)
            for path, cause in others:
                self._rounds.open_start(path)
                self._launch(path, cause)

    def _begin(self) -> Point:
        """The beginning of one more rollout at the prompt."""
        self._num_starts += 1
        return self._sessions.start(self._num_starts - 1)

    async def fill(self, proposal: Start | Sequence[Start] | Sequence[Expand | Retry]) -> bool:
        """Opens what the budget grants of it, and runs that to its end; returns whether there was
        anything."""
        starts = [proposal] if isinstance(proposal, Start) else proposal
        if self.stored is not None or isinstance(proposal, Start):
            return await self.open([one for one in starts if isinstance(one, Start)])
        if retries := [one for one in proposal if isinstance(one, Retry)]:
            opened: list[tuple[OpenPath, Cause]] = []
            for one in retries:
                cause = RetryCause(rule=one.rule, beside=one.step_id)
                opened += [(path, cause) for path in self._beside(one)]
            await self._run_all(0, opened)
            return bool(opened)
        budget = self._tree.budget
        paths: list[tuple[OpenPath, Cause]] = []
        for wish in proposal:
            # A state that cannot be had again, past `MAX_REPLAY_CALLS`, has no end here.
            if isinstance(wish, Expand) and wish.step_id in self._ends:
                granted = budget.grant(Branch(wish.num, wish.cause))
                paths += [(path, wish.cause) for path in self._ends[wish.step_id].copies(granted)]
        if not paths:
            return await self.open([Start(budget.max_leaves - budget.state.num_leaves)])
        await self._run_all(0, paths)
        return True

    def _beside(self, retry: Retry) -> list[OpenPath]:
        """The paths that the budget grants next to a finished step, which begin with forced tokens:
        those that the explorer names, or the step's thought and the opening of a tool call or an
        answer. None if these leave no room, or if the state cannot be had again."""
        tree = self._tree
        format = self._g.format
        step = tree.steps_to(retry.step_id)[-1]
        opening = retry.opening
        if not opening:
            assert isinstance(format, Opening), "checked when the grower was made"
            if retry.opens == "answer":
                opening = format.answer_opening(step.written_ids)
            else:
                opening = format.call_opening(step.written_ids, retry.tool)
        before = tree.steps_to(retry.step_id)[-2].id
        above = self._ends.get(before)
        if above is None and before != ROOT_ID:
            return []
        used = len(opening) + (0 if above is None else above.num_used)
        if self._g.limits.max_completion_tokens - used < MIN_ROOM:
            return []
        num = tree.budget.grant(Start(retry.num))
        if above is None:
            paths = [tree.open_path(self._begin()) for _ in range(num)]
        else:
            paths = above.copies(num)
        for path in paths:
            path.opening = opening
            path.is_lesson = retry.is_lesson
        return paths

    def _launch(self, path: OpenPath, cause: Cause | None) -> None:
        run = self._run(path, self._tree.next_id(path.parent), cause)
        self._group.create_task(run, context=self._context.copy())

    async def _run(self, path: OpenPath, step_id: str, cause: Cause | None) -> None:
        """Runs one trajectory to its end; any failure of ours in it becomes a failed leaf.

        Args:
            cause: why its first step is there, for a branch.
        """
        tree = self._tree
        version = self._g.engine.policy_version
        try:
            async with asyncio.timeout(self._g.limits.deadline_s):
                assert path.point is not None, "a path is launched with the place it begins at"
                with self._g.watch.waiting("environments"):
                    path.session = await path.point.open()
                path.point = None
                goes_on = True
                while goes_on:
                    if await self._graft(path, step_id, cause):
                        step_id = tree.next_id(path.parent)
                    if goes_on := await self._step(path, step_id, cause):
                        step_id = tree.next_id(path.parent)
                        cause = None
                with self._g.watch.waiting("environments"):
                    tree.reward_path(path, await path.tools.reward())
        except Exception as error:
            # The edge of a rollout: a fault of ours, or of a user's engine, is data on its leaf.
            reason = f"{type(error).__name__}: {error}"
            # Our own deadline comes without words; another one's says whose it was.
            if isinstance(error, TimeoutError):
                late = f"no end within rollout.deadline_s = {self._g.limits.deadline_s} s"
                reason = str(error) or late
            tree.fail_path(path, step_id, reason, version, cause)
        finally:
            if path.session is not None:
                path.session.release()
        path.is_over = True
        # Also after a failure: a round of branches waits for every leaf that has not ended.
        self._rounds.end(path)
        self._open_branches()

    # ------------------------------------------------------------------ grafts

    async def _graft(self, path: OpenPath, step_id: str, cause: Cause | None) -> bool:
        """Attaches a step of another agent where the explorer wants one; returns whether it did.

        Never before a first step or after a graft (RAPO, Algorithm 1), nor as the first step of a
        branch, which is sampled by definition.
        """
        if self._g.retriever is None or cause is not None or path.after is not Origin.POLICY:
            return False
        # The key of the step that would be sampled here, so that the coin does not depend on when
        # other paths toss theirs.
        steps = self._tree.steps_to(path.parent)
        key = (*self._key, step_id)
        with asking(self._g.explorer, "before_step", self._tree.task.id):
            decision = self._g.explorer.before_step(PathView(steps, key))
        if not isinstance(decision, Graft):
            return False
        with self._g.watch.waiting("retrieval"):
            contents = [step.content for step in steps[1:]]
            found = await self._g.retriever.retrieve(
                self._tree.task, contents, whole=decision.whole, noise_key=key
            )
        if found is None:
            return False
        # Its calls are made in this path's environment first, in a copy; not attached where the
        # results differ from those in the trace, which would not be true there.
        candidates = [found, *found.others]
        values = [one.values for one in candidates]
        with self._g.watch.waiting("environments"):
            tried = await path.tools.rehearse(values)
        if tried is None:
            return False
        number, session = tried
        found = candidates[number]
        before = path.tools
        is_attached = self._attach(path, step_id, found)
        if session is not before:
            (before if is_attached else session).release()
        if is_attached:
            path.session = session
        return is_attached

    def _attach(self, path: OpenPath, step_id: str, found: Retrieved) -> bool:
        """Appends the retrieved steps; False where the token limit leaves no room for them."""
        limits = self._g.limits
        step = grafted(found, self._g.format, limits.max_completion_tokens - path.num_used)
        if step is None:
            self._g.num_grafts_without_room += 1
            return False
        self._tree.add_graft(step_id, path, *step, limits.temperature)
        return True

    # ------------------------------------------------------------------ sampled steps

    async def _step(self, path: OpenPath, step_id: str, cause: Cause | None) -> bool:
        """Appends one sampled step; returns whether the trajectory goes on."""
        limits = self._g.limits
        tree = self._tree
        format = self._g.format
        # Of the whole path: results count too, since they are context of later steps.
        room = limits.max_completion_tokens - path.num_used
        completion = await self._complete(path, step_id, room, can_propose=cause is None)
        parsed = format.parse_step((*path.opening, *completion.token_ids))
        content = parsed.content
        violation = parsed.violation
        add = partial(tree.add_step, step_id, path, completion, limits.temperature, cause=cause)
        status, reason = self._end_of(parsed, completion, path)
        if status is not None:
            if status is Status.FORMAT_VIOLATION:
                violation = violation or "ended without a tool call or an answer"
            add(content, stop_reason=reason, violation=violation)
            is_complete = status is Status.COMPLETED
            answer = format.answer_of(content, tree.task) if is_complete else None
            tree.end_path(path, status, answer)
            return False
        observations = []
        # One after the other: a later call of the step may depend on the state that an earlier one
        # left in the environment.
        for call in content.calls:
            with self._g.watch.waiting(f"tool {call.name}"):
                observations.append(await path.tools.call(call))
        path.num_tool_calls += len(observations)
        tree.budget.spend(num_tool_calls=len(observations))
        content = replace(content, observations=tuple(observations))
        written = (*path.opening, *completion.token_ids)
        if not self._add_results(path, written, content, partial(add, content)):
            # The result does not fit, so the agent never sees it and it is no part of the path.
            add(content, stop_reason=StopReason.LENGTH)
            tree.end_path(path, Status.TRUNCATED)
            return False
        if self._g.explorer.expands and path.tools.can_branch:
            end = path.copy()
            end.point = path.tools.mark()
            self._ends[step_id] = end
        return True

    def _add_results(
        self,
        path: OpenPath,
        written: Sequence[int],
        content: StepContent,
        add: Callable[..., None],
    ) -> bool:
        """Appends a step with its results, or with a context below it that has them; False where
        they leave no room for the next step."""
        above, spans = self._next_context(path, written, content)
        num_next = sum(len(ids) for ids, _ in spans)
        num_next += len(path.prefix_ids) + len(written) if above is None else len(above.prefix_ids)
        if num_next - path.num_prompt >= self._g.limits.max_completion_tokens:
            return False
        if above is None:
            add(observation_ids=spans[0][0])
        else:
            add()
            self._tree.add_context(path, above, spans)
        return True

    def _next_context(
        self, path: OpenPath, written: Sequence[int], content: StepContent
    ) -> tuple[OpenPath | None, Sequence[Span]]:
        """What the next context continues, None for the step just written, and what it adds."""
        format = self._g.format
        if isinstance(format, Conversing):
            turns = [
                (step.token_ids[step.sampled_mask].tolist(), step.content)
                for step in self._tree.steps_to(path.parent)[1:]
            ]
            before = path.prefix_ids
            context = format.context_ids(self._tree.task, [*turns, (written, content)], before)
            whole = (*before, *written)
            if context[: len(whole)] == whole:
                return None, [(context[len(whole) :], Origin.TOOL)]
            above = self._tree.gone_back(path, context)
            return above, [(context[len(above.prefix_ids) :], Origin.CONTEXT)]
        if isinstance(format, Rewriting) and format.drops_thoughts:
            return path.copy(), format.context_spans(written, content.observations)
        return None, [(format.observation_ids(content.observations), Origin.TOOL)]

    async def _complete(
        self, path: OpenPath, step_id: str, room: int, *, can_propose: bool
    ) -> Completion:
        """Samples a step, and lets the path propose branches next to it once its first tokens are
        known."""
        limits = self._g.limits
        format = self._g.format
        sampling = Sampling(
            max_new_tokens=room,
            temperature=limits.temperature,
            filters=limits.filters,
            stop=format.stop,
            final=format.final,
        )
        # Before the first result there is nothing to compare with, and a branch's own first step
        # would propose at the place where it was itself opened.
        num_probed = self._g.explorer.probe_tokens if can_propose and path.num_sampled else None
        propose = None
        if num_probed is not None:
            # The path as it is now: a branch begins next to the step, not behind it.
            propose = Probe(partial(self._propose, path, path.copy(), step_id))
            # Nothing in this step's tokens matters to the decision, so it need not wait for them.
            if num_probed == 0 or path.after is Origin.RETRIEVED:
                propose(())
        with self._g.watch.waiting("engine"):
            request = Request(
                [*path.prefix_ids, *path.opening],
                sampling,
                noise_key=(*self._key, step_id),
                probe_tokens=num_probed or None,
                on_probe=propose.early if propose is not None and num_probed else None,
            )
            completion = await self._g.engine.complete(request)
        if propose is not None:
            propose(completion.entropies[:num_probed])
        return completion

    def _end_of(
        self, parsed: ParsedStep, completion: Completion, path: OpenPath
    ) -> tuple[Status | None, StopReason | None]:
        """How a step ends its trajectory (status, and the reason where it is a limit); None where
        it goes on."""
        num_calls = len(parsed.content.calls)
        limits = self._g.limits
        if parsed.violation is not None:
            return Status.FORMAT_VIOLATION, None
        # Before the limits: an answer with the last token or in the last step counts.
        if parsed.content.answer is not None:
            return Status.COMPLETED, None
        if not num_calls:
            ran_out = completion.finish is StopReason.LENGTH
            return Status.TRUNCATED if ran_out else Status.FORMAT_VIOLATION, None
        if path.num_tool_calls + num_calls > limits.max_tool_calls:
            return Status.TRUNCATED, StopReason.TOOL_CALLS
        # Its calls are not run: no step could read their results.
        if path.num_sampled + 1 >= limits.max_agent_steps:
            return Status.TRUNCATED, StopReason.AGENT_STEPS
        return None, None

    # ------------------------------------------------------------------ branches

    def _propose(
        self, path: OpenPath, fork: OpenPath, step_id: str, probe: Sequence[float]
    ) -> None:
        """Passes what the explorer proposes next to the step under way on to the rounds."""
        # A probe that arrives after the path's deadline: its round is closed already.
        if path.is_over:
            return
        branch = None
        steps = self._tree.steps_to(fork.parent)
        # Not after a graft: entropy there says something about the graft, not about a result.
        if fork.after is Origin.POLICY and path.tools.can_branch:
            with asking(self._g.explorer, "after_probe", self._tree.task.id):
                branch = self._g.explorer.after_probe(PathView(steps, (*self._key, step_id)), probe)
        if branch is not None:
            self._tree.decide(step_id, BranchDecision(seen=branch.cause, num_wanted=branch.num))
        wish = branch if branch is not None and branch.num else None
        if wish is not None:
            # The step under way has made no call yet, so the environment is still where the
            # branch begins. It is not needed once no branch can be opened any more.
            fork.point = path.tools.mark(lambda: not self._tree.budget.is_spent)
            self._forks[steps[-1].ordinals] = fork
        # Also a path without a wish says so: branches of a round are granted once all live leaves
        # have proposed, by their order in the tree, so that no latency decides who gets them.
        self._rounds.propose(path, fork.num_sampled, steps[-1].ordinals, wish)
        self._open_branches()

    def _open_branches(self) -> None:
        # Again until nothing comes: a branch that is opened is one more leaf to wait for, and a
        # round may be complete without it.
        while grants := self._rounds.advance():
            for grant in grants:
                for path in self._forks[grant.place].copies(grant.num):
                    self._rounds.open_branch(path, grant)
                    self._launch(path, grant.cause)


class Probe:
    """Passes on one probe: a step is probed while it is sampled or, if short, when it is done."""

    def __init__(self, function: Callable[[Sequence[float]], None]) -> None:
        self._function: Callable[[Sequence[float]], None] | None = function
        self._error: Exception | None = None

    def early(self, probe: Sequence[float]) -> None:
        """Passes the probe on, and an error later."""
        try:
            self(probe)
        except Exception as error:
            # This is a callback, where it would be lost; the call that comes with the
            # completion raises it on the leaf's own task.
            self._error = error

    def __call__(self, probe: Sequence[float]) -> None:
        if self._error is not None:
            raise self._error
        function = self._function
        self._function = None
        if function is not None:
            function(probe)


class Placement(Protocol):
    """Engines and growers of a run in other processes, on one machine or on many."""

    def engine(
        self, config: Config, model_path: Path | str | None
    ) -> AbstractAsyncContextManager[Engine]:
        """Opens one engine for all processes there, and whatever grows trees with it.

        Args:
            model_path: where they begin with weights and tokenizer; None for model.path.

        Raises:
            TreegraftError: a part that cannot be made there.
        """

    def grower(self, *parts: Any, **more: Any) -> Grower:
        """Returns a grower, made of the same parts as `Grower`, whose trees grow there."""

    def show_in(self, folder: Path) -> None:
        """Writes what runs there, and how it is, into this run folder from now on."""
