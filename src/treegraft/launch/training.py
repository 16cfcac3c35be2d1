"""How a run is begun: by one process or by all that torchrun has started, and made ready for its
first update."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from treegraft.assemble import TrainingParts, assemble_training
from treegraft.core.errors import DataError, SettingError, nearest
from treegraft.core.given import GIVEN, GivenObjects, giving
from treegraft.core.interfaces import Display, TaskSampler
from treegraft.core.plugin import PlacementKind, load_object, offered
from treegraft.core.types import Tree
from treegraft.evals.during import is_evaluation_due
from treegraft.evals.preflight import Preflight
from treegraft.evals.warmup import demonstrations_of, evaluate_warmup, warm_up_from
from treegraft.policy.checkpoint import save_checkpoint
from treegraft.policy.learn.lessons import Given, LessonBook
from treegraft.policy.learn.torchrun import is_started, joined
from treegraft.policy.publish import Publisher
from treegraft.rollout.loop import Grower
from treegraft.rollout.placement import Placement
from treegraft.runs.checkpoint import TrainState
from treegraft.runs.clock import Clock
from treegraft.runs.display import show_texts, shown
from treegraft.runs.replay import Replay
from treegraft.runs.result import RunResult
from treegraft.runs.resume_inputs import tasks_checksum
from treegraft.runs.run import Run
from treegraft.runs.start import Source, Start, new_start, own_config, resumed_start
from treegraft.settings.config import Config
from treegraft.settings.load import config_json
from treegraft.settings.objects import Objects, with_objects
from treegraft.settings.packages import missing_packages
from treegraft.settings.table import value_of, with_choices
from treegraft.tasks.build import build_tasks
from treegraft.tasks.sampler import build_sampler
from treegraft.traces.demonstrations import lesson_book
from treegraft.traces.retrieve import too_short, unusable
from treegraft.traces.run_buffer import RunBuffer

if TYPE_CHECKING:
    from treegraft.policy.learn.ranks import Ranks

Work = Callable[[Run, "Ranks | None", Placement | None], Coroutine[Any, Any, RunResult]]
"""The work of a run, with the processes that learn together and where engines and growers stand;
None for this process alone."""


class LaunchOptions(Objects, total=False):
    """What each command that begins a run takes beside the settings; see `treegraft.train`."""

    recipe: str | None
    resume: Path | str | None
    accepts_changes: bool
    display: Display | bool | None


def launched(
    work: Work,
    config: Source,
    *,
    command: str,
    recipe: str | None = None,
    resume: Path | str | None = None,
    accepts_changes: bool = False,
    display: Display | bool | None = None,
    placement: str | None = None,
    callbacks: Sequence[object] = (),
    **objects: Unpack[Objects],
) -> RunResult:
    """Returns the result of a run's work; in other ranks than 0, what rank 0 says of it.

    Args:
        command: the command that goes on with the run, such as "train".
        config, recipe, resume, accepts_changes, display, placement, callbacks, objects: as of
            `treegraft.train`.

    Raises:
        TreegraftError: bad input, before any work starts where that can be known.
    """
    source = config
    if source is None:
        source = {} if resume is None else own_config(Path(resume))
    elif isinstance(source, str | Path):
        recipe = recipe or str(source)
    own, given = with_objects(source, objects)
    if placement is not None:
        _refuse_local(given, f"placement '{placement}'")
    # Under torchrun each rank runs the script that has the objects.
    if own.learn.ranks not in ("auto", 1) and not is_started():
        _refuse_local(given, f"learn.ranks = {own.learn.ranks}")
    with giving(given), joined(own) as ranks:
        if ranks is not None and ranks.rank > 0:
            return followed(ranks, own)
        is_empty = config is None and resume is None and not given.records
        start = _start(None if is_empty else own, recipe, resume, accepts_changes, given)
        if missing := missing_packages(start.config):
            raise SettingError("\n".join(missing.values()), code="packages-missing")
        if (start.config.engine.kind, start.config.publish.kind) == ("vllm", "external"):
            raise SettingError(
                "publish.kind: got 'external', expected another one in `train`, whose own learner"
                " changes the weights; it is for a loop of your own (docs/python.md).",
                code="publish-external",
            )
        kind = None if placement is None else _placement(placement)
        with shown(display) as progress:
            run = Run(start, progress, command if kind is None else kind.command, callbacks)
            if command != "sft" and start.is_finished and start.checkpoint is not None:
                result = run.already_finished(start.checkpoint)
            else:
                opening = nullcontext() if kind is None else load_object(kind.path)(start.config)
                with opening as place:
                    result = run.carry_out(work(run, ranks, place))
        if ranks is not None:
            ranks.result = {
                "run_dir": str(result.run_dir),
                "checkpoint_dir": str(result.checkpoint_dir),
                "metrics": dict(result.metrics),
            }
        return result


def _refuse_local(objects: GivenObjects, place: str) -> None:
    """Raises `SettingError` for objects that other processes cannot find."""
    if names := list(objects.by_name):
        listed = ", ".join(f"'{name.removeprefix(GIVEN)}'" for name in names)
        raise SettingError(
            f"{place} runs in other processes, which cannot find {listed}: got objects of this"
            " script or notebook alone; expected ones that can be imported. Put them into a module"
            " and import them from it.",
            code="objects-elsewhere",
        )


def _placement(name: str) -> PlacementKind:
    known: Mapping[str, PlacementKind] = offered("placements")
    if name not in known:
        raise SettingError(
            f"placement: got '{name}', expected None for this process, or one that a plugin brings:"
            f" {', '.join(known) or 'there is none'}.{nearest(name, known)}",
            code="unknown-placement",
        )
    return known[name]


def followed(ranks: Ranks, config: Config) -> RunResult:
    """Returns the result of a run as another rank than 0 sees it, once rank 0 has ended it."""
    from treegraft.policy.learn.leader import serve_rank
    from treegraft.policy.load import limit_threads

    limit_threads(config.run.num_threads)
    result = serve_rank(ranks, config)
    if result is None:
        # Rank 0 says why.
        raise SystemExit(0)
    return RunResult(
        run_dir=Path(result["run_dir"]),
        checkpoint_dir=Path(result["checkpoint_dir"]),
        metrics=result["metrics"],
    )


def _start(
    config: Source,
    recipe: str | None,
    resume: Path | str | None,
    accepts: bool,
    given: GivenObjects,
) -> Start:
    if resume is not None:
        return resumed_start(Path(resume), config, accepts_changes=accepts, given=given)
    if accepts:
        raise SettingError(
            "accepts_changes: got True for a new run; expected a run to resume. Leave it out.",
            code="nothing-resumed",
        )
    start = new_start(config, recipe, given)
    return replace(start, config=with_choices(start.config))


@dataclass
class Training:
    """What lives as long as a training: its run, its parts, and what carries over from one update
    to the next."""

    run: Run
    parts: TrainingParts
    sampler: TaskSampler
    publisher: Publisher
    buffer: RunBuffer
    book: LessonBook | None
    """The lessons; None without."""
    grower: Grower = field(init=False)
    replay: Replay = field(init=False)
    clock: Clock = field(init=False)
    """Of the update under way."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Holds what grows trees, for all updates that are left."""
        run, parts, config = self.run, self.parts, self.run.config
        async with self.buffer.opened(run.state.update, parts):
            if self.buffer.origin == "self":
                # What later updates had added is gone only now.
                self.book = lesson_book(config, self.buffer, parts)
            self.replay = Replay(config, run.folder, run.state.update)
            held = self.buffer.buffer
            for doubt in (unusable(held, config, parts.train_tasks), too_short(held, config)):
                if doubt:
                    run.display.warn(doubt)
            run.checkpoints.replays(self.replay.labels)
            self.grower = parts.grower(parts.explorer, retriever=self.buffer.retriever)
            yield

    async def remaining(self) -> AsyncIterator[int]:
        """Gives the numbers of the updates that are left, each once the one before is kept."""
        while not (self.run.is_over or self.run.reporter.wants_end):
            self.clock = Clock()
            yield self.run.state.update + 1

    def lessons(self, number: int, trees: Sequence[Tree]) -> Given:
        """Returns the stored successes to imitate beside the trees of an update; none without a
        book."""
        if self.book is None:
            return Given([], (0, 0), {})
        earlier = self.sampler.drawn(self.run.state.num_drawn)
        return self.book.choose(trees, earlier, number, self.run.state.lesson_value or (0.0, 0.0))


