"""The story of a run: warm up, then update after update - sample, grow, credit, learn, publish,
evaluate, keep.

The state between two updates is small: weights, optimiser, and the counters in `TrainState`.
Everything else is a function of the settings, the seed and the update's number, so a resumed run
repeats an uninterrupted one bit for bit.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from treegraft.assemble import Parts, TrainingParts, assemble_training
from treegraft.core.errors import DataError, SettingError
from treegraft.core.interfaces import Display, LearnerLike, TaskSampler
from treegraft.core.spans import span
from treegraft.core.threads import in_thread
from treegraft.core.types import Tree
from treegraft.evals.evaluate import Evaluation, evaluate
from treegraft.evals.preflight import Preflight
from treegraft.policy.checkpoint import save_checkpoint
from treegraft.policy.learn.credit import credit_by_entropy
from treegraft.policy.learn.launch import joined
from treegraft.policy.learn.lessons import Given, LessonBook
from treegraft.policy.learn.symptoms import symptoms
from treegraft.policy.publish import Publisher
from treegraft.rollout.ahead import Ahead
from treegraft.rollout.limits import training_limits
from treegraft.rollout.loop import Grower
from treegraft.rollout.measure import (
    has_version,
    paired_gain,
    rollout_metrics,
    staleness_metrics,
    unused_metrics,
)
from treegraft.rollout.placement import Placement
from treegraft.rollout.rounds import Sampled, sample_update
from treegraft.rollout.watch import Watch
from treegraft.runs.checkpoint import TrainState
from treegraft.runs.display import show_texts, shown
from treegraft.runs.record import read_trees
from treegraft.runs.replay import Replay
from treegraft.runs.run import Clock, Run, RunResult
from treegraft.runs.start import Source, Start, new_start, own_config, resumed_start
from treegraft.settings.config import Config
from treegraft.settings.load import config_json, load_config
from treegraft.tasks.build import build_tasks
from treegraft.tasks.sampler import build_sampler
from treegraft.traces.demonstrations import add_lessons, lesson_book
from treegraft.traces.retrieve import unusable
from treegraft.traces.run_buffer import RunBuffer
from treegraft.warmup import (
    demonstrations_of,
    evaluate_warmup,
    is_warmup_evaluation_due,
    warm_up_from,
)

if TYPE_CHECKING:
    from treegraft.policy.learn.ranks import Ranks

Result = TypeVar("Result")


def train(
    config: Source,
    *,
    recipe: str | None = None,
    resume: Path | None = None,
    accepts_changes: bool = False,
    display: Display | bool | None = None,
    placement: Placement | None = None,
) -> RunResult:
    """Trains an agent and returns where the results are.

    Args:
        config: settings, a dict of them, or a recipe's path; with `resume` they may be None, which
            takes the run's own, or differ from those in the settings that a resume may change.
        recipe: name of the recipe, for the run folder's default name.
        resume: a run folder to continue from its latest checkpoint.
        accepts_changes: with `resume`: go on although metrics, recorded evaluations or the buffer
            have changed since that checkpoint; the run is then another than it would have been.
        display: True shows progress on standard output, False nothing, None progress where that is
            a terminal or a notebook; or a display of your own (`core.interfaces.Display`).
        placement: where engines and growers stand; None for this process.

    Raises:
        TreegraftError: bad input, before any work starts where that can be known.
        KeyboardInterrupt: after Ctrl-C, with everything saved; its kind `Ended` after SIGTERM,
            SIGHUP or SIGUSR1.
    """
    return _carried_out("train", config, recipe, resume, accepts_changes, display, placement)


def sft(
    config: Source,
    *,
    recipe: str | None = None,
    resume: Path | None = None,
    accepts_changes: bool = False,
    display: Display | bool | None = None,
) -> RunResult:
    """Runs the warm-up alone and returns where the results are; arguments and errors as in
    `train`."""
    return _carried_out("sft", config, recipe, resume, accepts_changes, display)


def _carried_out(
    command: str,
    config: Source,
    recipe: str | None,
    resume: Path | None,
    accepts_changes: bool,
    display: Display | bool | None,
    placement: Placement | None = None,
) -> RunResult:
    """The run of a command, where torchrun has started several processes with all of them."""
    if config is not None:
        own = load_config(config)
    else:
        own = Config() if resume is None else own_config(resume)
    with joined(own) as ranks:
        if ranks is not None and ranks.rank > 0:
            return _followed(ranks, own)
        start = _start(config, recipe, resume, accepts_changes)
        with shown(display) as progress:
            run = Run(start, progress, command if placement is None else placement.command)
            if command == "train" and start.is_finished and start.checkpoint is not None:
                result = run.already_finished(start.checkpoint)
            else:
                work = story(run, ranks, placement, only_warms_up=command == "sft")
                result = run.carry_out(work)
        if ranks is not None:
            ranks.result = {
                "run_dir": str(result.run_dir),
                "checkpoint_dir": str(result.checkpoint_dir),
                "metrics": dict(result.metrics),
            }
        return result


def _followed(ranks: Ranks, config: Config) -> RunResult:
    """The run as another rank than 0 sees it."""
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


def _start(config: Source, recipe: str | None, resume: Path | None, accepts: bool) -> Start:
    if resume is not None:
        return resumed_start(Path(resume), config, accepts_changes=accepts)
    if accepts:
        raise SettingError(
            "accepts_changes: got True for a new run; expected a run to resume. Leave it out."
        )
    return new_start(config, recipe)


async def story(
    run: Run,
    ranks: Ranks | None = None,
    placement: Placement | None = None,
    *,
    only_warms_up: bool = False,
) -> RunResult:
    """The whole run; `ranks` are the processes that learn together, None for this one alone, and
    `placement` is where engines and growers stand, None for this process."""
    config, state = run.config, run.state
    run.display.phase("loading", 0, 0, f"{config.model.path}, {config.tasks.kind}")
    source = build_tasks(config.tasks, config.run.seed)
    if config.run.num_updates and not only_warms_up and not source.train_tasks():
        raise DataError(
            "the training tasks are empty; expected at least one row. See tasks.num_train and"
            " [tasks.dataset]."
        )
    # All parts are made before the run folder, so bad input leaves nothing behind.
    async with assemble_training(
        config, source=source, checkpoint=run.start.checkpoint, ranks=ranks, placement=placement
    ) as parts:
        parts.check_tasks([*parts.train_tasks, *parts.eval_tasks])
        await parts.try_environment()
        sampler = build_sampler(config.sampler, parts.train_tasks, config.run.seed)
        sampler.restore(state.sampler or {})
        publisher = Publisher(parts.engine, parts.learner, config.model.dtype, state)
        buffer = RunBuffer(config, source, run.path, run.start)
        run.more_beside = buffer.checksums
        warms_up = state.warmup_steps < config.warmup.num_steps
        needs_buffer = not only_warms_up or (warms_up and buffer.is_imitated)
        demonstrations = await demonstrations_of(run, parts, buffer) if warms_up else None
        # Before the warm-up: a buffer without successes is bad input.
        book = None if only_warms_up else lesson_book(config, buffer, parts)
        if needs_buffer:
            await buffer.check_expert(parts.environments)
        show_texts(run.display, parts.tokenizer)
        with run.opened(checkpoint_writer(config, parts), source.report()):
            parts.keep_logs(run.path / "servers")
            await tell_beforehand(run, parts)
            if buffer.is_due and needs_buffer:
                run.display.phase("buffer", 0, 1, config.buffer.path)
                # Before the warm-up: an expert whose steps earn nothing shows here.
                await buffer.build(parts.scorer, parts.format, parts.environments)
                if book is None and not only_warms_up:
                    book = lesson_book(config, buffer, parts)
            if warms_up:
                demonstrations = demonstrations or await demonstrations_of(run, parts, buffer)
                assert demonstrations is not None
                await warm_up_from(demonstrations, run, parts, publisher)
            # An evaluation before the first update is that at the end of the warm-up.
            if only_warms_up or not is_evaluation_due(run, parts):
                await evaluate_warmup(run, parts, publisher)
            # Also after a resume: the engine of this process does not know its version yet.
            await publisher.publish(run.state.update)
            if only_warms_up:
                # After the checkpoint, so that a later training logs update 0 with its evaluation.
                if not run.state.is_closed:
                    run.log(run.state.update, run.state.pending)
                return run.result()
            keep_reference(run, parts.learner)
            # Counts of demonstrations belong to no update.
            parts.toolbox.take_metrics()
            await make_updates(run, parts, sampler, publisher, buffer, book)
            return run.result()


async def make_updates(
    run: Run,
    parts: TrainingParts,
    sampler: TaskSampler,
    publisher: Publisher,
    buffer: RunBuffer,
    book: LessonBook | None,
) -> None:
    """Makes the updates that are left."""
    config = run.config
    opened = (parts.scorer, parts.format, parts.environments)
    async with buffer.opened(run.state.update, *opened):
        if buffer.is_own_alone:
            # What later updates had added is gone only now.
            book = lesson_book(config, buffer, parts)
        replay = Replay(config, run.folder, run.state.update)
        if doubt := unusable(buffer.buffer, config, parts.train_tasks):
            run.display.warn(doubt)
        run.replayed = replay.files
        await evaluate_and_keep(run, parts)
        grower = parts.grower(parts.explorer, training_limits(config), buffer.retriever)
        async with growing_ahead(run, parts, sampler, grower, replay) as ahead:
            while run.state.update < config.run.num_updates:
                with span("update", update=run.state.update + 1):
                    await update(
                        run, parts, sampler, publisher, buffer, replay, book, grower, ahead
                    )
                await evaluate_and_keep(run, parts)


async def tell_beforehand(run: Run, parts: TrainingParts) -> None:
    """Shows what the user should know before any work."""
    for text in parts.notes:
        run.display.note(text)
    if run.start.checkpoint is None:
        for one in await Preflight(parts).findings():
            if one.is_doubtful or not one.is_good:
                run.display.warn(str(one))
    elif staleness := run.config.rollout.max_staleness:
        run.display.note(
            f"rollout.max_staleness = {staleness}: trees grow while weights change, so this resumed"
            " run does not equal an undisturbed one bit for bit; trees that were not learned are"
            " grown anew"
        )


async def update(
    run: Run,
    parts: TrainingParts,
    sampler: TaskSampler,
    publisher: Publisher,
    buffer: RunBuffer,
    replay: Replay,
    book: LessonBook | None,
    grower: Grower,
    ahead: Ahead,
) -> None:
    """Grows trees, credits them, learns and publishes. An interruption before learning begins
    leaves no trace."""
    number, config, learner, clock = run.state.update + 1, run.config, parts.learner, Clock()
    ahead.begin(run.state.update)
    with clock("rollout"):
        grown = await run.interruptible(ahead.take(number), waits_on=grower.watch)
    sampled = grown.sampled

    def learned_trees() -> tuple[list[Tree], list[Tree], Given, dict[str, float]]:
        kept, dropped = (
            credit_by_entropy(learner, trees, config, parts.credit_rule)
            for trees in (sampled.kept, sampled.dropped)
        )
        lessons = lessons_of(run, sampler, book, kept + dropped)
        kept, learned = learner.learn(replay.mixed(number, kept), lessons.trees)
        if ahead.max_staleness and not has_version(kept, number - 1):
            # Of older weights it shows how far the policy has moved, not a fault.
            learned.pop("learn/engine_gap", None)
        return replay.take_fresh(number, kept), dropped, lessons, learned

    run.display.phase("learning", 0, 1)
    with clock("learn"):
        kept, dropped, lessons, learned = await beside(ahead, learned_trees)
    # What was sampled in vain is recorded and counted like the rest.
    trees = kept + dropped
    with clock("publish"):
        await publisher.publish(number)
    ahead.begin(number)
    every = config.health.symptoms_every
    with clock("symptoms"):
        by_learner = config.loss.old_logprobs == "learner"
        is_due = every > 0 and number % every == 0
        measured = functools.partial(symptoms, learner, kept, has_own_scores=by_learner)
        shown_late = await beside(ahead, measured) if is_due else {}
    # After learning, so that traces of this update are never retrieved within it.
    added = buffer.grow(trees, number)
    if book is not None and buffer.is_own_alone:
        add_lessons(book, added, parts)
    sampler.take(number, trees)
    # The one place where the metrics of an update come together.
    metrics = (
        rollout_metrics(trees, sampled.references)
        | unused_metrics(trees, parts.explorer, config.explore.num_leaves)
        | sampled.metrics
        | learned
        | lessons.metrics
        | shown_late
        | publisher.check(number, learned.get("learn/engine_gap"))
    )
    # Taken once an update: each call starts counting anew.
    for part in (parts, grower, buffer, replay, sampler, clock):
        metrics |= part.take_metrics()
    if ahead.max_staleness:
        metrics |= staleness_metrics(trees, number - 1)
        metrics["time/overlap_s"] = max(0.0, grown.seconds - metrics["time/rollout_s"])
    state = publisher.state() | {"num_drawn": grown.num_drawn, "sampler": sampler.state or None}
    state |= {} if book is None else {"lesson_value": lessons.value}
    run.record_update(number, trees + sampled.references, metrics, state)


def lessons_of(
    run: Run, sampler: TaskSampler, book: LessonBook | None, trees: Sequence[Tree]
) -> Given:
    """Returns the lessons of the update that has grown these trees; none without a book."""
    if book is None:
        return Given([], (0, 0), {})
    earlier = sampler.drawn(num_drawn_before(run))
    value = run.state.lesson_value or (0.0, 0.0)
    return book.choose(trees, earlier, run.state.update + 1, value)


async def beside(ahead: Ahead, work: Callable[[], Result]) -> Result:
    """Returns the result of the learner's work; beside the event loop, where trees grow
    meanwhile."""
    return await in_thread(work, "treegraft-learn") if ahead.max_staleness else work()


def growing_ahead(
    run: Run, parts: TrainingParts, sampler: TaskSampler, grower: Grower, replay: Replay
) -> Ahead:
    """Returns what samples the updates that are left, ahead of learning as far as
    rollout.max_staleness allows."""
    config = run.config

    async def sample(number: int, num_drawn: int) -> Sampled:
        def show(done: int, num_tasks: int) -> None:
            # Not while an earlier update is learned or evaluated.
            if run.state.is_closed and number == run.state.update + 1:
                run.display.phase("rollout", done, num_tasks, str(grower.watch))

        return await sample_update(
            config,
            sampler,
            grower,
            number,
            num_drawn,
            size=config.run.tasks_per_update - replay.num_due,
            num_at_once=parts.num_trees_at_once(config.explore.num_leaves),
            on_progress=show,
        )

    depends = config.rollout.max_rounds > 1 or config.replay.fresh_frac < 1
    return Ahead(
        sample,
        max_staleness=config.rollout.max_staleness,
        first=run.state.update + 1,
        last=config.run.num_updates,
        num_drawn=num_drawn_before(run),
        num_known=None if depends else config.run.tasks_per_update,
    )


def num_drawn_before(run: Run) -> int:
    """Returns the training tasks drawn so far."""
    # Checkpoints of before rounds do not have it.
    drawn = run.state.num_drawn
    return run.state.update * run.config.run.tasks_per_update if drawn is None else drawn


async def evaluate_and_keep(run: Run, parts: Parts) -> None:
    """Evaluates, logs and keeps the state after an update, or before the first one (update 0),
    unless that is done."""
    if run.state.is_closed:
        return
    evaluated: dict[str, float] = {}
    if is_evaluation_due(run, parts):
        watch = Watch()
        with span("evaluation", update=run.state.update):
            evaluated = await run.interruptible(evaluate_update(run, parts, watch), waits_on=watch)
    run.keep_update(evaluated)


def is_evaluation_due(run: Run, parts: Parts) -> bool:
    """Returns whether the held-out tasks are evaluated after the present update."""
    settings, number = run.config.eval, run.state.update
    if not parts.eval_tasks:
        return False
    if number == 0:
        return settings.at_start
    is_last = number == run.config.run.num_updates
    return (settings.at_end and is_last) or bool(settings.every and number % settings.every == 0)


async def evaluate_update(run: Run, parts: Parts, watch: Watch) -> dict[str, float]:
    """Returns the metrics of the held-out tasks; their trees go to files of their own."""
    began, number = time.monotonic(), run.state.update
    evaluation = await evaluate(
        parts,
        parts.eval_tasks,
        number,
        watch=watch,
        on_progress=lambda *progress: run.display.phase("evaluation", *progress),
    )
    # Counts of the evaluation belong to no update.
    parts.take_metrics()
    for kind, trees in evaluation.passes.items():
        run.record(number, trees, kind)
    metrics = evaluation.metrics
    if is_warmup_evaluation_due(run, parts):
        run.log_warmup(metrics)
    if number == run.config.run.num_updates:
        metrics |= gain_since_start(run, evaluation)
    run.display.evaluated(f"update {number}" if number else "start", metrics)
    return metrics | {"time/eval_s": time.monotonic() - began}


def gain_since_start(run: Run, evaluation: Evaluation) -> dict[str, float]:
    """Returns how much better the end is than the start, where both were recorded."""
    metrics: dict[str, float] = {}
    run.written()
    for kind, after in evaluation.passes.items():
        path = run.folder.trees_path(0, kind)
        if path.exists() and run.state.update > 0:
            name = "eval/gain" if kind == "greedy" else "eval/gain_sampled"
            before = read_trees(path)
            if {tree.task.id for tree in before} != {tree.task.id for tree in after}:
                run.display.warn(f"{path} has other tasks than this evaluation: no {name}")
                continue
            gain, low, high = paired_gain(before, after)
            metrics |= {name: gain, f"{name}_low": low, f"{name}_high": high}
    return metrics


def keep_reference(run: Run, learner: LearnerLike) -> None:
    """Keeps the policy before the first update as the reference of the KL term, also after a
    resume."""
    if run.config.loss.kl_coef:
        learner.keep_reference(run.path / "reference", is_new=run.state.update == 0)


def checkpoint_writer(config: Config, parts: TrainingParts) -> Callable[[Path, TrainState], None]:
    """Returns the function that writes a checkpoint of the learner with a run's state."""

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


__all__ = ["RunResult", "sft", "train"]