@asynccontextmanager
async def prepared(
    run: Run, ranks: Ranks | None, placement: Placement | None, *, only_warms_up: bool
) -> AsyncIterator[Training]:
    """Holds a training whose buffer is filled, whose warm-up is done and whose engine has the
    present weights.

    Raises:
        TreegraftError: bad input; before the run folder is made where that can be known.
    """
    config, state = run.config, run.state
    run.display.phase("loading", 0, 0, f"{config.model.path}, {config.tasks.kind}")
    source = build_tasks(config.tasks, config.run.seed)
    if config.run.num_updates and not only_warms_up and not source.train_tasks():
        raise DataError(
            "the training tasks are empty; expected at least one row. See tasks.num_train and"
            " [tasks.dataset].",
            code="train-tasks-empty",
        )
    # All parts are made before the run folder, so bad input leaves nothing behind.
    async with assemble_training(
        config, source=source, checkpoint=run.start.checkpoint, ranks=ranks, placement=placement
    ) as parts:
        parts.check_tasks([*parts.train_tasks, *parts.eval_tasks])
        run.checkpoints.asks(tasks_checksum(parts.train_tasks, parts.eval_tasks))
        await parts.try_environment()
        await parts.try_rewards(parts.train_tasks)
        sampler = build_sampler(config.sampler, parts.train_tasks, config.run.seed)
        sampler.restore(state.sampler or {})
        publisher = Publisher(parts.engine, parts.learner, config.model.dtype, state)
        buffer = RunBuffer(config, source, run.path, run.start)
        run.checkpoints.depends_on(buffer.checksums)
        training = Training(run, parts, sampler, publisher, buffer, None)
        warms_up = state.warmup_steps < config.warmup.num_steps
        needs_buffer = not only_warms_up or (warms_up and "warmup" in buffer.readers)
        demonstrations = await demonstrations_of(run, parts, buffer) if warms_up else None
        if not only_warms_up:
            # Before the warm-up: a buffer without successes is bad input.
            training.book = lesson_book(config, buffer, parts)
        if needs_buffer:
            await buffer.check_expert(parts.environments)
        show_texts(run.display, parts.tokenizer)
        with run.opened(_checkpoint_writer(config, parts), source.report()):
            buffer.run_dir = run.path
            parts.keep_logs(run.path / "servers")
            await _tell_beforehand(run, parts)
            if buffer.is_due and needs_buffer:
                run.display.phase("buffer", 0, 1, config.buffer.path)
                # Before the warm-up: an expert whose steps earn nothing shows here.
                await buffer.build(parts)
                if training.book is None and not only_warms_up:
                    training.book = lesson_book(config, buffer, parts)
            if warms_up:
                demonstrations = demonstrations or await demonstrations_of(run, parts, buffer)
                assert demonstrations is not None
                await warm_up_from(demonstrations, run, parts, publisher)
            # An evaluation before the first update is that at the end of the warm-up.
            if only_warms_up or not is_evaluation_due(run, parts):
                await evaluate_warmup(run, parts, publisher)
            # Also after a resume: the engine of this process does not know its version yet.
            await publisher.publish(run.state.update)
            if not only_warms_up and config.loss.kl_coef:
                # The policy before the first update, also after a resume.
                parts.learner.keep_reference(run.path / "reference", is_new=run.state.update == 0)
            # Counts of demonstrations belong to no update.
            parts.toolbox.take_metrics()
            yield training


async def _tell_beforehand(run: Run, parts: TrainingParts) -> None:
    """Shows what the user should know before any work."""
    for text in parts.notes:
        run.display.note(text)
    for name in offered("choices"):
        if (chosen := value_of(run.config, name)) != "auto":
            run.display.note(f"{name} = {chosen!r}")
    if run.start.checkpoint is None:
        for one in await Preflight(parts).findings():
            if one.is_doubtful or not one.is_good:
                run.display.warn(str(one))


def _checkpoint_writer(config: Config, parts: TrainingParts) -> Callable[[Path, TrainState], None]:
    """The function that writes a checkpoint of the learner with a run's state."""

    def write(folder: Path, state: TrainState) -> None:
        save_checkpoint(
            folder,
            learner=parts.learner,
            tokenizer=parts.tokenizer,
            state=state,
            config_json=config_json(config),
            keep_adapter=not config.model.lora.merge,
        )

    return write
